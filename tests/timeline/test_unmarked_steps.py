"""Runs whose profiler was never told of a step: the pipeline's own rhythm tells."""

from __future__ import annotations

import pytest
from support.simulator.analysis import EARLY, FUSED, names_of, setup_of, simulated, true_names
from support.simulator.devices import Play, true_bubbles
from support.simulator.written_traces import Clock, Writing, write_run
from support.traces.read_once import read_recording
from support.traces.recordings import recorded_run
from support.traces.trimmed import captured, in_step_with_device, without_marks
from timeline.test_recorded_runs import RUNS as RECORDED_RUNS
from timeline.test_simulated_runs import RUNS as SIMULATED_RUNS
from timeline.test_steps_left_out import run_of

from debubble.timeline.build import build_timeline
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.steps import find_steps
from debubble.trace.run import find_run, read_run

MS = 1_000_000
# Of forward passes alone, nothing but a label parts a step from a stream.
SIMULATED = [
    *(run for run in SIMULATED_RUNS if run[0] != "forward-only" or run[5] == "simple"),
    ("gpipe", 3, 1, False, {}, "none"),
    ("1f1b", 4, 8, False, FUSED | {"run_ahead": False}, "none"),
    ("1f1b", 3, 6, False, FUSED | {"recompute": True}, "none"),
    ("1f1b", 2, 6, False, EARLY, "none"),
]
EACH_SIMULATED = pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "even", "behaviour", "labels"),
    SIMULATED,
    ids=["-".join(map(str, (*run[:3], *run[4], run[5]))) for run in SIMULATED],
)


def traces_of(name):
    return read_recording(recorded_run(name)).ranks


def analyse(traces):
    timeline = build_timeline(traces)
    figures = measure_pipeline(timeline, 0)
    return figures, [gap.code for gap in (*timeline.gaps, *figures.gaps)]


def assert_alike(found, marked):
    assert (found.kind, found.schedule) == (marked.kind, marked.schedule)
    assert found.microbatches == marked.microbatches
    assert len(found.windows) == len(marked.windows)
    assert found.bubble_fraction == pytest.approx(marked.bubble_fraction, abs=0.001)
    assert found.batch_latency_ns == pytest.approx(marked.batch_latency_ns, rel=0.001)


@pytest.mark.parametrize("name", RECORDED_RUNS)
def test_recorded_runs_measure_the_same_without_their_marks(name):
    marked, _ = analyse(traces_of(name))
    found, codes = analyse([without_marks(trace) for trace in traces_of(name)])
    assert_alike(found, marked)
    assert codes == ["steps_inferred"]


@pytest.mark.slow
@EACH_SIMULATED
def test_simulated_runs_measure_the_same_without_their_marks(
    name, ranks, microbatches, even, behaviour, labels, tmp_path
):
    setup = setup_of(name, ranks, microbatches, even=even, steps=3, **behaviour)
    found = simulated(tmp_path, setup, labels=labels, marks=False)
    assert sorted(names_of(found)) == sorted(true_names(found))
    assert found.figures.microbatches == microbatches
    assert found.figures.schedule == (name if microbatches > 1 else found.figures.schedule)
    bubbles = [window.bubble_fraction for window in found.figures.windows]
    # Of one microbatch nothing but a mark tells a step's end from the next one's first pass: its
    # optimizer is laid to that pass, the reduction between them to none.
    off = 0.003 if microbatches == 1 else 0.001
    assert bubbles == pytest.approx(true_bubbles(found.play), abs=off)
    assert [gap.code for gap in found.gaps] == ["steps_inferred"]


@pytest.mark.slow
@EACH_SIMULATED
def test_clocks_that_are_off_do_not_hide_the_rhythm(
    name, ranks, microbatches, even, behaviour, labels, tmp_path
):
    setup = setup_of(name, ranks, microbatches, even=even, steps=3, **behaviour)
    skews = (0, 50 * MS, -50 * MS, 37 * MS, -21 * MS, 13 * MS)
    clocks = [Clock(skew_ns=skew) for skew in skews[:ranks]]
    found = simulated(tmp_path, setup, labels=labels, clocks=clocks, marks=False)
    assert sorted(names_of(found)) == sorted(true_names(found))
    bubbles = [window.bubble_fraction for window in found.figures.windows]
    assert bubbles == pytest.approx(true_bubbles(found.play), abs=0.01)


def test_a_single_step_is_found(tmp_path):
    found = simulated(tmp_path, setup_of("1f1b", 4, 8, fused=True, steps=1), marks=False)
    assert sorted(names_of(found)) == sorted(true_names(found))
    assert found.figures.schedule == "1f1b"


def test_free_running_forward_passes_stay_a_stream():
    figures, codes = analyse([without_marks(trace) for trace in traces_of("fwd_m8")])
    assert figures.kind == "stream"
    assert figures.bubble_fraction is None
    assert "no_common_span" in codes


@pytest.mark.parametrize("labels", ["none", "simple"])
def test_one_microbatch_after_the_other_is_a_server_and_stays_a_stream(labels, tmp_path):
    setup = setup_of("forward-only", 3, 1, steps=6)
    found = simulated(tmp_path, setup, labels=labels, marks=False)
    assert found.figures.kind == "stream"
    assert found.figures.microbatches is None
    assert "steps_inferred" not in [gap.code for gap in found.gaps]


def run_of_four_steps(name, labels):
    behaviour = {"run_ahead": False, "fused": name == "1f1b"}
    return run_of(name, labels, behaviour, steps=4)


def begins_of(traces):
    """When each rank began each step, on the host."""
    return [find_steps(trace).start_ns for trace in traces]


@pytest.mark.parametrize(("name", "labels"), [("1f1b", "none"), ("gpipe", "simple")])
@pytest.mark.parametrize("late", [(0,), (1,), (3,), (0, 1, 2, 3)])
def test_a_capture_that_begins_in_the_middle_of_a_step_leaves_that_step_out(name, labels, late):
    play, traces = run_of_four_steps(name, labels)
    begins = begins_of(traces)
    for rank in late:
        middle = int(play.steps[0][rank].blocks[9].start_ns)
        offset = int(begins[rank][0]) - play.steps[0][rank].start_ns
        traces[rank] = captured(traces[rank], begin_ns=middle + offset)
    figures, codes = analyse([without_marks(trace) for trace in traces])
    bubbles = [window.bubble_fraction for window in figures.windows]
    assert bubbles == pytest.approx(true_bubbles(play)[1:], abs=0.001)
    assert (figures.schedule, figures.microbatches) == (name, 8)
    assert sorted(codes) == ["cut_steps", "steps_inferred"]


def test_a_rhythm_that_is_none_is_said(tmp_path):
    """Forward and backward in turns, without the beginning or the end of a step."""
    play = Play(setup_of("1f1b", 3, 16, fused=True, steps=1, run_ahead=False))
    write_run(play, tmp_path, Writing())
    traces = read_run(find_run([str(tmp_path)])).ranks
    span = traces[0].kernels.start_ns[[0, -1]]
    begin, end = (int(span[0] + share * (span[1] - span[0])) for share in (0.3, 0.6))
    traces = [in_step_with_device(without_marks(trace), begin, end) for trace in traces]
    figures, codes = analyse(traces)
    assert figures.bubble_fraction is None
    assert codes == ["no_steps"]
    assert "does not repeat" in figures.gaps[0].message


@pytest.mark.parametrize(("name", "labels"), [("1f1b", "none"), ("gpipe", "simple")])
@pytest.mark.parametrize("late", [0, 1, 3])
def test_ranks_captured_from_different_steps_on_are_joined_step_by_step(name, labels, late):
    play, traces = run_of_four_steps(name, labels)
    second = int(begins_of(traces)[late][1])
    traces[late] = captured(traces[late], begin_ns=second)
    figures, codes = analyse([without_marks(trace) for trace in traces])
    bubbles = [window.bubble_fraction for window in figures.windows]
    assert bubbles == pytest.approx(true_bubbles(play)[1:], abs=0.001)
    assert codes == ["steps_inferred", "uneven_steps"]


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_a_rank_without_a_trace_does_not_hide_the_rhythm_where_labels_show_it(missing, tmp_path):
    play = Play(setup_of("gpipe", 4, 5))
    write_run(play, tmp_path, Writing(labels="simple", marks=False))
    traces = read_run(find_run([str(tmp_path)])).ranks
    figures, codes = analyse([trace for trace in traces if trace.rank != missing])
    assert [window.step for window in figures.windows] == [0, 1]
    assert figures.microbatches == 5
    assert "steps_inferred" in codes
