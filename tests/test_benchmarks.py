"""Benchmarks cannot rot: each does a moment's work here. What they measure is judged elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.requirements import need_package, need_program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"
# What is imported or started by the others.
PARTS = {"fleet_traces", "floor", "large_trace", "read_parts", "watch_service"}
NEEDS = {
    "capture": "torch",
    "capture_cuda": "torch",
    "dask_engine": "distributed",
    "meter": "torch",
    "meter_cuda": "torch",
    "probe": "torch",
}
# A guard against hanging, far above what a busy machine needs.
PATIENCE_S = 300


def benchmarks():
    return sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in PARTS)


@pytest.mark.parametrize("name", benchmarks())
def test_a_benchmark_still_runs(name, tmp_path):
    if name in NEEDS:
        need_package(NEEDS[name])
    if name == "html_report":
        need_program("chromium", "chromium-browser")
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), "--tiny"],
        env=os.environ | {"DEBUBBLE_HISTORY": f"sqlite:///{tmp_path}/history.db"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_every_part_belongs_to_a_benchmark():
    told = "\n".join((FOLDER / f"{name}.py").read_text("utf-8") for name in benchmarks())
    for part in PARTS:
        assert part in told


def test_make_runs_no_benchmark_that_is_not_there():
    asked = re.findall(r"benchmarks/(\w+)\.py", (ROOT / "Makefile").read_text("utf-8"))
    assert set(asked) <= set(benchmarks())
