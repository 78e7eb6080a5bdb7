"""Real gloo replicas on this machine, one of them slower: named, and late by what they logged.

How late depends on how busy the machine is: that carries the mark `accuracy`.
"""

from __future__ import annotations

from statistics import median

import pytest
from support.jobs.demo_workloads import hasty, measured_in, run_several
from support.jobs.recorded_pipeline import Workload, read_truth

from debubble.timeline.build import build_timeline
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.replicas import judge_run
from debubble.trace.run import find_run, read_run

pytestmark = pytest.mark.slow

SIZES = {
    "ranks": 2,
    "replicas": 2,
    "layers": (1, 1),
    "microbatches": 4,
    "warmup": 1,
    "steps": 6,
    "forward_ms": 20,
    "backward_ms": 40,
}
WORKLOADS = {
    "slow": Workload(replica_scale=(1.0, 1.25), **SIZES),
    "in_step": Workload(replica_scale=(1.0, 1.25), reduce_kib=256, **SIZES),
    "equal": Workload(**SIZES),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    root = tmp_path_factory.mktemp("gloo-replicas")
    quick = {name: hasty(workload) for name, workload in WORKLOADS.items()}
    run_several(WORKLOADS if measured_in(request.session) else quick, root)
    return root


def judged(runs, name):
    timeline = build_timeline(read_run(find_run([str(runs / name)])).ranks)
    return judge_run([measure_pipeline(timeline, one) for one in timeline.pipelines])


def ends_of(runs, name, rank):
    truth = read_truth(runs / name / f"truth{rank}.json")
    return [max(one.end_ns for one in step.passes) for step in truth.profiled]


def test_replicas_are_found_whatever_else_the_machine_does(runs):
    for name in WORKLOADS:
        found = judged(runs, name)
        assert [one.ranks for one in found.replicas] == [(0, 2), (1, 3)]
        assert len(found.steps) == SIZES["steps"]


@pytest.mark.accuracy
def test_a_slower_replica_is_named_and_is_late_by_what_the_processes_logged(runs):
    found = judged(runs, "slow")
    assert (found.verdict, found.slowest) == ("drags", 1)
    logged = median(
        slow - fast
        for fast, slow in zip(ends_of(runs, "slow", 0), ends_of(runs, "slow", 1), strict=True)
    )
    assert found.replicas[1].late_s * 1e9 == pytest.approx(logged, rel=0.05)
    assert found.saved_s * 1e9 == pytest.approx(logged, rel=0.05)
    assert found.why.what == "stage"
    assert found.why.here_s == pytest.approx(1.25 * found.why.elsewhere_s, rel=0.03)


@pytest.mark.accuracy
def test_replicas_that_reduce_in_every_forward_pass_are_told_apart_as_well(runs):
    found = judged(runs, "in_step")
    assert (found.verdict, found.slowest) == ("drags", 1)


@pytest.mark.accuracy
def test_equal_replicas_are_not_told_apart(runs):
    assert judged(runs, "equal").verdict != "drags"
