from __future__ import annotations

import subprocess
import sys

import pytest

from debubble.annexes.demo.workload import SCHEDULES, Workload, decode_workload, encode_workload
from debubble.errors import UsageError


def test_a_workload_survives_the_way_to_another_process():
    workload = Workload(layers=(1, 2, 3, 4), layer_scale=(1.5,) * 10, fail_rank=2)
    assert decode_workload(encode_workload(workload)) == workload


def test_what_is_no_workload_is_refused():
    with pytest.raises(UsageError, match="no workload"):
        decode_workload(b'{"ranks": "four"}')


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ranks": 1, "layers": (4,)}, "ranks is 1"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"warmup": 0}, "warmup is 0"),
        ({"layers": (4, 4, 4)}, "3 stages"),
        ({"layers": (4, 0, 4, 4)}, "without layers"),
        ({"layers": ()}, "0 stages"),
        ({"layer_scale": (1.0, 2.0)}, "2 entries for 16 layers"),
        ({"replica_scale": (1.0, 2.0)}, "2 entries for 1 replicas"),
        ({"forward_ms": -1.0}, "zero or more"),
        ({"backward_ms": float("nan")}, "zero or more"),
        ({"fail_rank": 4}, "fail_rank is 4"),
        ({"schedule": "zb-h2"}, "no schedule 'zb-h2'"),
        ({"schedule": "zbv"}, "4 stages, which zbv"),
        ({"schedule": "looped-bfs", "layers": (1,) * 6}, "6 stages, which looped-bfs"),
        ({"microbatches": 3}, "1f1b needs 4 microbatches or more"),
        ({"schedule": "dualpipe-v", "layers": (1,) * 8, "microbatches": 7}, "needs 8"),
        ({"schedule": "interleaved-1f1b", "layers": (1,) * 8, "microbatches": 9}, "2 rounds"),
        ({"replicas": 0}, "replicas is 0"),
        ({"reduce_kib": 64}, "needs replicas"),
        ({"mark_steps": False}, "for a server"),
        ({"schedule": "forward-only", "microbatches": 1, "in_flight": 0}, "in_flight is 0"),
        ({"in_flight": 2}, "one forward pass a batch"),
    ],
)
def test_a_workload_that_torch_would_refuse_is_refused_with_a_hint(wrong, message):
    with pytest.raises(UsageError, match=message) as refusal:
        Workload(**wrong)
    assert refusal.value.hint


def test_a_v_schedule_folds_the_stages_back_onto_the_first_rank():
    workload = Workload(schedule="zbv", layers=(1,) * 8)
    assert [workload.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert workload.stages_of(0) == (0, 7)


def test_a_looped_schedule_deals_the_stages_around():
    workload = Workload(schedule="interleaved-1f1b", layers=(1,) * 8)
    assert workload.stages_of(1) == (1, 5)


def test_replicas_of_a_stage_lie_side_by_side():
    workload = Workload(ranks=4, replicas=2)
    assert workload.world == 8
    assert workload.pipeline_of(3) == (1, 3, 5, 7)
    assert workload.replicas_of(3) == (2, 3)
    assert [workload.position_of(process) for process in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_layers_are_counted_through_the_whole_model():
    workload = Workload(layers=(1, 2, 3, 4))
    assert [list(workload.layers_of(stage)) for stage in (0, 1, 3)] == [[0], [1, 2], [6, 7, 8, 9]]


def test_a_planted_imbalance_stretches_only_its_layer():
    workload = Workload(layers=(1, 1, 1, 1), layer_scale=(1, 1, 2.5, 1))
    assert [workload.forward_ns(layer) for layer in (1, 2)] == [4_000_000, 10_000_000]
    assert [workload.backward_ns(layer) for layer in (1, 2)] == [8_000_000, 20_000_000]


def test_the_schedules_are_called_what_the_design_calls_them():
    assert list(SCHEDULES) == [
        "forward-only",
        "gpipe",
        "1f1b",
        "interleaved-1f1b",
        "looped-bfs",
        "interleaved-zb",
        "zbv",
        "dualpipe-v",
    ]


@pytest.mark.slow
def test_importing_the_demo_does_not_import_torch():
    program = "import sys, debubble.annexes.demo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_one_replica_may_be_slower_than_the_others():
    workload = Workload(replicas=2, replica_scale=(1.0, 1.5))
    assert workload.as_run_by(0) == workload
    assert workload.as_run_by(1).forward_ns(0) == 1.5 * workload.forward_ns(0)
    assert workload.as_run_by(1).backward_ns(0) == 1.5 * workload.backward_ns(0)
