"""Whatever fails inside the meter, the job runs as if there were none."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.faults import Throwing
from support.process_group import Group, Work
from support.processes import wait_until
from support.requirements import need_package

need_package("torch")

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import debubble
from debubble.annexes.meter import hooks, output, running
from debubble.annexes.meter.record import HostClock, Recorder
from debubble.annexes.meter.session import MeterBeat
from debubble.annexes.meter.settings import Settings
from debubble.capture.files import keep_newest

OURS = str(Path(debubble.__file__).parent)
STEPS = 3
JOBS = {
    "step",
    "forward_one_chunk",
    "backward_one_chunk",
    "forward_maybe_with_nosync",
    "_engine_run_backward",
    "_maybe_compute_loss",
    "send",
    "wait",
    "_start_coalescing",
    "_end_coalescing",
}


def is_jobs_own(code):
    """Tell what we stand around, where an error is the job's own; and the net itself."""
    if code in (hooks.Harmless.__enter__.__code__, hooks.Harmless.__exit__.__code__):
        return True
    return code.co_name in JOBS and not code.co_filename.startswith(OURS)


@pytest.fixture(scope="module")
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def schedule(world):  # noqa: ARG001 (a stage needs a group)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    made = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    made.model = model
    return made


def losses(schedule):
    """Run the job; its loss goes down in a way of its own."""
    with torch.no_grad():
        for number, weight in enumerate(schedule.model.parameters()):
            weight.fill_(0.1 * (number + 1))
    optimizer = torch.optim.SGD(schedule.model.parameters(), lr=0.1)
    found = []
    for _ in range(STEPS):
        batch, given = torch.ones(4, 4), []
        schedule.step(batch, target=2 * batch, losses=given)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(torch.stack(given).mean().detach()))
    return found


def beat_of(folder, logger=None, **settings):
    beat = MeterBeat(Settings(out=folder, segment=2, **settings), logger)
    beat.start()
    beat.listen()
    return beat


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_at_any_call_of_ours_leaves_the_job_as_it_is(tmp_path, schedule, monkeypatch):
    monkeypatch.setattr(running, "CLOSE_S", 0.0)
    monkeypatch.setattr(threading.Thread, "start", lambda _thread: None)  # its calls are its own
    monkeypatch.setattr(threading.Thread, "join", lambda _thread, _time=None: None)
    expected = losses(schedule)
    before = threading.active_count()

    def play(at):
        beat = beat_of(tmp_path / str(at))
        with Throwing(OURS, at, is_jobs_own) as throwing:
            found = losses(schedule)
            beat.meter.close()
        beat.undo.close()  # of one that fell silent
        return found, throwing.last, beat.meter

    found, calls, meter = play(0)
    assert found == expected
    assert meter.problem is None
    assert len(calls) > 150
    for at in calls.values():
        found, _, _ = play(at)
        assert found == expected, at
    assert threading.active_count() == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_at_any_call_around_messages_lets_them_through(monkeypatch):
    monkeypatch.setattr(hooks.dist, "get_process_group_ranks", lambda _group: [0, 1])
    tensor = [torch.zeros(4)]

    def play(at):
        errors = []
        around = hooks.Hooks(Recorder(HostClock()), fail=errors.append)
        around.place = hooks.Place(rank=1, ranks=(0, 1))
        around._hook_messages(SimpleNamespace(ProcessGroup=Group, Work=Work))
        around.recorder.beat()
        group = Group()
        with Throwing(OURS, at, is_jobs_own) as throwing:
            answers = [group.recv(tensor, 0, 0).wait(), group.send(tensor, 0, 0).wait()]
            group._start_coalescing(None)
            group.send(tensor, 0, 0)
            group.recv(tensor, 0, 0)
            answers.append(group._end_coalescing(None).wait())
        around.remove()
        return (answers, group.sent), throwing.last, errors

    told, calls, errors = play(0)
    assert (told, errors) == ((["there"] * 3, 4), [])
    assert len(calls) > 20
    failed = 0
    for at in calls.values():
        told, _, errors = play(at)
        assert told == (["there"] * 3, 4), at
        failed += bool(errors)
    assert failed > 15


def test_a_full_disk_is_said_once_and_the_job_goes_on(tmp_path, schedule, monkeypatch, capfd):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    expected = losses(schedule)
    monkeypatch.setattr(output, "replacing", full)
    beat = beat_of(tmp_path)
    losses(schedule)
    found = losses(schedule)
    wait_until(lambda: beat.meter.problem)
    found_after = losses(schedule)
    assert found == found_after == expected
    assert "No space left" in beat.meter.problem
    beat.meter.close()
    assert capfd.readouterr().err.count("the meter is silent") == 1


def test_a_dead_logger_is_asked_no_more_and_the_meter_goes_on(tmp_path, schedule, monkeypatch):
    monkeypatch.setattr(running, "LINE_S", 0.0)
    asked = []

    def dead(values, step):
        asked.append((values, step))
        raise ConnectionError("the logger is gone")

    beat = beat_of(tmp_path, dead)
    losses(schedule)
    wait_until(lambda: asked)
    wait_until(lambda: beat.meter._logger is None)
    losses(schedule)
    beat.meter.close()
    assert beat.meter.problem is None
    assert len(asked) == 1
    assert "debubble/busy_seconds" in asked[0][0]
    assert list(tmp_path.glob("*/rank0.csv"))


def test_a_logger_that_never_answers_holds_up_neither_the_job_nor_its_end(
    tmp_path, schedule, monkeypatch
):
    monkeypatch.setattr(running, "LINE_S", 0.0)
    monkeypatch.setattr(running, "CLOSE_S", 0.1)
    expected, asked, answers = losses(schedule), threading.Event(), threading.Event()

    def hang(_values, _step):
        asked.set()
        answers.wait()

    beat = beat_of(tmp_path, hang)
    try:
        wait_until(lambda: losses(schedule) == expected and asked.is_set())
        assert losses(schedule) == expected
        beat.meter.close()
        assert beat.meter._thread.is_alive()  # it still waits for the answer
    finally:
        answers.set()
        beat.meter._thread.join(10)


@pytest.mark.slow
def test_a_forked_worker_writes_nothing_and_says_nothing(tmp_path, schedule):
    beat = beat_of(tmp_path)
    losses(schedule)
    child = os.fork()
    if not child:
        beat.meter.step()
        beat.meter.close()
        os._exit(0 if beat.meter._recorder.pending == 0 and beat.meter._off else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    losses(schedule)
    beat.meter.close()
    assert beat.meter.problem is None
    steps = set()
    for table in tmp_path.glob("*/rank0.csv"):
        steps |= {line.split(",")[0] for line in table.read_text().splitlines()[1:]}
    assert len(steps) == 2 * STEPS


def test_tables_of_a_rank_are_whole_and_as_many_as_are_kept(tmp_path, schedule):
    beat = beat_of(tmp_path, keep=2)
    for _ in range(3):
        losses(schedule)
    beat.meter.close()
    names = sorted(path.parent.name[-2:] for path in tmp_path.glob("*/rank0.csv"))
    assert names == ["06", "08"]
    assert not list(tmp_path.rglob("*.partial"))
    first = next(iter(sorted(tmp_path.glob("*/rank0.csv")))).read_text().splitlines()
    assert first[0] == output.HEADER
    kinds = [line.split(",")[4] for line in first[1:]]
    assert (kinds.count("F"), kinds.count("B"), kinds.count("optimizer")) == (4, 4, 2)


def test_a_loop_of_its_own_says_its_passes(tmp_path, world):  # noqa: ARG001 (ranks have a group)
    meter = debubble.meter(out=tmp_path, on_drift=False)
    meter.step()
    for _ in range(3):
        for microbatch in range(2):
            with meter.forward(0):
                time.sleep(0.001)
            with meter.backward(0, microbatch):
                time.sleep(0.001)
        meter.step()
    meter.close()
    (table,) = tmp_path.glob("*/rank0.csv")
    rows = [line.split(",") for line in table.read_text().splitlines()[1:]]
    assert [(row[0], row[3], row[4]) for row in rows[:4]] == [
        ("0", "0", "F"),
        ("0", "0", "B"),
        ("0", "1", "F"),
        ("0", "1", "B"),
    ]
    assert all(int(row[6]) >= 1_000_000 for row in rows)


def test_tables_that_were_moved_away_and_left_a_link_stay(tmp_path):
    job, out = "20260131-235959", tmp_path / "out"
    away = tmp_path / "away"
    away.mkdir()
    (away / "rank0.csv").write_text("dear")
    out.mkdir()
    (out / f"{job}-step000000000").symlink_to(away)
    for first in range(20, 80, 20):
        (out / f"{job}-step{first:09}").mkdir()
        (out / f"{job}-step{first:09}" / "rank0.csv").touch()
    keep_newest(out, "rank0.csv", 2, spared=())
    assert sorted(path.name[-2:] for path in out.iterdir()) == ["00", "40", "60"]
    assert (away / "rank0.csv").read_text() == "dear"
