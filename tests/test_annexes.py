"""The core stands without its annexes, and each annex is reached through one door."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest
from support.services.console import REPOSITORY

SOURCE = REPOSITORY / "src"

# By annex: what is deleted with it beside its folder, its verb among it, and the door that it takes
# beside its answers and its report.
ANNEXES = {
    "debubble.annexes.mcp": (("debubble.cli.mcp",), "debubble.annexes.mcp"),
    "debubble.annexes.tune": (
        ("debubble.cli.tune", "debubble.cli.demo"),
        "debubble.annexes.tune.run",
    ),
    "debubble.annexes.watch": (("debubble.cli.watch",), "debubble.annexes.watch.run"),
    "debubble.annexes.meter": (("debubble.cli.meter",), "debubble.annexes.meter.settings"),
    "debubble.annexes.demo": (("debubble.cli.demo",), "debubble.annexes.demo.workload"),
    "debubble.annexes.probe": (("debubble.cli.probe",), "debubble.annexes.probe.pipeline"),
    "debubble.annexes.cluster": ((), "debubble.annexes.cluster"),
    "debubble.links.live": (
        ("debubble.cli.links", "debubble.links.__main__", "debubble.report.answers.link_tests",
         "debubble.report.link_tests"),
        "debubble.links.live",
    ),
}  # fmt: skip
# No verb is the cluster's own: who is told of an engine that is not this machine asks for it then.
TOLD_OF_ENGINES = {"debubble.cli.options", "debubble.api"}
# A list of all answers that have a schema; it is no part of what answers.
SCHEMAS = "debubble.report.answers.schema"


@cache
def modules():
    """Every module of the package, with what it imports, wherever in it that stands."""
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        imported = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found.append((name, imported))
    return found


def belongs_to(name, annex):
    return name == annex or name.startswith(f"{annex}.")


@pytest.mark.parametrize("annex", ANNEXES)
def test_an_annex_is_imported_by_its_verb_and_pages_alone_and_through_its_door(annex):
    others = [known for known in ANNEXES if known != annex]
    users = {*ANNEXES[annex][0], *(page for other in others for page in ANNEXES[other][0])}
    for name, imported in modules():
        taken = {module for module in imported if belongs_to(module, annex)} - {annex}
        if belongs_to(name, annex) or name == SCHEMAS or not taken:
            continue
        if annex == "debubble.annexes.cluster" and name in TOLD_OF_ENGINES:
            continue
        assert name in users or any(belongs_to(name, other) for other in others), (name, taken)
        if name.startswith("debubble.cli."):
            doors = (ANNEXES[annex][1], f"{annex}.answers", f"{annex}.report")
            assert all(any(belongs_to(module, door) for door in doors) for module in taken), taken


@pytest.mark.slow
def test_the_core_analyses_finds_and_plans_with_every_annex_away():
    """In a process of its own: in this one other tests have imported them."""
    blocked = [*ANNEXES, *(page for pages, _ in ANNEXES.values() for page in pages)]
    recording = REPOSITORY / "tests" / "data" / "h200" / "1f1b_p2_m4"
    program = f"""
        import sys
        class Away:
            def find_spec(self, name, path=None, target=None):
                if any(name == away or name.startswith(away + ".") for away in {blocked!r}):
                    raise ImportError(name + " is away")
        sys.meta_path.insert(0, Away())
        import debubble
        run = debubble.analyse({str(recording)!r})
        assert debubble.find(run).numbers.bubble_fraction > 0
        assert debubble.plan(run).options
        assert debubble.links(run).hops
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    assert ended.returncode == 0, ended.stderr
