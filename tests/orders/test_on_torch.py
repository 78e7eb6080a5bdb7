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
from support.simulator.posted import words_of

from debubble.plan.orders.construct import construct, rules
from debubble.simulate.communication import Communication
from debubble.simulate.planned import plan_program
from debubble.timeline.schedules import format_order

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
def test_messages_are_posted_where_torch_puts_them(ranks, microbatches, chunks):
    order = found_order(ranks, microbatches, chunks)
    actions = in_torchs_words(format_order(order))
    home = _validate_schedule(actions, ranks, ranks * chunks, microbatches)
    lowered = {
        rank: _add_reduce_grad(_add_unshard_reshard(own), microbatches)
        for rank, own in actions.items()
    }
    theirs = _add_send_recv(lowered, stage_to_rank=home.__getitem__, num_stages=ranks * chunks)
    program = plan_program(order, Communication.RUNTIME)
    for rank in range(ranks):
        torchs = [word for word in map(str, theirs[rank]) if "SHARD" not in word]
        ours = [word for words in words_of(program, rank) for word in words]
        assert ours == [word for word in torchs if "REDUCE" not in word]


@pytest.mark.slow
def test_a_real_run_of_the_order_loses_what_1f1b_loses(tmp_path):
    order = found_order(3, 6, 1)
    plain = tmp_path / "order.csv"
    plain.write_text(format_order(order), "utf-8")
    out = tmp_path / "trained"
    done = subprocess.run(
        [
            sys.executable,
            str(JOB),
            str(out),
            str(plain),
            "compute_only",
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
