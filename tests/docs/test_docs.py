"""Docs cannot rot: every command in them is run, every flag, code and verb has its heading."""

from __future__ import annotations

import importlib
import re

import pytest
from support.services.console import REPOSITORY, matches, type_command

from debubble.cli import VERBS
from debubble.errors import Code
from debubble.ledger.causes import Cause
from debubble.plan.emit import EMITTERS
from debubble.report.answers.brief import SELECTED

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def sessions():
    """Each `$ command` of each console block, with the output shown under it."""
    for page in PAGES:
        for block in CONSOLE.findall(page.read_text("utf-8")):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                yield pytest.param(page.stem, command, shown, id=f"{page.stem}: {command}")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """One folder a page: its commands follow each other."""
    folders = {}

    def make(page):
        if page not in folders:
            folders[page] = tmp_path_factory.mktemp(page)
        return folders[page]

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command", "shown"), list(sessions()))
def test_every_command_in_the_docs_prints_what_the_docs_show(page, command, shown, folder_of):
    answer = type_command(command, folder_of(page))
    assert matches(shown, answer.text), answer.text


def run_python(page, tmp_path, monkeypatch):
    """Run all Python of a page, block after block; return what it named."""
    text = (REPOSITORY / "docs" / page).read_text("utf-8")
    (tmp_path / "tests").symlink_to(REPOSITORY / "tests")
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(block, names)  # noqa: S102 (our own documentation)
    return names


def test_the_python_in_the_reference_runs(tmp_path, monkeypatch, capsys):
    names = run_python("reference/python.md", tmp_path, monkeypatch)
    assert names["found"].ledger.shares["turnaround"] == pytest.approx(0.09, abs=0.01)
    assert "Ranks wait 25 % of the batch" in capsys.readouterr().out


@pytest.mark.slow
def test_the_notebook_page_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pandas", reason="pandas is not installed: pip install 'debubble[dev]'")
    names = run_python("how-to/use-a-notebook.md", tmp_path, monkeypatch)
    assert names["picture"].startswith("<svg")
    assert names["ledger"].sum(axis=1).tolist() == pytest.approx([1.0] * 3)
    assert names["savings"]["saved_s"].is_monotonic_decreasing
    assert len(names["options"]) > 3
    assert names["deeper"].numbers.batch_latency_s > names["found"].numbers.batch_latency_s
    assert "No clear change" in capsys.readouterr().out


def test_the_figures_for_trackers_in_the_docs_are_what_find_says(tmp_path, monkeypatch):
    names = run_python("how-to/use-from-agents-and-ci.md", tmp_path, monkeypatch)
    assert names["values"]["bubble_fraction"] == pytest.approx(0.404, abs=0.001)


def headings(page, folder="reference"):
    return " ".join(HEADING.findall((REPOSITORY / "docs" / folder / page).read_text("utf-8")))


# Explained once: what reads traces takes these, or every verb does.
EVERYWHERE = {
    *("--json", "--markdown", "--strict", "--quiet", "--capture"),
    *("--engine", "--digest", "--pipeline"),
}


def flags_of(command):
    options = [one for one in command.params if one.param_type_name == "option"]
    return [max(option.opts, key=len) for option in options]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_each_of_its_flags_has_a_heading(verb):
    titles = headings("command-line.md")
    assert f"`debubble {verb}" in titles
    command = importlib.import_module(f"debubble.cli.{verb}").command
    for flag in flags_of(command):
        assert f"`{flag}" in titles
    shared = f"`{verb} --"
    for name, inner in getattr(command, "commands", {}).items():
        for flag in flags_of(inner):
            where = [f"`{verb} {name} {flag}", f"{shared}{flag.removeprefix('--')}"]
            # `links TRACES` is `links read TRACES`: its flags are the verb's own.
            where += [f"`{flag}"] if name == "read" else []
            known = any(one in titles for one in where) or flag in EVERYWHERE
            assert known, f"{verb} {name} {flag}"


def test_every_cause_has_a_heading_and_no_other_is_claimed():
    assert set(re.findall(r"`(\w+)`", headings("causes.md"))) == set(Cause)


def test_every_framework_that_can_be_written_for_has_a_heading():
    titles = headings("frameworks.md", folder="how-to")
    names = {name.partition("@")[0] for name in EMITTERS} - {"csv"}
    assert set(re.findall(r"`([^`]+)`", titles)) == names


def glossary_words():
    page = (REPOSITORY / "docs" / "reference" / "glossary.md").read_text("utf-8")
    return re.findall(r"^- \*\*(.*?)\*\*( \(cause\))?:", page, re.MULTILINE)


def test_the_glossary_explains_every_cause_and_no_other():
    causes = {word.strip("`") for word, marked in glossary_words() if marked}
    assert causes == set(Cause)


def test_the_glossary_is_in_order_and_explains_each_word_once():
    plain = [word.strip("`").replace("_", " ").lower() for word, _ in glossary_words()]
    assert plain == sorted(plain)
    assert len(set(glossary_words())) == len(plain) > 90


def anchors_of(page):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = HEADING.findall(page.read_text("utf-8"))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_heading_that_a_page_points_to_is_there_on_github_too():
    lost = []
    for page in PAGES:
        links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text("utf-8"))
        for target, anchor in links:
            there = (page.parent / target).resolve() if target else page
            if not there.is_file() or anchor not in anchors_of(there):
                lost.append(f"{page.name}: {target}#{anchor}")
    assert lost == []


def test_every_file_that_the_readme_points_to_is_there():
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", readme)
    assert len(targets) > 10
    assert [one for one in targets if not (REPOSITORY / one).is_file()] == []


def test_the_architecture_names_every_room_and_only_files_that_are_there():
    page = (REPOSITORY / "docs" / "development" / "architecture.md").read_text("utf-8")
    package = REPOSITORY / "src" / "debubble"
    rows = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    told = {name.rstrip("/") for row in rows for name in re.findall(r"`([\w./]+)`", row)}
    rooms = {entry.name for entry in package.iterdir() if entry.suffix == ".py" or entry.is_dir()}
    assert told == {name for name in rooms if not name.startswith("__")}
    folders = ("src", "tests", "benchmarks", "tools")
    files = [str(path) for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    assert len(named) > 20
    lost = [name for name in named if not any(file.endswith(f"/{name}") for file in files)]
    assert lost == []


@pytest.mark.parametrize("code", list(Code))
def test_every_warning_has_a_heading(code):
    assert f"`{code}`" in headings("warnings.md")


def test_no_heading_is_about_a_warning_that_does_not_exist():
    assert set(re.findall(r"`(\w+)`", headings("warnings.md"))) == set(Code)


def test_every_json_schema_has_a_heading():
    for verb in VERBS.keys() - {"mcp"}:  # it answers as the others do
        assert f"debubble.{verb}/1" in headings("json.md")
    page = (REPOSITORY / "docs" / "reference" / "json.md").read_text("utf-8")
    for selected in SELECTED.values():
        assert f"| `{' '.join(selected.split())}` |" in page
