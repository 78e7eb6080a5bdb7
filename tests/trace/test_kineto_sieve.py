"""Sorting before decoding changes the speed and nothing else."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.traces.kineto_events import (
    annotation,
    details,
    document,
    kernel,
    kineto_layout,
    launch,
    memory,
    operator,
    send,
    write,
)
from support.traces.recordings import H200

from debubble.trace.kineto import document as document_module
from debubble.trace.kineto import read_kineto

ARROW = {"ph": "s", "id": 3, "pid": 1, "tid": 100, "ts": 5.0, "cat": "ac2g", "name": "ac2g"}
QUERY = {**launch(ts=3.0), "name": "cudaEventQuery"}
WAIT = {**launch(ts=4.0), "name": "cudaStreamSynchronize"}
METADATA = {
    "name": "thread_name",
    "ph": "M",
    "ts": 0,
    "pid": 1,
    "tid": 100,
    "args": {"name": "main"},
}
ONE_OF_EACH = [
    operator("aten::mm"), send(to=1, ts=6.0), details("send", ts=6.5),
    operator("record_function", ts=7.0), launch(ts=8.0, correlation=4), QUERY, WAIT,
    kernel("gemm", ts=9.0, correlation=4), ARROW, memory(ts=9.5),
    kernel("ncclDevKernel_SendRecv(x)", ts=11.0, correlation=5), annotation("ProfilerStep#1"),
    {**kernel("Memset (Device)", ts=12.0), "cat": "gpu_memset"}, METADATA,
    {**annotation("ProfilerStep#1"), "cat": "gpu_user_annotation", "tid": 7},
    {**operator("python"), "cat": "python_function"}, {**ARROW, "ph": "f", "bp": "e"},
]  # fmt: skip


def content_of(trace):
    """All tables with names spelt out: the order in which names were met may differ."""
    rows = {}
    for table in trace.tables:
        columns = {}
        for column in table.__dataclass_fields__:
            values = getattr(table, column)
            spelt = column in {"name", "dtype"}
            columns[column] = (
                [trace.names[v] if v >= 0 else "" for v in values] if spelt else values.tolist()
            )
            if column == "thread":
                columns[column] = [trace.threads[v].identity if v >= 0 else "" for v in values]
        rows[type(table).__name__] = columns
    return rows, trace.events, trace.gaps, trace.header


def read_plainly(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_module, "sift", lambda _held, _piece: None)
        return read_kineto(path)


@pytest.mark.parametrize("run", ["fwd_closed_m4", "1f1b_p2_m4"])
@pytest.mark.parametrize("piece", [1_500_000, 70_001])
def test_recorded_traces_read_the_same_either_way(run, piece, monkeypatch):
    monkeypatch.setattr("debubble.trace.source.PIECE_BYTES", piece)
    for path in sorted((H200 / run).glob("rank*.gz")):
        assert content_of(read_kineto(str(path))) == content_of(read_plainly(str(path)))


events = st.lists(
    st.one_of(
        st.sampled_from(ONE_OF_EACH),
        st.builds(kernel, st.text(max_size=20), ts=st.floats(0, 1e6), dur=st.floats(0, 1e3)),
        st.builds(operator, st.text(max_size=20), ts=st.floats(0, 1e6)),
        st.builds(lambda cat: {**kernel("odd"), "cat": cat}, st.text(max_size=9)),
        st.builds(
            lambda name: {**launch(), "name": name},
            st.sampled_from(
                [
                    "cudaEventRecord",
                    "cudaStreamWaitEvent",
                    "cudaStreamSynchronize",
                    "cudaLaunchKernel",
                    "x",
                ]
            ),
        ),
    ),
    min_size=1,
    max_size=30,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(events=events, piece=st.integers(min_value=150, max_value=3000))
def test_any_mixture_reads_the_same_either_way(tmp_path_factory, events, piece):
    # No two at one time: rows that start together have no order that means anything.
    events = [{**event, "ts": 7.0 * place} for place, event in enumerate(events)]
    content = document([kernel("sure", ts=1.0), *events], world=2)
    path = write(tmp_path_factory.getbasetemp() / "mixture.json", kineto_layout(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("debubble.trace.source.PIECE_BYTES", piece)
        sorted_first = read_kineto(path)
    assert content_of(sorted_first) == content_of(read_plainly(path))
    assert sorted_first.events == len(events) + 1


def test_a_cpu_trace_of_a_gpu_job_is_read_again_for_its_operators(tmp_path):
    content = document([operator("aten::mm", ts=float(10 * n)) for n in range(50)])
    trace = read_kineto(write(tmp_path / "a.json", kineto_layout(content)))
    assert len(trace.cpu_operators) == 50
    assert trace.events == 50
    assert np.all(np.diff(trace.cpu_operators.start_ns) == 10_000)


@pytest.mark.parametrize("first", ["ts", "args", "pid", "cat", "dur"])
@pytest.mark.parametrize("every", [1, 3])
def test_keys_in_another_order_lose_nothing(tmp_path, first, every):
    """As JSON it is the same file; in Kineto's layout it once glued an event to its neighbour."""
    recorded = H200 / "fwd_closed_m4" / "rank0.json.gz"
    content = json.loads(gzip.decompress(recorded.read_bytes()))
    events = []
    for number, event in enumerate(content.pop("traceEvents")):
        turned = {key: event[key] for key in sorted(event, key=lambda key: key != first)}
        written = json.dumps(turned if number % every == 0 else event, indent=2)
        events.append("\n  " + written.replace("\n", "\n  "))
    head = json.dumps(content)[1:-1]
    text = f'{{\n{head},\n  "traceEvents": [{",".join(events)}\n  ]\n}}'
    ours = read_kineto(write(tmp_path / "rank0.json", text.encode()))
    theirs = read_kineto(str(recorded))
    for table in ("kernels", "launches", "operators", "annotations", "memory"):
        assert len(getattr(ours, table)) == len(getattr(theirs, table)), table
    assert np.array_equal(ours.kernels.start_ns, theirs.kernels.start_ns)
    assert not ours.gaps
