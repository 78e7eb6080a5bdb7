"""Tunes a job that never ran, in this process; counts what was run."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

from support.jobs import simulated_job

from debubble.annexes.tune.loop import tune
from debubble.annexes.tune.process import ProcessEnd, run_guarded
from debubble.annexes.tune.setting import read_setting, read_template
from debubble.annexes.tune.task import Budget, Scope, Task

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


def task_of(folder, *more, now=NOW, words=PLACEHOLDERS):
    template = read_template((*JOB, *words, "--log", str(folder / "log"), *more), read_setting(now))
    return Task(
        template=template,
        steps=6,
        wait=0,
        folder=folder / "tune",
        budget=Budget(runs=12),
        scope=Scope(most_microbatches=16, hold="microbatch"),
    )


def tune_task(task, *, runs=12, seconds=None, **scope):
    task = replace(
        task,
        budget=Budget(runs=runs, seconds=seconds),
        scope=replace(task.scope, **scope),
    )
    return tune(task, on_start=lambda _chosen, _number: None, on_end=lambda _run: None)


def runs_of(task):
    """What the job was told, run by run, as it wrote it down itself."""
    return (task.folder.parent / "log").read_text().splitlines()
