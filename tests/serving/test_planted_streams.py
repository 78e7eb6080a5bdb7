"""Forward passes that run freely, with one thing wrong: it is named, with its culprit and price.

Each rank's passes follow each other without a pause for the last one's, so a stream it is. What a
batch takes in turn is then the longest stage's pass, by theory and in the play.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.simulator.devices import Play
from support.simulator.host_programs import MS, Setup
from support.simulator.written_traces import Writing, write_run

import debubble

RANKS, PASS_NS, WIRE_NS = 4, 5 * MS, 200_000


def stream_of(folder, **what):
    setup = Setup(
        schedule="forward-only", ranks=RANKS, microbatches=8, steps=6, answers=False, noise=0.0,
        wire_ns=WIRE_NS, buffered=True, **what,
    )  # fmt: skip
    write_run(Play(setup), folder, Writing(labels="simple"))
    return debubble.analyse(folder)


@pytest.mark.parametrize("stage", range(1, RANKS))
def test_a_long_stage_is_named_first_with_what_balance_saves(tmp_path, stage):
    weights = [0.75] * RANKS
    weights[stage] = 1.75
    analysis = stream_of(tmp_path, weights=tuple(weights))
    account = analysis.stream
    [saving, *_] = account.savings
    assert (saving.cause, account.whose[saving.cause]) == ("imbalance", stage)
    assert saving.saved_ns == pytest.approx(0.75 * PASS_NS, rel=0.05)
    assert saving.batch_latency_ns == pytest.approx(PASS_NS, rel=0.1)
    assert abs(account.replay_error) < 0.01
    named = debubble.find(analysis).named[0]
    assert (named.cause, named.stage, named.rank) == ("imbalance", stage, stage)
    assert sum(account.causes().values()) == RANKS * np.diff(account.batches.span)


def test_equal_stages_have_no_fault_but_their_wires(tmp_path):
    account = stream_of(tmp_path).stream
    assert {one.cause for one in account.savings if one.saved_fraction > 0.02} <= {"transfer"}
    assert account.turn_ns == pytest.approx(PASS_NS + WIRE_NS, rel=0.05)
