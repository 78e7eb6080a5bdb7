"""Sizes that are sent ahead of a tensor, and messages that are something by themselves."""

from __future__ import annotations

from support.traces.kineto_events import document, kernel, launch, send, write

from debubble.timeline.steps import record_rank, whole_run
from debubble.timeline.work import find_work
from debubble.trace.kineto.read import read_kineto


def message(ts, correlation, *, kind, elements, dtype, peer=0):
    """One message: its operator, the call that launches its kernel 2 us later, and the kernel."""
    told = {"Collective name": kind.strip("_"), "dtype": dtype, "In msg nelems": elements}
    return [
        send(to=peer, ts=ts, dur=4.0, kind=kind, **told),
        launch(ts=ts + 1, correlation=correlation),
        kernel("ncclDevKernel_SendRecv", ts=ts + 2, dur=2.0, correlation=correlation),
    ]


def computes(name, ts, correlation):
    return [
        launch(ts=ts, correlation=correlation),
        kernel(name, ts=ts + 1, correlation=correlation),
    ]


def record(tmp_path, *events):
    groups = {"pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}]}
    told = {"backend": "nccl", "rank": 1, "world_size": 2, **groups}
    listed = [event for several in events for event in several]
    trace = read_kineto(
        write(tmp_path / "rank1.json", document(listed, rank=1, distributedInfo=told))
    )
    return record_rank(trace, find_work(trace), whole_run())


def test_a_tensor_and_the_sizes_ahead_of_it_are_one_message(tmp_path):
    found = record(
        tmp_path,
        message(10.0, 1, kind="recv_", elements=3, dtype="Long"),
        computes("Memcpy DtoH (Device -> Pageable)", 20.0, 2),
        message(30.0, 3, kind="recv_", elements=4096, dtype="BFloat16"),
        computes("gemm", 40.0, 4),
    )
    messages = found.messages
    assert messages.message_bytes.tolist() == [8192]
    assert (messages.end_ns - messages.start_ns).tolist() == [22_000]
    # What the host does to read the sizes is no work of a pass.
    assert [found.trace.names[name] for name in found.work.name.tolist()] == ["gemm"]


def test_tokens_that_nothing_follows_are_messages(tmp_path):
    found = record(
        tmp_path,
        message(10.0, 1, kind="recv_", elements=4096, dtype="BFloat16"),
        computes("gemm", 20.0, 2),
        message(30.0, 3, kind="send", elements=4, dtype="Long"),
        message(50.0, 4, kind="recv_", elements=4096, dtype="BFloat16"),
        message(70.0, 5, kind="send", elements=4, dtype="Long"),
    )
    assert found.messages.message_bytes.tolist() == [8192, 32, 8192, 32]
