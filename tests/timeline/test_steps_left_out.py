"""Steps that no figure is made of: cut by the capture, not on all ranks, or full of set-up."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from support.simulator.analysis import analyse, setup_of
from support.simulator.devices import Play, true_bubbles, true_windows
from support.simulator.written_traces import RankWriter, Writing, write_run
from support.traces.kineto_events import details, send
from support.traces.trimmed import captured

from debubble.timeline.build import build_run, build_timeline
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.steps import find_steps
from debubble.trace.run import find_run, read_run

KINDS = [
    ("forward-only", "none", {}),
    ("forward-only", "simple", {"buffered": True}),
    ("gpipe", "simple", {}),
    ("gpipe", "none", {"early": True}),
    ("1f1b", "none", {"fused": True}),
    ("1f1b", "none", {"fused": True, "run_ahead": False}),
    ("zbv", "runtime", {"buffered": True}),
]
EACH_KIND = pytest.mark.parametrize(("name", "labels", "behaviour"), KINDS)


@cache
def played(name, labels, behaviour, steps):
    play = Play(setup_of(name, 4, 8, even=False, steps=steps, **dict(behaviour)))
    with TemporaryDirectory() as folder:
        write_run(play, Path(folder), Writing(labels=labels))
        return play, read_run(find_run([folder])).ranks


def run_of(name, labels, behaviour, steps):
    """Return a run and its traces in a list of one's own; tests cut the same few runs."""
    play, traces = played(name, labels, tuple(behaviour.items()), steps)
    return play, list(traces)


def stamp(play, trace, moment_ns):
    """What a rank's clock shows at a true time; its first step is whole."""
    return int(find_steps(trace).start_ns[0]) - play.steps[0][trace.rank].start_ns + moment_ns


def middle_of(play, trace, step, share=0.5):
    """A moment in a step, as the device runs it."""
    kernels = [one for one in play.steps[step][trace.rank].kernels if one.computes]
    begin, end = kernels[0].start_ns, kernels[-1].end_ns
    return stamp(play, trace, begin + int(share * (end - begin)))


def measured(traces):
    timeline = build_timeline(traces)
    figures = measure_pipeline(timeline, 0)
    return figures, [str(gap.code) for gap in (*timeline.gaps, *figures.gaps)]


def assert_true(figures, play, steps):
    assert [window.step for window in figures.windows] == steps
    bubbles = [window.bubble_fraction for window in figures.windows]
    assert bubbles == pytest.approx([true_bubbles(play)[step] for step in steps], abs=0.001)
    assert figures.microbatches == play.setup.microbatches
    assert figures.schedule == play.setup.schedule


@pytest.mark.slow
@EACH_KIND
@pytest.mark.parametrize("cut", [(0,), (2,), (3,), (0, 1, 2, 3)])
def test_a_step_whose_end_was_not_captured_is_left_out_and_named(name, labels, behaviour, cut):
    play, traces = run_of(name, labels, behaviour, steps=3)
    for rank in cut:
        traces[rank] = captured(traces[rank], end_ns=middle_of(play, traces[rank], 2))
    figures, codes = measured(traces)
    assert_true(figures, play, [0, 1])
    assert codes == ["cut_steps"]
    assert [(one.step, one.why) for one in figures.left_out] == [(2, "cut_steps")]
    assert figures.gaps[0].message.startswith("step 2 captured in part by rank")
    assert str(cut[0]) in figures.gaps[0].message.partition("by rank")[2]


@pytest.mark.parametrize("cut", [(0,), (2,), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize(
    ("name", "labels", "behaviour"), [kind for kind in KINDS if "run_ahead" in kind[2]]
)
def test_a_step_whose_beginning_was_not_captured_has_no_mark_and_is_left_out(
    name, labels, behaviour, cut
):
    play, traces = run_of(name, labels, behaviour, steps=3)
    for rank in cut:
        start = stamp(play, traces[rank], play.steps[0][rank].blocks[5].start_ns)
        traces[rank] = captured(traces[rank], begin_ns=start)
    figures, codes = measured(traces)
    assert_true(figures, play, [1, 2])
    assert codes == ([] if len(cut) == 4 else ["uneven_steps"])


@EACH_KIND
def test_a_single_step_that_is_cut_is_measured_in_part_and_marked_so(name, labels, behaviour):
    play, traces = run_of(name, labels, behaviour, steps=1)
    cut = [captured(trace, end_ns=middle_of(play, trace, 0, 0.7)) for trace in traces]
    figures, codes = measured(cut)
    assert figures.cut
    assert codes == ["cut_steps"]
    assert figures.left_out == ()
    assert len(figures.windows) == 1
    assert 0 < figures.bubble_fraction < 1
    assert figures.microbatches is None
    whole, _ = measured(traces)
    assert not whole.cut


@EACH_KIND
def test_the_last_kernels_may_be_missing_though_every_pass_was_begun(name, labels, behaviour):
    play, traces = run_of(name, labels, behaviour, steps=2)
    kernels = [one for one in play.steps[1][0].kernels if one.computes and one.action]
    last = max(one.start_ns for one in kernels)
    if max(one.launch_ns for one in kernels) > last:
        pytest.skip("this host does not run ahead of its device")
    traces[0] = captured(traces[0], end_ns=stamp(play, traces[0], last + 1))
    figures, codes = measured(traces)
    assert_true(figures, play, [0])
    assert codes == ["cut_steps"]


@pytest.mark.slow
@pytest.mark.parametrize(("less", "more"), [(0, 3), (3, 0), (1, 2)])
def test_only_steps_that_all_ranks_hold_are_measured(less, more):
    play, traces = run_of("1f1b", "none", {"fused": True, "run_ahead": False}, 4)
    marks = [find_steps(trace) for trace in traces]
    traces[less] = captured(traces[less], begin_ns=int(marks[less].start_ns[1]))
    traces[more] = captured(traces[more], end_ns=int(marks[more].start_ns[3]))
    figures, codes = measured(traces)
    assert_true(figures, play, [1, 2])
    assert codes == ["uneven_steps"]
    message = figures.gaps[0].message
    assert message.startswith("steps 0, 3 left out")
    assert [one.step for one in figures.left_out] == [0, 3]


def test_time_from_step_to_step_is_not_taken_over_one_that_was_left_out():
    play, traces = run_of("1f1b", "none", {"fused": True, "run_ahead": False}, 5)
    timeline = build_timeline(traces)
    passes = timeline.passes
    lost = (passes.rank == 1) & (passes.step == 2)
    figures = measure_pipeline(replace(timeline, passes=passes.where(~lost)), 0)
    steps = np.diff([window[0] for window in true_windows(play)])[[0, 3]]
    assert figures.step_time_ns == pytest.approx(steps.mean(), rel=0.001)


class SendsShapes(RankWriter):
    """A rank that sends a few bytes to the next one before its first batches, as torch does."""

    cold = 1

    def events(self, steps):
        yield from super().events(steps)
        for step in steps[: self.cold]:
            at = self.clock.us(step.start_ns) + 1
            if self.rank:
                yield from self._small("recv", self.rank - 1, at)
            if self.rank + 1 < len(self.members):
                yield from self._small("send", self.rank + 1, at + 10)

    def _small(self, way, peer, at):
        yield send(peer, ts=at, dur=5, kind={"recv": "recv_"}.get(way, way))
        known = {"Process Group Name": "pp", "Process Group Ranks": str(list(self.members))}
        yield details(way, ts=at + 1, dur=2, **{"In msg nelems": 8, **known})


def with_set_up(folder, monkeypatch, *, steps, cold=1):
    monkeypatch.setattr(SendsShapes, "cold", cold)
    monkeypatch.setattr("support.simulator.written_traces.RankWriter", SendsShapes)
    play = Play(setup_of("gpipe", 3, 6, steps=steps))
    write_run(play, folder, Writing(labels="simple"))
    return analyse(folder, play)


@pytest.mark.parametrize("cold", [1, 2])
def test_steps_ahead_of_which_shapes_are_sent_are_cold(cold, tmp_path, monkeypatch):
    found = with_set_up(tmp_path, monkeypatch, steps=5, cold=cold)
    assert_true(found.figures, found.play, list(range(cold, 5)))
    assert [str(gap.code) for gap in found.gaps] == ["cold_steps"]
    assert "small messages went ahead" in found.gaps[0].message
    assert {row.count for row in found.figures.stages} == {6 * (5 - cold)}


def test_of_three_steps_none_is_left_out_for_being_cold(tmp_path, monkeypatch):
    found = with_set_up(tmp_path, monkeypatch, steps=3)
    assert_true(found.figures, found.play, [0, 1, 2])
    assert found.gaps == ()


def test_where_all_steps_set_something_up_none_is_colder_than_the_others(tmp_path, monkeypatch):
    found = with_set_up(tmp_path, monkeypatch, steps=4, cold=4)
    assert_true(found.figures, found.play, [0, 1, 2, 3])


def test_a_step_is_not_cold_for_being_slow():
    play, traces = run_of("1f1b", "none", {"fused": True, "slow_first": 3.0}, 5)
    figures, codes = measured(traces)
    lengths = [window.length_ns for window in figures.windows]
    assert lengths[0] > 2.5 * np.median(lengths)
    assert_true(figures, play, [0, 1, 2, 3, 4])
    assert codes == []


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("slowest", "kept"), [(0, [1, 2, 3, 4]), (2, [0, 1, 2, 3, 4])])
def test_the_first_step_of_a_job_is_cold_where_a_table_counts_it_and_it_is_slow(
    slowest, kept, first, tmp_path
):
    rows = ["step,pipeline,stage,microbatch,op,start_us,duration_us"]
    for step in range(5):
        length = 30 if step == slowest else 10
        rows += [
            f"{first + step},0,{stage},{m},F,{1000 * step + length * (stage + m)},{length}"
            for stage in range(3)
            for m in range(4)
        ]
    (tmp_path / "ops.csv").write_text("\n".join(rows))
    figures = measure_pipeline(build_run(read_run(find_run([str(tmp_path / "ops.csv")]))), 0)
    assert [window.step - first for window in figures.windows] == kept
    assert [str(gap.code) for gap in figures.gaps] == ([] if len(kept) == 5 else ["cold_steps"])
