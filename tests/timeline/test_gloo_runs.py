"""Real gloo pipelines on this machine: the analysis against what the stages themselves logged."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
from demo.several import run_several

from debubble.demo import Workload
from debubble.demo.truth import read_truth
from debubble.errors import NoPipeline
from debubble.report.find import answer
from debubble.timeline.build import build_timeline
from debubble.timeline.figures import measure_pipeline
from debubble.trace.run import find_run, read_run

pytestmark = pytest.mark.slow

MS = 1_000_000
SLACK = 0.002
RANKS = 4
# Long layers: a layer's own overhead, 0.2 to 0.4 ms of torch and profiler, is no call of the truth.
TRAINING = {"layers": (1,) * RANKS, "microbatches": 4, "forward_ms": 40, "backward_ms": 80}
SERVER = {
    "schedule": "forward-only",
    "layers": (1,) * RANKS,
    "microbatches": 1,
    "forward_ms": 30,
    "warmup": 4,
    "steps": 15,
}
SCHEDULES = ("1f1b", "gpipe", "forward-only")
IN_FLIGHT = (1, 2, 4, 5)
WORKLOADS = {
    **{name: Workload(schedule=name, warmup=1, **TRAINING) for name in SCHEDULES},
    **{f"serve{k}": Workload(in_flight=k, mark_steps=False, **SERVER) for k in IN_FLIGHT},
    **{f"serve{k}_marked": Workload(in_flight=k, **SERVER) for k in (1, 2)},
    "2x2": Workload(
        ranks=2,
        replicas=2,
        layers=(1, 1),
        microbatches=4,
        reduce_kib=4096,
        warmup=1,
        steps=3,
        forward_ms=40,
        backward_ms=80,
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run everything once; return a function from a run's name to its ranks' traces."""
    root = tmp_path_factory.mktemp("gloo")
    run_several(WORKLOADS, root)

    @cache
    def read(name):
        return read_run(find_run([str(root / name)])).ranks

    read.root = root
    return read


def truths_of(runs, name):
    return [read_truth(runs.root / name / f"truth{rank}.json") for rank in range(RANKS)]


def bubble_of(spans):
    """The bubble of one step by its definition, from one list of (start, end) a rank."""
    begin = min(start for rank in spans for start, _ in rank)
    end = max(stop for rank in spans for _, stop in rank)
    busy = 0
    for rank in spans:
        reach = begin
        for start, stop in sorted(rank):
            busy += max(0, stop - max(start, reach))
            reach = max(reach, stop)
    return 1 - busy / (len(spans) * (end - begin))


def spans_of(truths, step, what):
    return [
        [(one.start_ns, one.end_ns) for one in getattr(truth.profiled[step], what)]
        for truth in truths
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_is_what_the_stages_logged(runs, name):
    figures = measure_pipeline(build_timeline(runs(name)), 0)
    truths = truths_of(runs, name)
    assert (figures.schedule, figures.microbatches) == (name, 4)
    assert len(figures.windows) == WORKLOADS[name].steps
    for step, window in enumerate(figures.windows):
        calls = bubble_of(spans_of(truths, step, "calls"))
        assert window.bubble_fraction == pytest.approx(calls, abs=0.01)
        # Calls leave out what torch adds to a pass, passes hold what it does between operators.
        passes = bubble_of(spans_of(truths, step, "passes"))
        assert passes - SLACK < window.bubble_fraction < calls + SLACK


def test_two_pipelines_are_told_apart_though_no_message_names_its_group(runs):
    timeline = build_timeline(runs("2x2"))
    members = [[rank.rank for rank in timeline.ranks_of(one)] for one in timeline.pipelines]
    assert members == [[0, 2], [1, 3]]
    for one in timeline.pipelines:
        figures = measure_pipeline(timeline, one)
        assert (figures.schedule, figures.microbatches) == ("1f1b", 4)
    assert timeline.gaps == ()


def renamed(trace, description):
    groups = tuple(replace(group, description=description) for group in trace.groups)
    return replace(trace, groups=groups)


def test_the_messages_alone_tell_the_pipeline_from_the_replicas(runs):
    timeline = build_timeline([renamed(trace, "undefined") for trace in runs("2x2")])
    assert [[r.rank for r in timeline.ranks_of(one)] for one in (0, 1)] == [[0, 2], [1, 3]]


def test_a_group_that_fits_as_well_leaves_the_peers_unknown_and_says_so(runs):
    """The pairs 0-3 and 1-2 exchange the same messages as the true pairs 0-2 and 1-3."""
    doubtful = []
    for trace in runs("2x2"):
        others = [
            replace(group, name=f"{group.name}'", ranks=(0, 3) if trace.rank in {0, 3} else (1, 2))
            for group in trace.groups
            if len(group.ranks) == 2 and group.ranks[1] - group.ranks[0] == 2
        ]
        doubtful.append(renamed(replace(trace, groups=(*trace.groups, *others)), "undefined"))
    with pytest.raises(NoPipeline) as refusal:
        build_timeline(doubtful)
    assert "group_desc" in refusal.value.hint


def test_an_all_reduce_inside_a_pass_is_no_bubble(runs):
    timeline = build_timeline(runs("2x2"))
    truths = truths_of(runs, "2x2")
    for one in timeline.pipelines:
        figures = measure_pipeline(timeline, one)
        mine = [truths[rank.rank] for rank in figures.ranks]
        for step, window in enumerate(figures.windows):
            calls = bubble_of(spans_of(mine, step, "calls"))
            passes = bubble_of(spans_of(mine, step, "passes"))
            assert passes - SLACK < window.bubble_fraction < calls + SLACK
            # Were the reductions bubble, it would be larger by what they take.
            whole = 2 * window.length_ns
            reduced = sum(
                call.end_ns - call.start_ns
                for truth in mine
                for call in truth.profiled[step].calls
                if call.part == "reduce"
            )
            missing = 1 - window.bubble_fraction - window.useful_fraction
            assert missing == pytest.approx(reduced / whole, abs=0.01)
            assert reduced / whole > 0.02


def test_optimizer_and_gradient_reduction_lie_outside_the_window(runs):
    timeline = build_timeline(runs("2x2"))
    truths = truths_of(runs, "2x2")
    for one in timeline.pipelines:
        figures = measure_pipeline(timeline, one)
        for step, window in enumerate(figures.windows):
            last = max(
                call.end_ns
                for rank in figures.ranks
                for call in truths[rank.rank].profiled[step].calls
            )
            assert 0 <= window.end_ns - last < 5 * MS
        assert set(figures.outside_ns) == {"optimizer", "reduction", "clipping", "other"}
        assert figures.outside_ns["reduction"] > 0.1 * MS
        between = [
            after.start_ns - before.end_ns
            for before, after in zip(figures.windows, figures.windows[1:], strict=False)
        ]
        assert sum(figures.outside_ns.values()) == pytest.approx(np.mean(between), rel=0.5)
        for rank in figures.ranks:
            for _, intervals in rank.outside:
                window = figures.windows[1]
                assert intervals.inside(window.start_ns, window.start_ns + 80 * MS) == 0


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_a_server_without_steps_is_a_stream_with_its_batches_in_flight(runs, in_flight):
    timeline = build_timeline(runs(f"serve{in_flight}"))
    figures = measure_pipeline(timeline, 0)
    assert (figures.kind, figures.microbatches, figures.schedule) == ("stream", None, None)
    assert figures.stream.in_flight == in_flight
    assert timeline.gaps == figures.gaps == ()
    assert f"with {in_flight} batch" in answer(figures)
    theory = max(0.0, 1 - in_flight / RANKS)
    if theory:
        assert figures.bubble_fraction == pytest.approx(theory, abs=0.03)
    else:
        # Seen: 0.05 to 0.3, growing with what else the machine's two cores do.
        assert figures.bubble_fraction < 0.4


@pytest.mark.parametrize("name", [f"serve{k}" for k in IN_FLIGHT] + ["serve2_marked"])
def test_a_streams_bubble_and_latency_are_what_the_stages_logged(runs, name):
    figures = measure_pipeline(build_timeline(runs(name)), 0)
    truths = truths_of(runs, name)
    calls = [[call for step in truth.profiled for call in step.calls] for truth in truths]
    begin, end = figures.stream.start_ns, figures.stream.end_ns
    # Captured is more than computed: a rank's first batch had to arrive.
    assert max(step.start_ns for step in (truth.profiled[0] for truth in truths)) < begin + MS
    assert begin <= max(rank[0].start_ns for rank in calls)
    assert end == pytest.approx(min(rank[-1].end_ns for rank in calls), abs=5 * MS)
    busy = sum(
        max(0, min(call.end_ns, end) - max(call.start_ns, begin)) for rank in calls for call in rank
    )
    expected = 1 - busy / (RANKS * (end - begin))
    assert figures.bubble_fraction == pytest.approx(expected, abs=0.02)
    latency = [out.end_ns - into.start_ns for into, out in zip(calls[0], calls[-1], strict=True)]
    assert figures.batch_latency_ns == pytest.approx(np.median(latency), abs=3 * MS)
    assert figures.stream.batch_latency_p95_ns == pytest.approx(
        np.percentile(latency, 95), abs=3 * MS
    )
    assert figures.stream.batches == len(latency)


def test_a_server_that_marks_its_batches_as_steps_is_the_same_stream(runs):
    figures = measure_pipeline(build_timeline(runs("serve2_marked")), 0)
    assert figures.kind == "stream"
    assert figures.stream.in_flight == 2
    assert figures.bubble_fraction == pytest.approx(0.5, abs=0.03)


def test_one_marked_batch_at_a_time_is_a_loop_of_one_microbatch(runs):
    """Steps that do not overlap are steps, and theory says the same of both."""
    figures = measure_pipeline(build_timeline(runs("serve1_marked")), 0)
    assert (figures.kind, figures.microbatches) == ("forward", 1)
    assert figures.bubble_fraction == pytest.approx(0.75, abs=0.03)


def captured_from(trace, begin_ns):
    """The same rank, its profiler started later."""

    def cut(table):
        kept = table.start_ns >= begin_ns
        return replace(table, **{c.name: getattr(table, c.name)[kept] for c in fields(table)})

    tables = ("operators", "annotations", "memory", "cpu_operators")
    return replace(trace, **{name: cut(getattr(trace, name)) for name in tables})


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_captured_from_different_batches_on_are_still_joined_batch_by_batch(runs, late):
    """The profilers of a server start when each rank hears of it, not at the same batch."""
    traces = list(runs("serve2"))
    whole = measure_pipeline(build_timeline(traces), 0)
    truth = truths_of(runs, "serve2")[late]
    third = truth.profiled[3].calls[0].start_ns
    for rank in range(late + 1):
        traces[rank] = captured_from(traces[rank], third + 40 * MS)
    figures = measure_pipeline(build_timeline(traces), 0)
    assert figures.stream.in_flight == 2
    assert figures.batch_latency_ns == pytest.approx(whole.batch_latency_ns, abs=3 * MS)
    assert figures.bubble_fraction == pytest.approx(whole.bubble_fraction, abs=0.03)
