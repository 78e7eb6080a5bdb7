"""Schedules that a user states, held against what ran."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.timelines.by_hand import timeline_of_order

from debubble.errors import Code, UsageError
from debubble.timeline.figures import count_microbatches, hold_against
from debubble.timeline.schedules import SCHEDULES, Statement, order_of, state_schedule


def held(timeline, statement):
    return hold_against(statement, timeline, 0, count_microbatches(timeline, 0))


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 5), st.integers(1, 12), st.integers(1, 3))
def test_a_run_agrees_with_what_it_ran(name, ranks, microbatches, chunks):
    try:
        order = order_of(name, ranks, microbatches, chunks)
    except UsageError:
        assume(False)
    stated = held(timeline_of_order(order), state_schedule(name))
    assert (stated.agrees, stated.gaps, stated.order) == (True, (), order)
    assert held(timeline_of_order(order), Statement(text="own.csv", order=order)).agrees


@given(st.sampled_from(sorted(SCHEDULES)), st.randoms(use_true_random=False))
def test_the_first_pass_out_of_order_is_named(name, random):
    order = order_of(name, 3, 6)
    mixed = [list(actions) for actions in order]
    rank = random.randrange(3)
    place = random.randrange(len(mixed[rank]) - 1)
    both = mixed[rank][place : place + 2]
    assume(not both[0].overlap and not (place and mixed[rank][place - 1].overlap))
    assume(not any((action.stage, action.kind) == (0, "I") for action in both))
    mixed[rank][place : place + 2] = both[::-1]
    stated = held(timeline_of_order(mixed, names=[5, 7, 9]), state_schedule(name))
    off = stated.deviation
    compared = [a for a in order[rank][:place] if (a.stage, a.kind) != (0, "I")]
    assert (off.rank, off.step, off.place) == (5 + 2 * rank, 3, len(compared))
    assert (off.found, off.expected) == (str(both[1]), str(both[0]))
    (gap,) = stated.gaps
    assert (gap.code, gap.rank, stated.agrees) == (Code.SCHEDULE_DIFFERS, off.rank, False)
    assert f"as pass {off.place + 1} it ran {both[1]}, where {name} has {both[0]}" in gap.message


def test_passes_too_few_or_too_many_are_named():
    order = order_of("1f1b", 2, 3)
    shorter = [order[0], order[1][:-1]]
    off = held(timeline_of_order(shorter), Statement(text="own.csv", order=order)).deviation
    assert (off.rank, off.place, off.found, off.expected) == (1, 5, None, "1B2")
    off = held(timeline_of_order(order), Statement(text="own.csv", order=shorter)).deviation
    assert (off.rank, off.place, off.found, off.expected) == (1, 5, "1B2", None)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dualpipe-v", "dualpipe-v needs a microbatch for each of 8 stages, not 6"),
        ("interleaved-1f1b", None),
    ],
)
def test_sizes_that_a_schedule_cannot_have_contradict_it(name, why):
    stated = held(timeline_of_order(order_of("1f1b", 4, 6)), state_schedule(name))
    (gap,) = stated.gaps
    assert gap.code is Code.SCHEDULE_DIFFERS
    assert why is None or gap.message == f"this cannot be {name}: {why}"
    assert stated.agrees is False


def test_a_part_and_uneven_steps_are_not_checked():
    whole = timeline_of_order(order_of("1f1b", 3, 6))
    part = replace(whole, ranks=tuple(replace(r, members=(0, 1, 2, 3)) for r in whole.ranks))
    uneven = replace(whole, passes=whole.passes.where(np.arange(len(whole.passes)) > 0))
    for stated in (
        held(part, state_schedule("1f1b")),
        held(uneven, state_schedule("1f1b")),
    ):
        assert [gap.code for gap in stated.gaps] == [Code.SCHEDULE_UNCHECKED]
        assert stated.agrees is None
        assert stated.order is None
