"""The account covers ranks and window exactly, whatever the timeline is like."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulator.analysis import analyse
from support.simulator.devices import Play
from support.simulator.host_programs import Setup
from support.simulator.written_traces import Writing, write_run
from support.traces.read_once import build_recording
from support.traces.recordings import H200

from debubble.errors import Code
from debubble.ledger.causes import Cause
from debubble.ledger.ledger import build_ledger
from debubble.ledger.verdict import find_bottleneck, name_causes
from debubble.timeline.figures import measure_windows
from debubble.timeline.model import Intervals

SCHEDULES = ("forward-only", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe-v")


def waits_counted_by_themselves(timeline, window):
    """Every nanosecond of the window without compute, by a walk over the busy intervals."""
    waits = 0
    for rank in timeline.ranks_of(0):
        at = window.start_ns
        for start, end in zip(
            rank.occupied.start_ns.tolist(), rank.occupied.end_ns.tolist(), strict=True
        ):
            if end > at and start < window.end_ns:
                waits += max(0, start - at)
                at = min(end, window.end_ns)
        waits += window.end_ns - at
    return waits


def assert_exact(timeline):
    windows = measure_windows(timeline, 0)
    ledger = build_ledger(timeline, 0, [window.step for window in windows])
    if not windows:
        assert ledger is None
        return None
    for window, account in zip(windows, ledger.accounts, strict=True):
        ranks = len(timeline.ranks_of(0))
        assert account.length_ns.sum() == ranks * window.length_ns
        assert (account.length_ns > 0).all()
        occupied = account.total_of(Cause.COMPUTE) + int(
            account.length_ns[(account.cause == 1) & (account.root_kind == 3)].sum()
        )
        assert ranks * window.length_ns - occupied == waits_counted_by_themselves(timeline, window)
    assert sum(ledger.causes().values()) == ledger.total_ns
    return ledger


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_the_account_of_any_simulated_run_is_exact(schedule, data):
    ranks = data.draw(st.integers(2, 4), "ranks")
    looped = schedule in {"interleaved-1f1b", "zbv", "dualpipe-v"}
    microbatches = ranks * data.draw(st.integers(2 if looped else 1, 3), "rounds")
    buffered = data.draw(st.booleans(), "buffered")
    play = Play(
        Setup(
            schedule=schedule,
            ranks=ranks,
            microbatches=microbatches,
            steps=data.draw(st.integers(1, 2), "steps"),
            weights=tuple(
                data.draw(st.floats(0.2, 3.0), "weight") for _ in range(ranks * (1 + looped))
            ),
            fused=schedule == "1f1b",
            buffered=buffered,
            early=not buffered and schedule != "1f1b",
            wire_ns=data.draw(st.integers(5_000, 5_000_000), "wire"),
            run_ahead=data.draw(st.booleans(), "run ahead"),
            noise=data.draw(st.floats(0, 0.3), "noise"),
            seed=data.draw(st.integers(0, 9), "seed"),
        )
    )
    labels = {"1f1b": "none", "gpipe": "simple", "forward-only": "simple"}.get(schedule, "runtime")
    with TemporaryDirectory() as folder:
        write_run(play, Path(folder), Writing(labels=labels))
        ledger = assert_exact(analyse(folder, play).timeline)
    if schedule != "dualpipe-v":
        assert abs(ledger.replay_error) < 0.02


def recorded(name):
    return build_recording(H200 / name)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_account_of_a_timeline_that_contradicts_itself_is_exact(data):
    """Stamps off by up to a pass, passes and messages missing: said, accounted for, no crash."""
    timeline = recorded(data.draw(st.sampled_from(["1f1b_p2_m4", "fwd_closed_m4"]), "run"))
    draws = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    reach = data.draw(st.sampled_from([0, 1_000, 1_000_000, 30_000_000]), "reach")
    passes, transfers = timeline.passes, timeline.transfers
    kept = draws.random(len(passes)) >= data.draw(st.sampled_from([0, 0.1, 0.6]), "missing")
    kept |= np.isin(np.arange(len(passes)), np.unique(passes.rank, return_index=True)[1])
    start = passes.start_ns + draws.integers(-reach, reach + 1, len(passes))
    passes = replace(
        passes, start_ns=start, end_ns=start + np.maximum(passes.end_ns - passes.start_ns, 1)
    ).where(kept)
    transfers = transfers.where(draws.random(len(transfers)) < 0.8)
    moved = draws.integers(-reach, reach + 1, len(transfers))
    transfers = replace(
        transfers,
        receive_start_ns=transfers.receive_start_ns + moved,
        receive_end_ns=transfers.receive_end_ns + moved,
        send_issued_ns=transfers.send_issued_ns + moved,
    )
    assert_exact(replace(timeline, passes=passes, transfers=transfers))


def test_messages_of_passes_that_are_missing_on_a_rank_are_said():
    timeline = recorded("1f1b_p2_m4")
    passes = timeline.passes
    gone = (passes.rank == 1) & (passes.microbatch == 2)
    ledger = assert_exact(replace(timeline, passes=passes.where(~gone)))
    assert Code.UNLINKED_MESSAGES in {gap.code for gap in ledger.gaps}


def test_passes_in_a_circle_are_said_and_accounted_for():
    """A rank that runs a backward pass before the forward pass it needs: no run can have."""
    timeline = recorded("1f1b_p2_m4")
    passes = timeline.passes
    first, last = passes.start_ns.min(), passes.end_ns.max()
    turned = (passes.rank == 0) & (passes.step == passes.step[0])
    issued = np.where(turned, first + last - passes.issued_ns, passes.issued_ns)
    start = np.where(turned, first + last - passes.end_ns, passes.start_ns)
    end = np.where(turned, first + last - passes.start_ns, passes.end_ns)
    ledger = assert_exact(
        replace(timeline, passes=replace(passes, start_ns=start, end_ns=end, issued_ns=issued))
    )
    assert Code.ORDER_CYCLE in {gap.code for gap in ledger.gaps}
    assert ledger.savings == ()
    assert name_causes(ledger) == ()


def test_a_step_in_which_nothing_waits_names_no_cause():
    timeline = recorded("1f1b_p2_m4")
    begin, end = int(timeline.passes.start_ns.min()), int(timeline.passes.end_ns.max())
    always = Intervals(start_ns=np.array([begin]), end_ns=np.array([end]))
    ranks = tuple(replace(rank, busy=always, occupied=always) for rank in timeline.ranks)
    ledger = assert_exact(replace(timeline, ranks=ranks))
    assert ledger.causes()[Cause.COMPUTE] == ledger.total_ns
    assert find_bottleneck(ledger, {}).what == "compute"


def test_no_step_no_ledger():
    assert build_ledger(recorded("1f1b_p2_m4"), 0, []) is None


def test_a_way_through_many_stages_is_not_too_deep_for_python():
    """The last rank waits for all before it: sixty hops, where Python has room for forty calls."""
    play = Play(Setup(schedule="forward-only", ranks=60, microbatches=1, steps=1))
    with TemporaryDirectory() as folder:
        write_run(play, Path(folder), Writing(labels="simple"))
        timeline = analyse(folder, play).timeline
    room = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 90)
    try:
        assert_exact(timeline)
    finally:
        sys.setrecursionlimit(room)
