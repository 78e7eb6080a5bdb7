"""What a meter writes is read: peers, clocks that differ, steps that overlap, what lies beside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import debubble
from debubble.annexes.watch.config import Source
from debubble.annexes.watch.sources import Scanner

HEADER = "step,pipeline,stage,microbatch,op,start_ns,duration_ns,rank,bytes,peer,memory_bytes,host"
EPOCH = 1_790_000_000_000_000_000
MS = 1_000_000
STEPS = 5
# Of each microbatch, in ms: when rank 1 asks for it and has it, when rank 0 does of its gradient.
ARRIVALS = ((0, 11, 20.5, 42), (41.5, 42, 62.5, 73))


def write_run(folder, *, ahead_ms=0, step_ms=100):
    """Write two ranks, two microbatches: F 10, B 20, wires of 1 ms; rank 1's clock is ahead."""
    rows = {0: [], 1: []}

    def row(rank, step, op, start, length, microbatch=-1, peer=-1):
        clock = EPOCH + (ahead_ms * MS if rank else 0) + step * step_ms * MS
        size = 4096 if peer >= 0 else -1
        rows[rank].append(
            f"{step},0,{rank},{microbatch},{op},{clock + int(start * MS)},{int(length * MS)},"
            f"{rank},{size},{peer},-1,host{rank}"
        )

    for step in range(STEPS):
        for number, (asked, there, asked_back, back) in enumerate(ARRIVALS):
            row(0, step, "F", 10 * number, 10, number)
            row(0, step, "forward-send", 10 * number + 10, 0.1, peer=1)
            row(1, step, "forward-recv", asked, there - asked, peer=0)
            row(1, step, "F", there, 10, number)
            row(1, step, "B", there + 10, 20, number)
            row(1, step, "backward-send", there + 30, 0.1, peer=0)
            row(0, step, "backward-recv", asked_back, back - asked_back, peer=1)
            row(0, step, "B", back, 20, number)
    folder.mkdir(parents=True)
    for rank, lines in rows.items():
        (folder / f"rank{rank}.csv").write_text("\n".join((HEADER, *lines, "")))
        (folder / f"rank{rank}.csv.debubble.json").write_text(
            json.dumps(
                {
                    "schema": "debubble.sidecar/1",
                    "rank": rank,
                    "world_size": 2,
                    "pipeline": {"schedule": "1f1b", "microbatches": 2},
                    "workload": {"tokens": 512},
                    "steps": {"after_s": [0.1] * STEPS},
                }
            )
        )
    return folder


def bubble(folder):
    return debubble.analyse(str(folder)).pipeline.bubble_fraction


def test_clocks_of_two_hosts_are_laid_together_by_the_messages(tmp_path):
    right = write_run(tmp_path / "right", step_ms=200)
    wrong = write_run(tmp_path / "wrong", step_ms=200, ahead_ms=5000)
    assert bubble(wrong) == pytest.approx(bubble(right), abs=0.02)
    offsets = [line.clock_offset_ns for line in debubble.analyse(str(wrong)).timeline.ranks]
    assert offsets[1] - offsets[0] == pytest.approx(-5000 * MS, abs=3 * MS)


def test_watch_takes_a_segment_in_as_soon_as_all_ranks_have_written(tmp_path):
    root = tmp_path / "meter"
    write_run(root / "20260131-235959-step000000020")
    (root / "rank0.prom").write_text("debubble_meter_steps_total 3\n")
    source = Source(name="job", folder=str(root), settle_s=3600.0)
    scanner = Scanner(source, lambda: 0.0)
    (ready,) = scanner.scan(())
    assert [Path(file).name for file in ready.files] == ["rank0.csv", "rank1.csv"]
    (root / "20260131-235959-step000000020" / "rank1.csv").unlink()
    assert Scanner(source, lambda: 0.0).scan(()) == ()
