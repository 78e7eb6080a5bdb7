"""A short run of the fuzzer."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fuzz import fuzz_reader


@pytest.mark.slow
def test_three_hundred_damaged_traces_are_read_or_refused(tmp_path):
    command = [sys.executable, fuzz_reader.__file__, "--cases", "300", "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "300 cases, seed 20260101: 0 findings" in done.stdout
