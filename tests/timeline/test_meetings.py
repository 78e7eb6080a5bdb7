"""Collectives: who came last, what is theirs, and which of them are messages of the pipeline."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from debubble.timeline.meetings import Attendance, crosses_stages, meet
from debubble.trace.columns import Group

US = 1000


def attended(*stretches, size=8):
    start, end = np.array(stretches, dtype=np.int64).T * US
    return Attendance(
        issued_ns=start, start_ns=start, end_ns=end, size=np.full(len(start), size, dtype=np.int64)
    )


def test_what_a_member_spins_is_wait_for_the_late_one():
    met = meet({0: attended((0, 91)), 1: attended((40, 92)), 2: attended((90, 92))})
    by_rank = {int(rank): row for row, rank in enumerate(met.rank)}
    assert met.arrived_ns.tolist() == [90 * US] * 3
    assert met.late[by_rank[0]] == met.late[by_rank[1]] == 2
    assert met.late[by_rank[2]] == -1


def test_nobody_waits_for_one_who_came_after_it_had_left():
    met = meet({0: attended((0, 10)), 1: attended((50, 60))})
    by_rank = {int(rank): row for row, rank in enumerate(met.rank)}
    assert met.arrived_ns[by_rank[0]] == 0
    assert met.late[by_rank[0]] == -1


@given(
    st.lists(st.integers(500, 5000), min_size=6, max_size=20, unique=True),
    st.integers(0, 4),
    st.data(),
)
def test_captures_that_begin_at_different_ones_are_matched(gaps, cut, data):
    ends = np.cumsum(gaps)
    late = [data.draw(st.integers(0, 1)) for _ in gaps]
    spin = data.draw(st.integers(1, 400))
    rows = [
        [
            (end - 5 - (spin if who != rank else 0), end + rank)
            for end, who in zip(ends, late, strict=True)
        ]
        for rank in (0, 1)
    ]
    met = meet({0: attended(*rows[0]), 1: attended(*rows[1][cut:])})
    of_first = met.where(met.rank == 0)
    expected = [-1] * cut + [1 if who else -1 for who in late[cut:]]
    assert of_first.late.tolist() == expected


@pytest.mark.parametrize(
    ("group", "crosses"),
    [
        (Group(name="37", description="pp_broadcast", ranks=(0, 1, 2, 3)), True),
        (Group(name="5", ranks=(1,)), False),
        (Group(name="7", description="mesh_tp", ranks=(0, 4)), False),
        (Group(name="8", description="mesh_tp"), False),
        (Group(name="9", description="pp_broadcast"), True),
    ],
)
def test_a_group_with_ranks_of_several_stages_is_the_pipelines(group, crosses):
    assert crosses_stages(group, (0, 1, 2, 3)) is crosses
