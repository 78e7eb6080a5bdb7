"""The house stays small enough to be held in the head: counted by `tools/house.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_find_walks_through_the_files_that_the_docs_name():
    four_ranks = ROOT / "tests" / "data" / "h200" / "fwd_closed_m4"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "house.py"), str(four_ranks)],
        check=True,
        capture_output=True,
        text=True,
    )
    counted = json.loads(done.stdout)
    assert {"fleet/survey.py", "timeline/build.py", "answers/find.py"} <= set(counted["path"])
