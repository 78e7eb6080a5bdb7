from __future__ import annotations

import importlib.util
import os
import signal
import time
from dataclasses import replace

import pytest

from debubble.annexes.demo import Workload, run_workload
from debubble.annexes.demo.layers import read_truth
from debubble.errors import DemoError, MissingExtra, UsageError

# Forward-only needs no optimizer, whose import is half of what a small run takes.
SMALL = Workload(
    ranks=3, layers=(1, 1, 1), microbatches=3, schedule="forward-only", forward_ms=1, steps=1
)

# Left alone, it would run for 40 s; whoever kills it is through in a few.
LONG = replace(SMALL, forward_ms=2000)
SOON_S = 30


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty") as refusal:
        run_workload(SMALL, tmp_path)
    assert "--force" in refusal.value.hint
    assert [file.name for file in tmp_path.iterdir()] == ["precious.txt"]


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    file = tmp_path / "out"
    file.write_text("")
    with pytest.raises(UsageError, match="is a file"):
        run_workload(SMALL, file)


def test_without_torch_the_cure_is_named_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtra) as refusal:
        run_workload(SMALL, tmp_path / "out")
    assert refusal.value.hint == "pip install 'debubble[torch]'"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_crash_names_the_rank_and_its_last_words_and_leaves_no_process(tmp_path, ranks_alive):
    with pytest.raises(DemoError, match="rank 2 was asked to fail") as crash:
        run_workload(replace(SMALL, fail_rank=2), tmp_path)
    assert crash.value.rank == 2
    assert str(tmp_path / "rank2.log") in crash.value.hint
    assert "Traceback" in (tmp_path / "rank2.log").read_text()
    assert ranks_alive(tmp_path) == []
    assert {file.name for file in tmp_path.iterdir()} == {f"rank{rank}.log" for rank in range(3)}


@pytest.mark.slow
def test_a_rank_killed_from_outside_is_blamed_and_not_its_neighbours(tmp_path, ranks_alive):
    endless = replace(SMALL, forward_ms=20, warmup=10_000)

    def kill_one(done, _all):
        alive = sorted(ranks_alive(tmp_path))
        if done > 1 and len(alive) == 3:  # once: on a busy machine its end takes a while to show
            os.kill(alive[1], signal.SIGKILL)

    with pytest.raises(DemoError, match="signal 9") as crash:
        run_workload(endless, tmp_path, on_progress=kill_one)
    assert crash.value.rank == 1
    assert ranks_alive(tmp_path) == []


@pytest.mark.slow
def test_when_the_time_runs_out_every_rank_is_killed(tmp_path, ranks_alive):
    seen = []
    begin = time.monotonic()
    with pytest.raises(DemoError, match="not through after 1 s") as late:
        run_workload(
            LONG, tmp_path, timeout_s=1, on_progress=lambda *_: seen.append(ranks_alive(tmp_path))
        )
    assert late.value.hint
    assert max(len(alive) for alive in seen) == 3
    assert ranks_alive(tmp_path) == []
    assert time.monotonic() - begin < SOON_S


@pytest.mark.slow
def test_an_interrupt_kills_every_rank(tmp_path, ranks_alive):
    def interrupt(_done, _all):
        if len(ranks_alive(tmp_path)) == 3:
            raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_workload(LONG, tmp_path, on_progress=interrupt)
    assert ranks_alive(tmp_path) == []
    assert time.monotonic() - begin < SOON_S


@pytest.mark.slow
def test_a_forced_run_replaces_an_earlier_one_and_spares_what_is_not_its_own(tmp_path):
    (tmp_path / "rank7.pt.trace.json.gz").write_text("of a run with eight ranks")
    (tmp_path / "precious.txt").write_text("mine")
    progress = []
    traces = run_workload(
        SMALL, tmp_path, force=True, on_progress=lambda *done: progress.append(done)
    )
    names = {file.name for file in tmp_path.iterdir()}
    truths = {f"truth{rank}.json" for rank in range(3)}
    assert names == {"precious.txt", *(file.name for file in traces)} | truths
    assert {total for _, total in progress} == {SMALL.all_steps}
    assert progress == sorted(progress)
    steps = read_truth(tmp_path / "truth1.json").steps
    assert [step.phase for step in steps] == [
        "unprofiled",
        "unprofiled",
        "profiler-warm-up",
        "profiled",
    ]
    assert {done.kind for step in steps for done in step.passes} == {"F"}
