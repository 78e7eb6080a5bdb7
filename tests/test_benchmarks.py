"""Benchmarks cannot rot: each does a moment's work here. What they measure is judged elsewhere."""

from __future__ import annotations

import re
import runpy
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
# The others do their work in whatever process they are called.
IN_A_PROCESS = {*NEEDS, "demo_load", "html_report", "read", "soak_watch", "watch_readers"}
# A guard against hanging, far above what a busy machine needs.
PATIENCE_S = 300


def benchmarks():
    return sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in PARTS)


@pytest.mark.parametrize("name", sorted({*benchmarks()} - IN_A_PROCESS))
def test_a_benchmark_still_runs(name, tmp_path, monkeypatch, capsys):
    """In this process: to start another takes longer than most of them do."""
    file = FOLDER / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(file), "--tiny"])
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("DEBUBBLE_HISTORY", f"sqlite:///{tmp_path}/history.db")
    monkeypatch.chdir(ROOT)
    code = None
    try:
        runpy.run_path(str(file), run_name="__main__")
    except SystemExit as end:
        code = end.code
    assert not code
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(IN_A_PROCESS))
def test_a_benchmark_that_starts_others_or_hooks_torch_still_runs(name):
    if name in NEEDS:
        need_package(NEEDS[name])
    if name == "html_report":
        need_program("chromium", "chromium-browser")
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), "--tiny"],
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
