"""The core stands without its annexes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.services.console import REPOSITORY

# Folders that could be deleted, with the verbs that go with them; import-linter holds that nothing
# of the core imports them.
ANNEXES = ("annexes", "links.live", *(f"cli.{verb}" for verb in (
    "demo", "links", "mcp", "meter", "probe", "tune", "watch",
)))  # fmt: skip


@pytest.mark.slow
def test_the_core_analyses_finds_and_plans_with_every_annex_away():
    """In a process of its own: in this one other tests have imported them."""
    blocked = [f"debubble.{annex}" for annex in ANNEXES]
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
