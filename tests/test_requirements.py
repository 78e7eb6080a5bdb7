"""A test that lacks something says what to install; where that is said to be there, it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.requirements import VARIABLE

TESTS = """
from pathlib import Path
from support.requirements import need_package, need_program
from support.traces.recordings import existing

def test_of_a_package():
    need_package("no_such_package")

def test_of_a_program():
    need_program("no-such-program")

def test_of_a_recording():
    existing(Path("/no/such/recording"))
"""
WORDS = ("-p", "support.requirements", "-p", "no:cacheprovider", "--continue-on-collection-errors")
MODULE = """
from support.requirements import need_package
need_package("no_such_package")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("installed", "counted"),
    [
        ("", "4 skipped"),
        ("pip", "1 failed, 2 skipped, 1 error"),
        ("no-such-program", "1 failed, 3"),
    ],
)
def test_a_skip_becomes_a_failure_where_it_must_not_be(installed, counted, tmp_path):
    (tmp_path / "test_parts.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(MODULE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *WORDS],
        env=os.environ | {VARIABLE: installed, "PYTHONPATH": _path()},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert counted in done.stdout.splitlines()[-1]


def _path():
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(Path(__file__).parent), *filter(None, [inherited])])
