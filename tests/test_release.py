"""A release that is ready to go: one version, one address, a wheel that is enough by itself."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from support.requirements import need_package
from support.traces.recordings import H200

import debubble

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# What the core must do without, wherever it is installed.
ANNEXES = (
    *("torch", "pandas", "sqlalchemy", "distributed", "pyarrow", "prometheus_client"),
    *("mcp", "mcp_types", "anyio", "pydantic"),
)


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_one_version():
    assert set(tool("release_check").versions().values()) == {debubble.__version__}
    assert "version" in PROJECT["dynamic"]


def test_there_is_one_address_and_every_file_has_it():
    home = PROJECT["urls"]["Homepage"]
    for file in ("CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml"):
        found = re.findall(r"https://github\.com/[\w-]+/[\w-]+", (ROOT / file).read_text("utf-8"))
        assert set(found) == {home}, file


def test_every_python_that_is_named_is_tried_by_the_workflow():
    named = {
        line.rpartition(" ")[2]
        for line in PROJECT["classifiers"]
        if re.search(r"Python :: 3\.\d+$", line)
    }
    flow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    assert set(flow["jobs"]["wheel"]["strategy"]["matrix"]["python"]) == named


def workflows():
    return sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("file", workflows(), ids=lambda file: file.stem)
def test_a_workflow_may_no_more_than_it_needs_and_runs_what_there_is(file):
    flow = yaml.safe_load(file.read_text("utf-8"))
    assert flow["permissions"] == {"contents": "read"}
    for job in flow["jobs"].values():
        for step in job["steps"]:
            words = step.get("run", "")
            # A title or a branch of a stranger's must not become a word of the shell.
            assert "${{" not in words
            for path in re.findall(r"(?:tools|\.ci)/[\w./]+", words):
                assert (ROOT / path).is_file(), path


def test_only_publishing_may_ask_the_index_for_trust():
    flow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
    trusted = [
        name for name, job in flow["jobs"].items() if "id-token" in job.get("permissions", {})
    ]
    assert trusted == ["publish"]
    assert flow["jobs"]["publish"]["environment"]["name"] == "pypi"
    assert "password" not in (ROOT / ".github/workflows/release.yml").read_text().split("jobs:")[1]


@pytest.mark.slow
def test_from_the_wheel_alone_traces_become_a_verdict(tmp_path):
    need_package("build")
    need_package("hatchling")
    words = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    [described] = [name for name in names if name.endswith(".dist-info/METADATA")]
    text = zipfile.ZipFile(wheel).read(described).decode()
    # The index has no files beside the page: every link has an address, and its file is released.
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 20
    home = f"{PROJECT['urls']['Homepage']}/"
    for link in links:
        kind, version, path = link.removeprefix(home).split("#")[0].split("/", 2)
        assert (kind in {"blob", "raw"}, version) == (True, f"v{debubble.__version__}"), link
        assert (ROOT / path).is_file(), link
    release = tool("release_check")
    assert [name for name in release.IN_THE_WHEEL if name not in names] == []
    zipfile.ZipFile(wheel).extractall(tmp_path / "alone")
    done = subprocess.run(
        [sys.executable, "-m", "debubble", "find", str(H200 / "1f1b_p3_m7"), "--json=brief"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "alone")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["numbers"]["bubble_fraction"] == pytest.approx(0.4, abs=0.01)


WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {annexes!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import debubble
run = debubble.analyse({run!r})
debubble.find(run); debubble.links(run); debubble.plan(run); debubble.simulate(run, microbatches=14)
debubble.compare(run, run)
from debubble.cli import main
sys.exit(main(["mcp", {run!r}]))
"""


@pytest.mark.slow
def test_the_core_does_without_any_extra_and_an_agent_is_told_which_to_install():
    program = WITHOUT.format(annexes=ANNEXES, run=str(H200 / "1f1b_p2_m4"))
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "error: serving agents needs the package mcp",
        "",
        "hint: pip install 'debubble[mcp]'",
    ]


@pytest.mark.slow
def test_help_imports_click_and_no_verb():
    look = (
        "import sys, runpy, contextlib\n"
        "sys.argv = ['debubble', '--help']\n"
        "with contextlib.suppress(SystemExit): runpy.run_module('debubble', run_name='__main__')\n"
        "own = sorted(n for n in sys.modules if n.startswith('debubble'))\n"
        "print(own, [n for n in ('numpy', 'msgspec', 'rich', 'fsspec', 'mcp') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True)
    *_, last = done.stdout.splitlines()
    assert last == ("['debubble', 'debubble.cli', 'debubble.errors', 'debubble.units'] []")
