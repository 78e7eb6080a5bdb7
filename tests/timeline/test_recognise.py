"""Names for runs: what a schedule ordered is called by its name, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.timelines.by_hand import timeline_of_order

from debubble.errors import UsageError
from debubble.timeline.figures import count_microbatches, recognise_schedule
from debubble.timeline.schedules import SCHEDULES, order_of


def name_of(order, **more):
    timeline = timeline_of_order(order, **more)
    return recognise_schedule(timeline, 0, count_microbatches(timeline, 0))


def swap(actions, first, second):
    actions[first], actions[second] = actions[second], actions[first]


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 6), st.integers(1, 16), st.integers(1, 3))
def test_every_schedule_is_called_by_a_name_of_its_order(name, ranks, microbatches, chunks):
    try:
        order = order_of(name, ranks, microbatches, chunks)
    except UsageError:
        assume(False)
    found = name_of(order)
    assert found is not None
    assert order_of(found, ranks, microbatches, chunks) == order


@pytest.mark.parametrize("name", ["zb-h1", "interleaved-zb", "zbv", "dualpipe-v"])
def test_the_first_stages_input_gradient_may_be_missing_as_in_torch(name):
    order = order_of(name, 4, 8)
    kept = [[a for a in rank if (a.stage, a.kind) != (0, "I")] for rank in order]
    assert sum(map(len, kept)) < sum(map(len, order))
    assert name_of(kept) == name


def test_no_other_pass_may_be_missing():
    order = order_of("zbv", 4, 8)
    kept = [[a for a in rank if (a.stage, a.kind) != (1, "I")] for rank in order]
    assert name_of(kept) is None


def test_one_pass_out_of_order_in_one_step_is_no_known_schedule():
    order = order_of("interleaved-1f1b", 4, 8)
    timeline = timeline_of_order(order)
    row = int(np.flatnonzero((timeline.passes.rank == 2) & (timeline.passes.step == 4))[3])
    timeline.passes.start_ns[[row, row + 1]] = timeline.passes.start_ns[[row + 1, row]]
    assert recognise_schedule(timeline, 0, 8) is None
    # A step that the timeline does not count is not looked at.
    assert recognise_schedule(replace(timeline, steps=(3,)), 0, 8) == "interleaved-1f1b"


def test_of_a_pair_that_overlaps_either_may_begin_first():
    order = order_of("dualpipe-v", 4, 12)
    position = next(n for n, action in enumerate(order[1]) if action.overlap)
    swap(order[1], position, position + 1)
    assert name_of(order) == "dualpipe-v"


def test_the_numbers_of_the_ranks_and_where_messages_put_them_change_nothing():
    order = order_of("interleaved-1f1b", 4, 8)
    assert name_of(order, names=[5, 1, 7, 3], positions=[2, 3, 0, 1]) == "interleaved-1f1b"


def test_a_rank_that_was_not_recorded_in_a_step_does_not_hide_the_name():
    timeline = timeline_of_order(order_of("1f1b", 3, 6))
    passes = timeline.passes
    partly = replace(timeline, passes=passes.where((passes.rank != 2) | (passes.step != 4)))
    assert recognise_schedule(partly, 0, 6) == "1f1b"


def test_a_rank_that_was_never_recorded_leaves_the_schedule_unknown():
    timeline = timeline_of_order(order_of("1f1b", 3, 6))
    partly = replace(timeline, passes=timeline.passes.where(timeline.passes.rank != 2))
    assert recognise_schedule(partly, 0, 6) is None
