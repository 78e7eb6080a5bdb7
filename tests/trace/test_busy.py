"""Busy time is a union of compute, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.traces.kineto_events import annotation, document, kernel, operator, write

from debubble.trace.columns import busy_intervals, merge, summarise
from debubble.trace.kineto import read_kineto


def busy_ns(trace):
    starts, ends = busy_intervals(trace)
    return int((ends - starts).sum())


def test_overlapping_streams_count_once_and_communication_never(tmp_path):
    events = [
        kernel("a", ts=0.0, dur=10.0),
        kernel("b", ts=5.0, dur=10.0, stream=9),
        kernel("ncclDevKernel_SendRecv(x)", ts=0.0, dur=100.0, stream=16),
        kernel("Memcpy PtoP (Device -> Device)", ts=50.0, dur=20.0),
        kernel("c", ts=90.0, dur=5.0),
        annotation("Forward 0", ts=0.0, dur=100.0),
    ]
    trace = read_kineto(write(tmp_path / "a.json", document(events)))
    assert busy_ns(trace) == 20_000
    assert summarise(trace).busy_fraction == pytest.approx(0.2)
    assert summarise(trace).span_s == 1e-4


def test_on_a_cpu_operators_of_communication_are_no_compute(tmp_path):
    events = [operator("aten::mm", ts=0.0, dur=10.0), operator("c10d::recv_", ts=20.0, dur=30.0)]
    trace = read_kineto(write(tmp_path / "a.json", document(events, deviceProperties=[])))
    assert busy_ns(trace) == 10_000


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=20))
def test_the_union_is_what_counting_each_nanosecond_gives(spans):
    spans.sort()
    start = np.array([s for s, _ in spans], dtype=np.int64)
    end = start + np.array([d for _, d in spans], dtype=np.int64)
    covered = {moment for s, d in spans for moment in range(s, s + d)}
    starts, ends = merge(start, end)
    assert int((ends - starts).sum()) == len(covered)
    assert (starts[1:] > ends[:-1]).all()
