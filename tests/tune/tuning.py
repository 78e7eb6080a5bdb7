"""Tunes a job that never ran, in this process; counts what was run."""

from __future__ import annotations

import sys
from pathlib import Path

from debubble.cli.tune import heading_of
from debubble.tune.budget import Budget
from debubble.tune.journal import Journal
from debubble.tune.loop import Loop
from debubble.tune.prospects import Scope
from debubble.tune.setting import read_setting
from debubble.tune.template import read_template
from debubble.tune.trial import Bench

JOB = (sys.executable, str(Path(__file__).with_name("played_job.py")))
NOW = ("split=3,3,3,7", "microbatches=4")
PLACEHOLDERS = ("--split", "{split}", "--microbatches", "{microbatches}")


def bench_of(folder, *more, now=NOW, words=PLACEHOLDERS):
    template = read_template((*JOB, *words, "--log", str(folder / "log"), *more), read_setting(now))
    return Bench(template=template, steps=6, wait=0, folder=folder / "tune")


def scope_of(**more):
    usual = {
        "schedules": frozenset({"1f1b", "gpipe"}),
        "most_microbatches": 16,
        "hold": "microbatch",
        "limit_bytes": None,
        "threshold": 0.02,
    }
    return Scope(**(usual | more))


def tune(bench, *, runs=12, seconds=None, timeout_s=None, **scope):
    budget = Budget(runs=runs, seconds=seconds, timeout_s=timeout_s)
    with Journal(bench.folder, heading_of(bench)) as journal:
        loop = Loop(
            bench=bench,
            journal=journal,
            budget=budget,
            scope=scope_of(**scope),
            on_start=lambda _chosen, _done: None,
            on_end=lambda _run: None,
        )
        return loop.run()


def runs_of(bench):
    """What the job was told, run by run, as it wrote it down itself."""
    return (bench.folder.parent / "log").read_text().splitlines()
