"""Which range holds a moment: the same as looking through all of them, only faster."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from debubble.trace.communication import find_enclosing, find_next

SMALL = st.integers(0, 6)
MOMENTS = st.lists(st.tuples(SMALL, st.integers(-1, 2)), max_size=8)
RANGES = st.lists(st.tuples(SMALL, SMALL, st.integers(-1, 2)), max_size=8)


def columns(rows, width):
    return np.array(rows, dtype=np.int64).reshape(-1, width).T


@given(MOMENTS, RANGES)
def test_joins_agree_with_a_plain_search(moments, ranges):
    moment, thread = columns(moments, 2)
    start, length, where = columns(ranges, 3)
    inside = find_enclosing(moment, thread, start, start + length, where)
    after = find_next(moment, thread, start, where)
    for row, (at, caller) in enumerate(moments):
        mine = [i for i, r in enumerate(ranges) if r[2] == caller >= 0]
        before = [i for i in mine if start[i] <= at]
        last = max(before, key=lambda i: (start[i], i), default=-1)
        held = last >= 0 and at <= start[last] + length[last]
        assert inside[row] == (last if held else -1)
        later = [i for i in mine if start[i] >= at]
        assert after[row] == min(later, key=lambda i: (start[i], i), default=-1)


def test_a_hundred_thousand_threads_take_no_longer_than_one():
    many = np.arange(100_000, dtype=np.int64)
    began = time.process_time()
    assert np.array_equal(find_enclosing(many, many, many, many, many), many)
    assert np.array_equal(find_next(many, many, many, many), many)
    assert time.process_time() - began < 30
