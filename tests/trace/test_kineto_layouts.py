"""The same events, however the file is laid out, give the same columns."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.traces.kineto_events import BASE_NS, annotation, document, kernel, launch, write

from debubble.errors import TraceError
from debubble.trace.kineto import document as document_module
from debubble.trace.kineto import read_kineto

EVENTS = [
    annotation("ProfilerStep#3", ts=0.0, dur=100.5),
    launch(ts=1.25, correlation=1),
    kernel("gemm", ts=10.125, dur=5.001, correlation=1),
    launch(ts=2.0, correlation=2),
    kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", ts=20, dur=7, correlation=2, stream=9),
]


def assert_read_right(trace):
    assert trace.rank == 0
    assert trace.events == len(EVENTS)
    assert trace.kernels.start_ns.tolist() == [BASE_NS + 10_125, BASE_NS + 20_000]
    assert trace.kernels.duration_ns.tolist() == [5_001, 7_000]
    assert trace.names[trace.kernels.name[0]] == "gemm"
    assert trace.kernels.stream.tolist() == [7, 9]
    assert trace.launches.start_ns[trace.kernels.launch].tolist() == [
        BASE_NS + 1_250,
        BASE_NS + 2_000,
    ]
    assert trace.kernels.communication.tolist() == [False, True]
    assert trace.names[trace.annotations.name[0]] == "ProfilerStep#3"
    assert not trace.gaps


CONTENT = document(EVENTS)
DATA = json.dumps(CONTENT).encode()
NESTED = {"more": [{"a": "},{"}, {"b": [{"c": 1}, {"d": 2}]}]}
OTHER_KEYS = document([dict(reversed(event.items())) for event in EVENTS])
LAYOUTS = {
    "plain": DATA,
    "packed": gzip.compress(DATA),
    "several gzip members": gzip.compress(DATA[:333]) + gzip.compress(DATA[333:]),
    "one space a level": json.dumps(CONTENT, indent=1).encode(),
    "four spaces a level": json.dumps(CONTENT, indent=4).encode(),
    "events first": json.dumps(dict(reversed(CONTENT.items()))).encode(),
    "fields on both sides": json.dumps(CONTENT | NESTED).encode(),
    "a byte order mark": b"\xef\xbb\xbf" + DATA,
    "keys in another order": json.dumps(OTHER_KEYS).encode(),
}


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "no-extension", "wrong.txt"])
@pytest.mark.parametrize("data", LAYOUTS.values(), ids=LAYOUTS)
def test_neither_layout_nor_packing_nor_name_matters(tmp_path, data, name):
    assert_read_right(read_kineto(write(tmp_path / name, data, packed=False)))


def test_a_bare_list_of_events_has_no_header(tmp_path):
    trace = read_kineto(write(tmp_path / "a.json", EVENTS))
    assert trace.rank is None
    assert trace.kernels.start_ns.tolist() == [10_125, 20_000]
    assert not trace.gaps


def test_a_bare_list_may_be_left_open_as_chrome_allows(tmp_path):
    data = json.dumps(EVENTS)[:-1].encode()
    assert len(read_kineto(write(tmp_path / "a.json", data)).kernels) == 2


def test_strings_that_look_like_event_borders_do_not_cut_events(tmp_path, monkeypatch):
    monkeypatch.setattr("debubble.trace.source.PIECE_BYTES", 64)
    evil = [
        kernel('a},{"ph": "X"', ts=5),
        *EVENTS,
        kernel("b", ts=30, more=[{"x": "},{"}, {"y": 1}]),
    ]
    trace = read_kineto(write(tmp_path / "a.json", document(evil)))
    assert len(trace.kernels) == 4
    assert 'a},{"ph": "X"' in trace.names
    assert not trace.gaps


def test_times_keep_their_nanoseconds_far_from_their_base(tmp_path):
    late = [kernel(ts=4_212_936_072_998.236, dur=0.001), kernel(ts=4_212_936_073_000.999, dur=1.5)]
    trace = read_kineto(write(tmp_path / "a.json", document(late)))
    assert (trace.kernels.start_ns - BASE_NS).tolist() == [
        4_212_936_072_998_236,
        4_212_936_073_000_999,
    ]
    assert trace.kernels.duration_ns.tolist() == [1, 1_500]


@settings(max_examples=60, deadline=None)
@given(
    piece=st.integers(min_value=1, max_value=400),
    indent=st.sampled_from([None, 2]),
    first=st.booleans(),
    odd=st.text(max_size=12),
)
def test_no_cut_of_the_stream_changes_the_answer(tmp_path_factory, piece, indent, first, odd):
    events = [
        *EVENTS,
        kernel(odd, ts=50.0),
        {"ph": "M", "name": "thread_name", "tid": 100, "args": {"name": odd}},
    ]
    content = document(events)
    content = dict(reversed(content.items())) if first else content
    path = write(tmp_path_factory.mktemp("cut") / "a.json", content, indent=indent)
    whole = read_kineto(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("debubble.trace.source.PIECE_BYTES", piece)
        cut = read_kineto(path)
    assert cut.names == whole.names
    assert cut.gaps == whole.gaps == ()
    for left, right in zip(cut.tables, whole.tables, strict=True):
        for column in left.__dataclass_fields__:
            assert np.array_equal(getattr(left, column), getattr(right, column))


def test_memory_held_is_bounded_when_there_is_no_event_border(tmp_path, monkeypatch):
    monkeypatch.setattr(document_module, "MAX_HELD_BYTES", 10_000)
    monkeypatch.setattr("debubble.trace.source.PIECE_BYTES", 1_000)
    path = write(tmp_path / "a.json", document([kernel("x" * 100_000)]))
    with pytest.raises(TraceError, match="larger than"):
        read_kineto(path)
