"""Communication: one row an operator, with its peer, size and kernel."""

from __future__ import annotations

from support.traces.kineto_events import (
    annotation,
    details,
    document,
    kernel,
    launch,
    operator,
    send,
    write,
)
from support.traces.recordings import H200

from debubble.trace.columns import KernelKind, Operation
from debubble.trace.kineto import read_kineto

SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
GROUPS = {
    "backend": "nccl",
    "rank": 3,
    "world_size": 8,
    "pg_config": [
        {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 8, "ranks": list(range(8))},
        {"pg_name": "4", "pg_desc": "pp", "pg_size": 4, "ranks": [1, 3, 5, 7]},
    ],
}


def read(tmp_path, events, **fields):
    return read_kineto(write(tmp_path / "a.json", document(events, **fields)))


def test_a_send_is_one_row_though_torch_writes_it_three_times(tmp_path):
    trace = read(
        tmp_path,
        [
            send(to=1, ts=10.0, dur=5.0),
            details(
                "send",
                ts=11.0,
                **{"Dst Rank": 1, "Process Group Name": "0", "Process Group Ranks": "[0, 1]"},
            ),
            annotation("nccl:send 0->1", ts=12.0, dur=2.0),
            launch(ts=12.5, correlation=9),
            kernel(SEND_RECV, ts=20.0, correlation=9),
        ],
    )
    operators = trace.operators
    assert operators.operation.tolist() == [Operation.SEND]
    assert operators.peer.tolist() == [1]
    assert operators.message_bytes.tolist() == [64]
    assert operators.kernel.tolist() == [0]
    assert trace.kernels.kind.tolist() == [KernelKind.PEER]


def test_a_coalesced_batch_is_carried_out_by_the_kernel_launched_in_its_bracket(tmp_path):
    trace = read(
        tmp_path,
        [
            send(to=2, ts=10.0),
            send(to=2, ts=13.0, kind="recv_"),
            annotation("nccl:coalesced", ts=16.0, dur=4.0),
            launch(ts=17.0, correlation=9),
            kernel(SEND_RECV, ts=30.0, correlation=9),
            send(to=0, ts=40.0),
            annotation("nccl:coalesced", ts=46.0, dur=4.0),
            launch(ts=47.0, correlation=10),
            kernel(SEND_RECV, ts=50.0, correlation=10),
        ],
        world=4,
    )
    assert trace.operators.kernel.tolist() == [0, 0, 1]
    assert trace.kernels.kind.tolist() == [KernelKind.PEER, KernelKind.PEER]


def test_a_sendrecv_kernel_of_an_all_to_all_is_no_pipeline_traffic(tmp_path):
    trace = read(
        tmp_path,
        [
            operator("c10d::alltoall_base_", ts=10.0, dur=5.0),
            annotation("nccl:all_to_all", ts=11.0, dur=3.0),
            launch(ts=12.0, correlation=9),
            kernel(
                "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", ts=20.0, correlation=9
            ),
        ],
    )
    assert trace.kernels.kind.tolist() == [KernelKind.COLLECTIVE]
    assert trace.operators.operation.tolist() == [Operation.COLLECTIVE]


def test_a_kernel_that_describes_itself_needs_no_host_side(tmp_path):
    described = {
        "Collective name": "send", "In msg nelems": 100, "dtype": "Float", "Dst Rank": 6,
        "Process Group Name": "7", "Process Group Ranks": "[4, 6]",
    }  # fmt: skip
    trace = read(tmp_path, [kernel(SEND_RECV, **described)])
    assert trace.kernels.kind.tolist() == [KernelKind.PEER]
    assert trace.operators.peer.tolist() == [6]
    assert trace.operators.message_bytes.tolist() == [400]
    assert trace.operators.kernel.tolist() == [0]


def test_what_kernel_and_host_both_say_is_counted_once(tmp_path):
    trace = read(
        tmp_path,
        [
            operator("c10d::allreduce_", ts=10.0, dur=5.0),
            details("allreduce", ts=11.0, dur=3.0),
            launch(ts=12.0, correlation=9),
            kernel(
                "ncclDevKernel_AllReduce_Sum_f32(x)",
                ts=20.0,
                correlation=9,
                **{"Collective name": "allreduce"},
            ),
        ],
    )
    assert len(trace.operators) == 1


def test_peers_counted_inside_a_group_become_global_ranks(tmp_path):
    trace = read(
        tmp_path,
        [
            send(to=0, ts=10.0, kind="recv_"),
            details(
                "recv",
                ts=10.5,
                **{
                    "Src Rank": 1,
                    "Process Group Name": "4",
                    "Process Group Ranks": "[1, 3, ..., 7]",
                },
            ),
        ],
        distributedInfo=GROUPS,
    )
    assert trace.operators.local_peer.tolist() == [0]
    assert trace.operators.peer.tolist() == [1]


def test_a_described_peer_is_global_where_no_shapes_were_recorded(tmp_path):
    described = {"Dst Rank": 2, "Process Group Name": "31", "Process Group Ranks": "[0, 2]"}
    trace = read(
        tmp_path,
        [
            operator("c10d::send", ts=10.0, dur=5.0),
            details("send", ts=11.0, dur=2.0, **described),
        ],
    )
    assert trace.operators.local_peer.tolist() == [-1]
    assert trace.operators.peer.tolist() == [2]


def test_a_peer_of_an_unknown_group_is_not_guessed(tmp_path):
    trace = read(tmp_path, [send(to=2, ts=10.0)], distributedInfo=GROUPS)
    assert trace.operators.local_peer.tolist() == [2]
    assert trace.operators.peer.tolist() == [-1]


def test_gloo_sends_have_their_type_from_an_annotation_that_outlives_them(tmp_path):
    trace = read(
        tmp_path,
        [
            send(to=1, ts=10.0, dur=5.0),
            annotation(
                "gloo:send", ts=14.0, dur=500.0, **{"Input type": ["float"], "Input Dims": [[4, 8]]}
            ),
            send(to=1, ts=20.0, dur=5.0, kind="recv_"),
            annotation(
                "gloo:recv",
                ts=24.0,
                dur=100.0,
                **{"Input type": ["c10::BFloat16"], "Input Dims": [[4, 8]]},
            ),
        ],
        world=2,
    )
    assert trace.operators.message_bytes.tolist() == [128, 64]
    assert trace.operators.operation.tolist() == [Operation.SEND, Operation.RECEIVE]
    assert trace.operators.kernel.tolist() == [-1, -1]


def test_back_to_back_operators_of_microsecond_traces_stay_two(tmp_path):
    trace = read(tmp_path, [send(to=1, ts=10, dur=2), send(to=1, ts=12, dur=2)], world=2)
    assert len(trace.operators) == 2


def test_nested_operators_of_a_cpu_trace_are_dropped(tmp_path):
    events = [
        operator("aten::linear", ts=10.0, dur=10.0),
        operator("aten::addmm", ts=11.0, dur=8.0),
        operator("aten::relu", ts=21.0, dur=1.0),
        operator("aten::other_thread", ts=12.0, dur=1.0, tid=200),
    ]
    trace = read(tmp_path, events, deviceProperties=[])
    kept = [trace.names[n] for n in trace.cpu_operators.name]
    assert kept == ["aten::linear", "aten::other_thread", "aten::relu"]


def test_fused_exchanges_of_1f1b_share_a_kernel():
    trace = read_kineto(str(H200 / "1f1b_p2_m4" / "rank0.json.gz"))
    operators = trace.operators
    transfers = (operators.operation == Operation.SEND) | (operators.operation == Operation.RECEIVE)
    carried = operators.kernel[transfers].tolist()
    # 4 microbatches, 2 steps: 8 sends, 8 receives; 3 of 4 exchanges a step are fused.
    assert len(carried) == 16
    assert len(set(carried)) == trace.kernels.communication.sum() == 10
