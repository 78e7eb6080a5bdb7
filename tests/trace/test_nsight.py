"""Nsight exports: the tables that versions share, the ones they do not, and what NVTX tells."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.traces.nsight_export import BASE, SEND_RECV, NsightExport, global_id
from support.traces.recordings import PUBLIC, existing

from debubble.errors import NotATrace, TraceError
from debubble.trace.columns import KernelKind, Operation
from debubble.trace.nsight.read import read_nsight

MFU = PUBLIC / "nsys-ai" / "mfu_2gpu_before.sqlite"


class Export(NsightExport):
    """An export in a file, and read."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path

    def read(self):
        self.db.commit()
        self.db.close()
        return read_nsight(str(self.path))


@pytest.fixture
def export(tmp_path):
    made = Export(tmp_path / "report #1?.sqlite")
    yield made
    made.db.close()


def kinds(trace):
    return [KernelKind(kind).name for kind in trace.kernels.kind.tolist()]


def names(trace, table):
    return [trace.names[index] for index in table.name.tolist()]


def codes(trace):
    return [gap.code for gap in trace.gaps]


def test_a_kernel_has_its_absolute_time_its_launch_and_its_thread(export):
    export.kernel("gemm(float)", 1_000, 1_300, launch=900)
    export.insert("ThreadNames", export.string("pt_main"), 10, global_id(7, 7))
    (trace,) = export.read()
    assert trace.kernels.start_ns.tolist() == [BASE + 1_000]
    assert trace.kernels.duration_ns.tolist() == [300]
    assert names(trace, trace.kernels) == ["gemm(float)"]
    assert trace.kernels.stream.tolist() == [3]
    assert trace.header.base_time_ns == BASE
    launch = trace.kernels.launch[0]
    assert trace.launches.start_ns[launch] == BASE + 900
    thread = trace.threads[trace.launches.thread[launch]]
    assert (thread.identity, thread.name) == ("7", "pt_main")
    assert (trace.format, trace.gaps, trace.events) == ("nsight", (), 2)
    assert trace.inflated_bytes == export.path.stat().st_size


def test_rows_come_sorted_by_start_and_joins_survive_the_sorting(export):
    export.kernel("late", 5_000, 5_100, launch=4_000)
    export.kernel("early", 1_000, 1_100, launch=500)
    export.insert("CUPTI_ACTIVITY_KIND_MEMSET", 3_000, 3_010, 0, 3, 99, global_id(7), 64)
    (trace,) = export.read()
    assert names(trace, trace.kernels) == ["early", "Memset", "late"]
    launches = trace.launches.start_ns[trace.kernels.launch[[0, 2]]] - BASE
    assert launches.tolist() == [500, 4_000]
    assert trace.kernels.launch[1] == -1
    assert kinds(trace) == ["COMPUTE", "MEMSET", "COMPUTE"]


def test_a_copy_between_devices_is_communication_and_one_inside_is_not(export):
    export.kernel("gemm", 0, 10)
    table = "CUPTI_ACTIVITY_KIND_MEMCPY"
    export.insert(table, 20, 30, 0, 3, 5, global_id(7), 4096, 1, None, None)
    export.insert(table, 40, 50, 0, 3, 6, global_id(7), 8192, 10, None, None)
    export.insert(table, 60, 70, 0, 3, 7, global_id(7), 512, 8, 0, 1)
    export.insert(table, 80, 90, 0, 3, 8, global_id(7), 256, 8, 0, 0)
    (trace,) = export.read()
    assert kinds(trace) == ["COMPUTE", "COPY", "COMMUNICATION", "COMMUNICATION", "COPY"]
    assert names(trace, trace.kernels)[1:3] == ["Memcpy Host-to-Device", "Memcpy Peer-to-Peer"]


def test_ranges_are_annotations_whether_their_text_is_inline_or_interned(export):
    export.kernel("gemm", 0, 10)
    export.nvtx("Forward 0", 100, 150)
    export.nvtx("Backward 0", 200, 260, by_id=True, kind=60)
    export.nvtx("a mark", 300, None, kind=34)
    (trace,) = export.read()
    assert names(trace, trace.annotations) == ["Forward 0", "Backward 0"]
    assert trace.annotations.duration_ns.tolist() == [50, 60]
    assert trace.annotations.stream.tolist() == [-1, -1]
    assert codes(trace) == []


def test_one_send_and_one_receive_in_a_group_are_a_peers(export):
    export.group(1_000, "ncclSend", "ncclRecv")
    export.group(2_000, "ncclRecv")
    (trace,) = export.read()
    assert kinds(trace) == ["PEER", "PEER"]
    assert trace.operators.operation.tolist() == [
        Operation.SEND,
        Operation.RECEIVE,
        Operation.RECEIVE,
    ]
    assert trace.operators.kernel.tolist() == [0, 0, 1]
    assert (trace.operators.start_ns - BASE).tolist() == [1_002, 1_004, 2_002]


def group_of(*calls):
    """Write NCCL's marks of a group that begins at 100 and launches its kernel at 160."""
    marks = [("ncclGroupStart", 100, 101)]
    marks += [(call, 102 + 4 * at, 104 + 4 * at) for at, call in enumerate(calls)]
    return [*marks, ("ncclGroupEnd", 150, 190)]


# What NCCL marks around the launch of a kernel at 160, and what the kernel is then.
EXCHANGES = {
    "several ranks": (group_of(*["ncclSend", "ncclRecv"] * 2), "COMMUNICATION", "OTHER"),
    "a collective": ([("ncclAllReduce", 100, 190)], "COLLECTIVE", "COLLECTIVE"),
    "groups inside a group": (
        group_of("ncclGroupStart", "ncclSend", "ncclGroupEnd", "ncclSend"),
        "COMMUNICATION",
        "OTHER",
    ),
    "a group cut by the capture's start": (
        group_of("ncclRecv")[1:], "COMMUNICATION", "RECEIVE",
    ),
    "calls of a collective's own": (
        [("ncclAlltoAll", 99, 191), *group_of("ncclSend")], "COLLECTIVE", "COLLECTIVE",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("marks", "kind", "operation"), EXCHANGES.values(), ids=EXCHANGES)
def test_what_nccl_marks_around_a_launch_tells_what_its_kernel_is(export, marks, kind, operation):
    for name, start, end in marks:
        export.nvtx(name, start, end, by_id=True)
    export.kernel("ncclDevKernel_Generic(x)", 200, 300, launch=160)
    (trace,) = export.read()
    assert kinds(trace) == [kind]
    assert {Operation(one).name for one in trace.operators.operation.tolist()} == {operation}


def test_torchs_own_range_names_the_collective(export):
    export.nvtx("nccl:all_to_all, op_id = 991144", 990, 1_095)
    export.group(1_000, "ncclSend", "ncclRecv")
    export.nvtx("nccl:coalesced", 1_990, 2_095)
    export.group(2_000, "ncclSend", "ncclRecv")
    export.nvtx("nccl:send 0->1", 2_990, 3_095)
    export.group(3_000, "ncclSend", "ncclSend")
    (trace,) = export.read()
    assert kinds(trace) == ["COLLECTIVE", "PEER", "PEER"]
    assert trace.operators.operation.tolist()[:2] == [Operation.COLLECTIVE] * 2


def test_a_group_of_another_thread_says_nothing_about_a_launch(export):
    export.nvtx("ncclSend", 100, 160, by_id=True, pid=8)
    export.kernel("gemm", 0, 10, pid=8)
    export.kernel(SEND_RECV, 200, 300, launch=120, device=1)
    eight, seven = export.read()
    assert kinds(eight) == ["COMPUTE"]
    assert kinds(seven) == ["COMMUNICATION"]
    assert eight.operators.kernel.tolist() == [-1]


def test_each_process_is_a_rank_in_the_order_of_devices_and_that_is_said(export):
    export.kernel("b", 10, 20, pid=7, device=1, launch=5)
    export.kernel("a", 10, 20, pid=9, device=0, launch=6)
    zero, one = export.read()
    assert (zero.rank, names(zero, zero.kernels)) == (0, ["a"])
    assert (one.rank, names(one, one.kernels)) == (1, ["b"])
    assert zero.header.devices[0].index == 0
    assert codes(zero) == ["rank_assumed"]
    assert codes(one) == []
    assert "process 9 (device 0) is rank 0" in zero.gaps[0].message
    assert [len(zero.launches), len(one.launches)] == [1, 1]


def test_processes_that_all_see_device_0_are_ordered_by_the_real_device(export):
    for gpu, pid in ((5, 7), (2, 9)):
        export.insert("TARGET_INFO_GPU", gpu, f"H200-{gpu}", 1 << 37, 132)
        export.insert("TARGET_INFO_CUDA_DEVICE", gpu, 0, pid)
        export.kernel(f"of {pid}", 10, 20, pid=pid)
    zero, one = export.read()
    assert [names(t, t.kernels) for t in (zero, one)] == [["of 9"], ["of 7"]]
    device = zero.header.devices[0]
    assert (device.index, device.name, device.memory_bytes) == (0, "H200-2", 1 << 37)


def test_rank_comes_from_the_environment_and_no_other_variable_is_kept(export):
    export.kernel("gemm", 0, 10)
    for value in ('RANK="3"', 'SECRET_TOKEN="hunter2"', 'LOCAL_RANK="1"'):
        export.insert("META_DATA_CAPTURE", "PROCESS_0:ENVIRONMENT_VARIABLE", value)
    (trace,) = export.read()
    assert (trace.rank, trace.header.rank) == (3, 3)
    assert "hunter2" not in repr(trace)
    assert "LOCAL_RANK" not in repr(trace)


def test_times_that_run_backwards_are_left_out_and_counted(export):
    export.kernel("good", 100, 200)
    export.kernel("backwards", 300, 250)
    export.kernel("endless", 300, None)
    export.kernel("absurd", -(2**63), 2**63 - 1)
    (trace,) = export.read()
    assert names(trace, trace.kernels) == ["good"]
    assert codes(trace) == ["bad_times"]
    assert trace.gaps[0].message.endswith(": 3")


def test_kernels_of_a_graph_know_it_and_share_its_launch(export):
    export.call("cudaGraphLaunch_v10000", 5, 9, 7, 50)
    for start, node in ((10, (4 << 32) | 1), (20, (4 << 32) | 2)):
        row = (start, start + 5, 0, 3, 50, global_id(7), export.string("gemm"), 1, node)
        export.insert("CUPTI_ACTIVITY_KIND_KERNEL", *row)
    export.kernel("eager", 40, 50, node=0)
    (trace,) = export.read()
    assert trace.kernels.graph.tolist() == [4, 4, -1]
    assert trace.kernels.launch.tolist() == [0, 0, -1]


def test_graphs_traced_as_a_whole_are_compute_and_said(export):
    export.insert("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", 100, 400, 0, 3, 9, global_id(7), 12)
    (trace,) = export.read()
    assert trace.kernels.duration_ns.tolist() == [300]
    assert trace.kernels.graph.tolist() == [12]
    assert kinds(trace) == ["COMPUTE"]
    assert codes(trace) == ["closed_graphs"]


def test_another_database_is_no_trace_and_the_hint_says_how_to_export(tmp_path):
    path = tmp_path / "history.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.executescript("CREATE TABLE runs (id INTEGER); INSERT INTO runs VALUES (1);")
    with pytest.raises(NotATrace) as caught:
        read_nsight(str(path))
    assert caught.value.file == str(path)
    assert "nsys export --type sqlite" in caught.value.hint


def test_an_export_without_kernels_says_so(export):
    export.nvtx("Forward 0", 1, 2)
    with pytest.raises(TraceError, match="no CUDA kernels") as caught:
        export.read()
    assert "nsys profile -t cuda,nvtx" in caught.value.hint


def test_reading_writes_nothing_beside_the_file(export):
    export.kernel("gemm", 0, 10)
    export.db.commit()
    before = export.path.read_bytes()
    export.read()
    assert [p.name for p in export.path.parent.iterdir()] == [export.path.name]
    assert export.path.read_bytes() == before


def test_the_public_two_gpu_export_reads_with_its_all_to_alls_as_collectives():
    existing(MFU)
    zero, one = read_nsight(str(MFU))
    assert [t.rank for t in (zero, one)] == [0, 1]
    assert [len(t.kernels) for t in (zero, one)] == [1993 + 510 + 133, 2017 + 510 + 136]
    assert sum(t.events for t in (zero, one)) == 4010 + 1020 + 269 + 7466 + 19118
    for trace in (zero, one):
        exchanges = np.array(["SendRecv" in name for name in names(trace, trace.kernels)])
        assert exchanges.sum() == 33
        told = trace.kernels.kind[exchanges].tolist()
        # torch's `nccl:all_to_all` names 32; the launch of one lies before the captured window.
        assert told.count(KernelKind.COLLECTIVE) == 32
        assert told.count(KernelKind.COMMUNICATION) == 1
        assert KernelKind.PEER not in kinds(trace)
        assert Operation.SEND not in trace.operators.operation.tolist()
        assert trace.header.base_time_ns == 1_779_782_330_176_752_435
        assert np.all(np.diff(trace.kernels.start_ns) >= 0)
    assert codes(zero) == ["rank_assumed"]
    first = zero.kernels.start_ns[0] - zero.header.base_time_ns
    assert 60_111_418_026 <= first <= 60_111_541_307
