"""Traces of devices that are neither CUDA's nor ROCm's, as their makers document them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.services.console import type_command
from support.traces.kineto_events import document, operator, write

from debubble.errors import Code, RunNotFound, TraceError
from debubble.trace.captures import recognise
from debubble.trace.columns import KernelKind, steps_of, summarise
from debubble.trace.kineto import read_kineto
from debubble.trace.run import find_run, read_run
from debubble.trace.source import DEFAULT_LIMITS

BASE_US = 1_700_000_000_000_000
PYTHON, HARDWARE, TALK, SAMPLE = 1, 96, 128, Path("tests/data/formats/ascend_rank0.json")


def named(pid, name, tid=0, kind="process_name"):
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def span(pid, tid, name, start, duration, *, cat=None, **args):
    """Times as torch_npu writes them: text, with nanoseconds behind the point."""
    event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": f"{BASE_US + start:.3f}",
             "dur": duration, "args": args}  # fmt: skip
    return event if cat is None else event | {"cat": cat}


def task(stream, name, start, duration, kind="AI_CORE"):
    told = {"Task Type": kind, "Physic Stream Id": stream, "Task Id": 7, "connection_id": 9}
    return span(HARDWARE, stream, name, start, duration, **told)


def ascend(steps=(6, 7)):
    """Two steps of 1,000 us. Each computes for 100 + 250, talks for 200 beside 50 of it, waits.

    The device's rows: 0-100 a kernel, 100-400 a wait for an event, 400-650 a kernel, and on a
    stream of its own what the talk of 600-800 is made of: a wait and a copy.
    """
    events = [named(PYTHON, "Python"), span(PYTHON, 5, "aten::mm", 0.0, 20.5, cat="cpu_op")]
    for number, step in enumerate(steps):
        at = 1000.0 * number
        events += [
            span(PYTHON, 5, f"ProfilerStep#{step}", at, 1000.0, cat="cpu_op"),
            task(2, "MatMulV2", at + 0.25, 99.75),
            task(2, "EVENT_WAIT", at + 100, 300.0, "EVENT_WAIT"),
            task(2, "FlashAttentionScore", at + 400, 250.0, "MIX_AIC"),
            task(47, "Notify_Wait", at + 600, 80.0, "NOTIFY_WAIT"),
            task(47, "Memcpy", at + 680, 120.0, "SDMA_SQE"),
            span(TALK, 2, "hcom_send__101_0_1", at + 600, 200.0),
        ]
    return [
        *events,
        named(HARDWARE, "Ascend Hardware"),
        named(HARDWARE, "Stream 2", 2, "thread_name"),
        named(TALK, "Communication"),
        named(TALK, "Group 0 Communication", 2, "thread_name"),
    ]


def read_whole(path):
    return read_run(find_run([str(path)]))


def test_device_rows_of_ascend_are_work_talk_or_waits(tmp_path):
    path = tmp_path / "rank0" / "trace_view.json"
    write(path, ascend())
    [trace] = read_whole(path).ranks
    assert (trace.format, trace.rank, steps_of(trace)) == ("Ascend trace", 0, (6, 7))
    kernels = trace.kernels
    told = [(trace.names[name], int(ns)) for name, ns in
            zip(kernels.name, kernels.duration_ns, strict=True)]  # fmt: skip
    once = [("MatMulV2", 99_750), ("FlashAttentionScore", 250_000), ("hcom_send__101_0_1", 200_000)]
    assert told == once * 2
    assert [KernelKind(kind) for kind in kernels.kind] == [
        KernelKind.COMPUTE, KernelKind.COMPUTE, KernelKind.PEER] * 2  # fmt: skip
    assert int(kernels.start_ns[0]) == BASE_US * 1000 + 250
    # From the first kernel to the end of the last: 1,799.75 us, of which 2 x 349.75 compute.
    assert summarise(trace).busy_fraction == pytest.approx(699.5 / 1799.75)
    assert [gap.code for gap in trace.gaps] == ["unlinked_messages"]


def test_the_rank_is_in_what_lies_beside_the_folder(tmp_path):
    folder = tmp_path / "host_17_20260101_ascend_pt"
    path = folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json"
    write(path, ascend())
    (folder / "profiler_info_3.json").write_text("{}")
    assert recognise(str(path), DEFAULT_LIMITS).rank == 3


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text.replace('"dur": 99.75', '"dur": [1]'), "cannot be read"),
        (lambda text: text[:-9], "cannot be read"),
        (lambda text: text.replace(f'"{BASE_US}.250"', '"soon"'), "'soon' is no time"),
    ],
)
def test_a_broken_trace_of_ascend_is_named(tmp_path, damage, says):
    path = tmp_path / "rank0.json"
    path.write_text(damage(json.dumps(ascend())))
    with pytest.raises((TraceError, RunNotFound), match=says):
        read_whole(path)


def test_the_sample_is_read_and_tells_no_pipeline(tmp_path):
    answer = type_command(f"debubble inspect {SAMPLE.resolve()}", tmp_path)
    assert "38.9 %" in answer.text
    answer = type_command(f"debubble find {SAMPLE.resolve()}", tmp_path)
    assert "messages of these devices have no peers" in answer.text


def xpu_kernel(name, ts, dur, correlation, queue=64):
    args = {"device": 0, "sycl queue": queue, "l0 queue": "0x55d0", "correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 0, "ts": ts, "dur": dur,
            "args": args}  # fmt: skip


def xpu_call(name, ts, correlation, category="xpu_runtime"):
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 100, "ts": ts, "dur": 2.0,
            "args": {"correlation": correlation}}  # fmt: skip


def xpu_events():
    """Three kernels, two of them at once on queues of their own; the driver's calls come twice."""
    events = [operator("aten::mm", ts=0.0, dur=4.0)]
    for number, (name, start, queue) in enumerate(
        (("gemm_kernel", 10.0, 64), ("oneccl_allreduce", 30.0, 65), ("gemm_kernel", 40.0, 64))
    ):
        events += [
            xpu_call("urEnqueueKernelLaunchWithArgsExp", 1.0 + 3 * number, number + 1),
            xpu_call("zeCommandListAppendLaunchKernel", 1.5 + 3 * number, 70 + number,
                     "xpu_driver"),
            xpu_kernel(name, start, 20.0, number + 1, queue),
        ]  # fmt: skip
    return events


def test_kernels_of_xpu_are_read_by_queue_and_launch(tmp_path):
    held = document(xpu_events(), deviceProperties=[])
    trace = read_kineto(write(tmp_path / "rank0.json", held))
    kernels = trace.kernels
    assert kernels.stream.tolist() == [64, 65, 64]
    assert [KernelKind(kind).name for kind in kernels.kind] == [
        "COMPUTE",
        "COMMUNICATION",
        "COMPUTE",
    ]
    assert [trace.names[trace.launches.name[row]] for row in kernels.launch] == [
        "urEnqueueKernelLaunchWithArgsExp"] * 3  # fmt: skip
    # 10 to 60 us, of which 10 to 30 and 40 to 60 compute; nothing is left out as impossible.
    assert summarise(trace).busy_fraction == pytest.approx(0.8)
    [kept] = read_whole(tmp_path).ranks
    assert len(kept.kernels) == 3


def test_a_kernel_that_xpu_lost_is_noticed(tmp_path):
    events = [event for event in xpu_events() if event.get("ts") != 30.0]
    write(tmp_path / "rank0.json", document(events, deviceProperties=[]))
    [gap] = read_whole(tmp_path).gaps
    assert (gap.code, gap.moves_ns) == (Code.LOST_OPERATORS, 10_000)
    assert "1 kernel launched and not recorded" in gap.message
