"""Orders that were found, as torch sees them: its own checks, its own messages, its own runs."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support.orders import random_pipeline
from support.requirements import need_package

from debubble.plan.emit.order_file import format_with_messages
from debubble.plan.orders.construct import construct, rules
from debubble.timeline.schedules import format_order, parse_order

need_package("torch.distributed.pipelining.schedules")

from torch.distributed.pipelining.schedules import (
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _simulate_comms_compute,
    _validate_schedule,
)

JOB = Path(__file__).parents[1] / "support" / "jobs" / "ordered_job.py"
SIZES = [(4, 6, 1), (3, 6, 1), (3, 6, 2)]


@cache
def found_order(ranks, microbatches, chunks):
    """Return an order without a name: some backward passes cut, some not."""
    pipeline = random_pipeline(3, ranks, microbatches, chunks, room=chunks * microbatches)
    made = (construct(pipeline, rule) for rule in rules(pipeline) if rule.uncut == (ranks, 6))
    return next(filter(None, made))


def in_torchs_words(text):
    rows = csv.reader(io.StringIO(text))
    return {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), SIZES)
def test_torch_finds_the_order_valid_and_its_messages_arrive(ranks, microbatches, chunks):
    order = found_order(ranks, microbatches, chunks)
    actions = in_torchs_words(format_order(order))
    stages = ranks * chunks
    home = _validate_schedule(actions, ranks, stages, microbatches)
    lowered = _add_send_recv(actions, stage_to_rank=home.__getitem__, num_stages=stages)
    _simulate_comms_compute(lowered, stage_to_rank=home.__getitem__, num_stages=stages)


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), SIZES)
def test_messages_stand_in_the_file_where_torch_puts_them(ranks, microbatches, chunks):
    order = found_order(ranks, microbatches, chunks)
    actions = in_torchs_words(format_order(order))
    home = _validate_schedule(actions, ranks, ranks * chunks, microbatches)
    lowered = {
        rank: _add_reduce_grad(_add_unshard_reshard(own), microbatches)
        for rank, own in actions.items()
    }
    theirs = _add_send_recv(lowered, stage_to_rank=home.__getitem__, num_stages=ranks * chunks)
    written = format_with_messages(order)
    expected = [[str(cell) for cell in theirs[rank]] for rank in range(ranks)]
    # What torch gathers and frees of sharded parameters is no part of the file; it reduces between
    # two messages, for which that makes no difference.
    rows = [row.split(",") for row in written.splitlines()]
    no_messages = ("SHARD", "REDUCE")
    for ours, torchs in zip(rows, expected, strict=True):
        reduced = {cell for cell in torchs if "REDUCE" in cell}
        assert {cell for cell in ours if "REDUCE" in cell} == reduced
        assert [cell for cell in ours if "REDUCE" not in cell] == [
            cell for cell in torchs if not any(word in cell for word in no_messages)
        ]
    assert parse_order(written) == order


@pytest.mark.slow
def test_a_real_run_of_the_order_loses_what_1f1b_loses(tmp_path):
    order = found_order(3, 6, 1)
    plain, full = tmp_path / "order.csv", tmp_path / "messages.csv"
    plain.write_text(format_order(order), "utf-8")
    full.write_text(format_with_messages(order), "utf-8")
    out = tmp_path / "trained"
    done = subprocess.run(
        [
            sys.executable,
            str(JOB),
            str(out),
            str(plain),
            "compute_only",
            str(full),
            "compute_comms",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        by_1f1b, *by_files = json.loads(Path(f"{out}.{rank}").read_text("utf-8"))
        assert bool(by_1f1b[0]["losses"]) == (rank == 2)
        for found in by_files:
            for step, expected in zip(found, by_1f1b, strict=True):
                assert step["losses"] == pytest.approx(expected["losses"], rel=1e-5)
                assert step["gradients"] == pytest.approx(expected["gradients"], rel=1e-4)
