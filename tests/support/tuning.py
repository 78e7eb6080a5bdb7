"""Tunes a job that never ran, in this process; counts what was run."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from pathlib import Path

from support.jobs import simulated_job

from debubble.annexes.tune.loop import Budget
from debubble.annexes.tune.prospects import Scope
from debubble.annexes.tune.run import TuningRequest
from debubble.annexes.tune.setting import read_setting, read_template
from debubble.annexes.tune.trial import Bench, ProcessEnd, run_guarded

JOB = (sys.executable, str(Path(simulated_job.__file__)))
NOW = ("split=3,3,3,7", "microbatches=4")
PLACEHOLDERS = ("--split", "{split}", "--microbatches", "{microbatches}")


def play_here(words, environment, **rest):
    """Run the job in this process, where that will do: starting Python takes longer than it."""
    if words[: len(JOB)] != JOB or "--seconds" in words:
        return run_guarded(words, environment, **rest)
    began, code = time.monotonic(), 0
    with rest["log"].open("w") as output, contextlib.redirect_stderr(output):
        try:
            simulated_job.main(words[len(JOB) :], environment)
        except SystemExit as end:
            code = end.code or 0
        except simulated_job.Hangs:
            return ProcessEnd(code=None, seconds=rest["timeout_s"])
        except Exception:  # noqa: BLE001 (as a process does that ends with it)
            traceback.print_exc()
            code = 1
    return ProcessEnd(code=code, seconds=time.monotonic() - began)


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
    request = TuningRequest(bench=bench, server=None, budget=budget, scope=scope_of(**scope))
    return request.tune(None, "", on_start=lambda _chosen, _done: None, on_end=lambda _run: None)


def runs_of(bench):
    """What the job was told, run by run, as it wrote it down itself."""
    return (bench.folder.parent / "log").read_text().splitlines()
