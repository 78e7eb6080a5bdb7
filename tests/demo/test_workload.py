from __future__ import annotations

import subprocess
import sys

import pytest

from debubble.annexes.demo.workload import Workload
from debubble.errors import UsageError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ranks": 1, "layers": (4,)}, "ranks is 1"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"layers": (4, 4, 4)}, "3 stages"),
        ({"layers": (4, 0, 4, 4)}, "without layers"),
        ({"layers": ()}, "0 stages"),
        ({"forward_ms": -1.0}, "zero or more"),
        ({"backward_ms": float("nan")}, "zero or more"),
        ({"schedule": "zb-h2"}, "no schedule 'zb-h2'"),
        ({"schedule": "zbv"}, "4 stages, which zbv"),
        ({"schedule": "looped-bfs", "layers": (1,) * 6}, "6 stages, which looped-bfs"),
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


@pytest.mark.slow
def test_importing_the_demo_does_not_import_torch():
    program = "import sys, debubble.annexes.demo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
