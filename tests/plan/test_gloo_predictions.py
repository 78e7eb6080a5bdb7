"""Real gloo pipelines: predict a change, then run it. Wants a quiet machine: `make accuracy`."""

from __future__ import annotations

from statistics import median

import pytest
from support.jobs.recorded_pipeline import Workload, run_several

from debubble.plan.baseline import measure_baseline
from debubble.plan.change import Change
from debubble.plan.option import Idea, weigh
from debubble.timeline.build import build_timeline
from debubble.timeline.figures import measure_pipeline
from debubble.trace.run import find_run, read_run

pytestmark = [pytest.mark.slow, pytest.mark.accuracy]

LAYERS = {"forward_ms": 20, "backward_ms": 40, "warmup": 1, "steps": 4}
SPLIT = (2, 2, 2, 4)
RUNS = {
    "now": Workload(schedule="1f1b", layers=SPLIT, microbatches=4, **LAYERS),
    "more": Workload(schedule="1f1b", layers=SPLIT, microbatches=8, **LAYERS),
    "even": Workload(schedule="1f1b", layers=(3, 2, 2, 3), microbatches=4, **LAYERS),
    "gpipe": Workload(schedule="gpipe", layers=SPLIT, microbatches=4, **LAYERS),
    "all": Workload(schedule="gpipe", layers=(3, 2, 2, 3), microbatches=8, **LAYERS),
}
CHANGES = {
    "more": Change(microbatches=8),
    "even": Change(split=(3, 2, 2, 3)),
    "gpipe": Change(schedule="gpipe"),
    "all": Change(schedule="gpipe", split=(3, 2, 2, 3), microbatches=8),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    root = tmp_path_factory.mktemp("gloo")
    run_several(RUNS, root)

    def of(name):
        timeline = build_timeline(read_run(find_run([str(root / name)])).ranks)
        return timeline, measure_pipeline(timeline, 0)

    return {name: of(name) for name in RUNS}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_predicted_is_what_runs(measured, name):
    baseline = measure_baseline(*measured["now"], layers=SPLIT)
    option = weigh(baseline, Idea(lever="test", change=CHANGES[name]))
    windows = [window.length_ns for window in measured[name][1].windows]
    assert option.window_ns == pytest.approx(median(windows), rel=0.05)
