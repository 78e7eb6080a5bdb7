"""Nothing of a capture ever reaches the job: an error is thrown at every call that it makes.

A job is played in this process, with a schedule, passes and losses of its own. Every call out of
debubble's own lines fails once, each in a run of its own: the job must not notice.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from support.faults import Fault, Throwing

import debubble
from debubble.capture import hooks, recording
from debubble.capture import session as in_session
from debubble.capture.settings import Settings

OURS = str(Path(recording.__file__).parent)
STEPS = 14
SETTINGS = {"steps": 2, "wait": 1, "every": 8, "keep": 1}


class Stage:
    """A stage of torch.distributed.pipelining, as far as captures look at one."""

    stage_index, num_stages, is_last = 0, 1, True

    def __init__(self):
        self.passes = []

    def forward_one_chunk(self, chunk, *_more):
        self.passes.append(("F", chunk))

    def backward_one_chunk(self, *, bwd_chunk_id):
        self.passes.append(("B", bwd_chunk_id))

    def backward_weight_one_chunk(self):
        """Run as no version of torch has it: a pass that cannot be named."""
        self.passes.append(("W", 0))


class Schedule:
    """And a schedule."""

    _n_microbatches = 2

    def __init__(self):
        self._stage = Stage()

    def step(self, batch):
        for chunk in range(self._n_microbatches):
            self._stage.forward_one_chunk(chunk)
            self._stage.backward_one_chunk(bwd_chunk_id=chunk)
        self._stage.backward_weight_one_chunk()
        return batch * 2 + len(self._stage.passes)


class Profiler:
    """In place of torch's, which takes longer than the job."""

    def start(self):
        pass

    step = stop = start

    def export_chrome_trace(self, path):
        Path(path).write_text('{"traceEvents": []}')


class Module:
    """What the hooks find in place of torch's own module."""

    __name__ = "torch.distributed.pipelining.schedules"
    PipelineScheduleSingle = None


class Loading:
    """And what loads it."""

    @staticmethod
    def exec_module(module):
        assert module is Module


def hooked(beat, _settings):
    """Run the job as `debubble capture -- COMMAND` does; return its losses."""
    schedule = type("ScheduleOfThisRun", (Schedule,), {"step": Schedule.step})
    Module.PipelineScheduleSingle = schedule
    hooks._CallingLoader(Loading, beat.hook_schedules).exec_module(Module)
    one = schedule()
    losses = [one.step(float(number)) for number in range(STEPS)]
    beat.end()
    assert len(one._stage.passes) == STEPS * 5
    return losses


def optimized(beat, _settings):
    """Run a job whose beat is an optimizer's."""
    losses = []
    for number in range(STEPS):
        losses.append(number / 3)
        beat._after_optimizer(beat, (), {})
    beat.end()
    return losses


def within(_beat, settings):
    """Run the job inside `with debubble.capture(...)`, which fails, if at all, at its start."""
    throwing, one = sys.getprofile(), Schedule()
    sys.setprofile(None)
    session = debubble.capture(one, **SETTINGS, out=settings.out).__enter__()
    sys.setprofile(throwing)
    losses = []
    for number in range(STEPS):
        losses.append(one.step(float(number)))
        debubble.step()
    session.__exit__(None, None, None)
    assert len(one._stage.passes) == STEPS * 5
    return losses


def play(job, folder, at):
    """Run a job with an error at one call; return its losses, and how many calls there are."""
    settings = Settings(**SETTINGS, out=folder)
    # Made as Python does at its start, where whatever fails is caught.
    beat = hooks.CapturedBeat(settings)
    try:
        with Throwing(OURS, at, lambda code: code.co_filename == __file__) as throwing:
            return job(beat, settings), throwing.count
    finally:
        in_session._running = None  # of a session whose start failed half-way


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
@pytest.mark.parametrize("job", [hooked, optimized, within])
def test_an_error_at_any_call_of_ours_leaves_the_job_as_it_is(tmp_path, monkeypatch, job):
    monkeypatch.setattr(recording, "_make_profiler", lambda _steps: Profiler())
    monkeypatch.setattr(recording, "uses_cuda", lambda: False)
    monkeypatch.setattr(logging.getLogger("debubble"), "disabled", True)
    expected, calls = play(job, tmp_path / "whole", 0)
    assert calls > 150
    assert len(list((tmp_path / "whole").glob("*/rank0.json.gz"))) == 1
    for at in range(1, calls + 1):
        losses, _ = play(job, tmp_path / f"at{at}", at)
        assert losses == expected, at


class Failing(Profiler):
    """A profiler that cannot be stopped."""

    def stop(self):
        raise RuntimeError("the profiler is gone")


def test_a_profiler_that_fails_as_the_loop_ends_does_not_reach_it(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "_make_profiler", lambda _steps: Failing())
    with debubble.capture(steps=4, wait=0, every=100, out=tmp_path) as session:
        for _ in range(7):  # the loop ends among the profiled steps
            debubble.step()
    assert any("the profiler is gone" in problem for problem in session.problems)


def test_a_module_that_cannot_be_hooked_is_loaded_as_it_is(tmp_path, monkeypatch, capsys):
    (tmp_path / "hooked_module_of_this_test.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "hooked_module_of_this_test"

    def fail(_module):
        raise Fault("no beat here")

    hook = hooks.AfterImport({name: fail})
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    assert importlib.import_module(name).VALUE == 3
    assert "no beat here" in capsys.readouterr().err
    del sys.modules[name]
    hook.targets[name] = fail
    monkeypatch.setattr(hooks, "_CallingLoader", fail)
    assert importlib.import_module(name).VALUE == 3


def test_what_nobody_foresaw_at_the_start_ends_no_job(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "prepare_out", lambda _out: 1 / 0)
    with debubble.capture(steps=1, wait=0, out=tmp_path) as session:
        for _ in range(5):
            debubble.step()
    assert session.problems == ["ZeroDivisionError: division by zero"]


class Wordless(Exception):
    """An error that fails when it is asked what it is."""

    def __str__(self):
        raise RuntimeError("no words")


def test_an_error_without_words_does_not_reach_the_step(capsys):
    beat = hooks.CapturedBeat(Settings(out=Path("nowhere")))
    beat.begin = beat.step = lambda *_: (_ for _ in ()).throw(Wordless())
    for _ in range(2):
        beat._after_optimizer(beat, (), {})
    assert "this process is not captured: Wordless" in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_without_stderr_runs_though_its_order_is_damaged(tmp_path):
    folder = Path(hooks.__file__).parent / "inject"
    program = tmp_path / "job.py"
    program.write_text("print('ran')\n")
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" "$1" 2>&-', sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(folder), "DEBUBBLE_CAPTURE": "damaged"},
        stdout=subprocess.PIPE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"ran\n")
