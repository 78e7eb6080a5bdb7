"""Pipelines whose truth is known to the nanosecond, written as traces and read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from host_programs import MS, US, Setup
from simulated import Play, true_bubbles, true_passes, true_windows
from simulated_traces import Clock, Writing, write_run

from debubble.errors import Code
from debubble.timeline.build import build_timeline
from debubble.timeline.figures import PipelineFigures, measure_pipeline
from debubble.timeline.model import PassKind, Timeline
from debubble.trace.run import find_run, read_run

UNEVEN = (1.0, 0.6, 1.7, 0.9, 1.2, 0.7, 1.1, 0.8, 1.4, 1.0, 0.9, 1.3)
SKEWS_NS = (0, 50 * MS, -50 * MS, 37 * MS, -21 * MS, 13 * MS)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was run, and what the analysis made of it."""

    play: Play
    timeline: Timeline
    figures: PipelineFigures
    gaps: tuple[Any, ...]


def analyse(folder, play):
    run = read_run(find_run([str(folder)]))
    timeline = build_timeline(run.ranks)
    figures = measure_pipeline(timeline, 0)
    return Found(
        play=play,
        timeline=timeline,
        figures=figures,
        gaps=(*run.gaps, *timeline.gaps, *figures.gaps),
    )


def played(folder, setup, **writing):
    play = Play(setup)
    write_run(play, folder, Writing(**writing))
    return analyse(folder, play)


def setup_of(name, ranks, microbatches, *, even=True, **more):
    stages = ranks * (2 if name in LOOPED else 1)
    weights = () if even else UNEVEN[:stages]
    return Setup(schedule=name, ranks=ranks, microbatches=microbatches, weights=weights, **more)


def names_of(found):
    passes = found.timeline.passes
    columns = (passes.rank, passes.step, passes.stage, passes.kind, passes.microbatch)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [(rank, step, stage, PassKind(kind).name, m) for rank, step, stage, kind, m in rows]


def true_names(found):
    passes = true_passes(found.play)
    return [(one.rank, one.step, one.stage, one.kind, one.microbatch) for one in passes]


def count_messages(play):
    return sum(len(k.messages) for step in play.steps for rank in step for k in rank.kernels) // 2


def assert_all_named(found):
    assert sorted(names_of(found)) == sorted(true_names(found))
    assert len(found.timeline.transfers) == count_messages(found.play)
    assert found.gaps == ()


def assert_measured(found):
    """Absolute times as well as shares: each window, each pass, each bubble."""
    begin = found.timeline.passes.start_ns.min() - min(w[0] for w in true_windows(found.play))
    windows = [(w.start_ns - begin, w.end_ns - begin) for w in found.figures.windows]
    assert windows == true_windows(found.play)
    for window, bubble in zip(found.figures.windows, true_bubbles(found.play), strict=True):
        assert window.bubble_fraction == pytest.approx(bubble, abs=0.001)
    spans = dict(
        zip(
            names_of(found),
            zip(found.timeline.passes.start_ns, found.timeline.passes.end_ns, strict=True),
            strict=True,
        )
    )
    for name, one in zip(true_names(found), true_passes(found.play), strict=True):
        assert spans[name] == (one.start_ns + begin, one.end_ns + begin)


LOOPED = ("interleaved-1f1b", "looped-bfs", "interleaved-zb", "zbv", "dualpipe-v")
FUSED, BUFFERED, EARLY = {"fused": True}, {"buffered": True}, {"early": True}
# schedule, ranks, microbatches, equal stages, how messages behave, labels
RUNS = [
    ("forward-only", 2, 2, True, {}, "simple"),
    ("forward-only", 4, 8, False, BUFFERED, "simple"),
    ("forward-only", 3, 5, False, EARLY, "none"),
    ("forward-only", 6, 12, True, BUFFERED, "none"),
    ("gpipe", 2, 3, True, BUFFERED, "simple"),
    ("gpipe", 4, 8, False, {}, "simple"),
    ("gpipe", 5, 4, False, EARLY, "none"),
    ("gpipe", 6, 12, True, {}, "none"),
    ("1f1b", 2, 2, True, FUSED, "none"),
    ("1f1b", 3, 2, False, FUSED, "none"),
    ("1f1b", 4, 8, True, FUSED, "none"),
    ("1f1b", 5, 7, False, FUSED | BUFFERED, "none"),
    ("1f1b", 6, 12, False, FUSED, "none"),
    ("interleaved-1f1b", 3, 6, False, EARLY, "runtime"),
    ("interleaved-1f1b", 4, 8, True, BUFFERED, "runtime"),
    ("looped-bfs", 4, 5, False, BUFFERED, "runtime"),
    ("zb-h1", 4, 6, False, BUFFERED, "runtime"),
    ("zb-h2", 5, 12, True, EARLY, "runtime"),
    ("interleaved-zb", 4, 8, False, EARLY, "runtime"),
    ("zbv", 2, 4, True, BUFFERED, "runtime"),
    ("zbv", 4, 8, False, EARLY, "runtime"),
    ("dualpipe-v", 3, 8, False, EARLY, "runtime"),
]
EACH_RUN = pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "even", "behaviour", "labels"),
    RUNS,
    ids=["-".join(map(str, (*run[:3], *run[4], run[5]))) for run in RUNS],
)


@EACH_RUN
def test_every_pass_and_transfer_is_found_and_the_bubble_is_true(
    name, ranks, microbatches, even, behaviour, labels, tmp_path
):
    setup = setup_of(name, ranks, microbatches, even=even, **behaviour)
    found = played(tmp_path, setup, labels=labels)
    assert_all_named(found)
    assert_measured(found)
    assert found.figures.schedule == name
    assert found.figures.microbatches == microbatches
    assert found.figures.kind == ("forward" if name == "forward-only" else "training")


@EACH_RUN
def test_clocks_that_are_off_change_the_bubble_by_less_than_one_percent(
    name, ranks, microbatches, even, behaviour, labels, tmp_path
):
    setup = setup_of(name, ranks, microbatches, even=even, **behaviour)
    clocks = [Clock(skew_ns=skew, drift_ppm=20 * (-1) ** n) for n, skew in enumerate(SKEWS_NS)]
    found = played(tmp_path, setup, labels=labels, clocks=clocks[:ranks])
    assert_all_named(found)
    assert found.figures.schedule == name
    for window, (begin, end), bubble in zip(
        found.figures.windows, true_windows(found.play), true_bubbles(found.play), strict=True
    ):
        assert window.bubble_fraction == pytest.approx(bubble, abs=0.01)
        assert window.length_ns == pytest.approx(end - begin, rel=0.02)


@pytest.mark.parametrize("wire_ns", [20 * US, 4 * MS])
def test_neither_a_quick_nor_a_slow_wire_confuses_passes(wire_ns, tmp_path):
    found = played(tmp_path, setup_of("1f1b", 4, 6, fused=True, wire_ns=wire_ns))
    assert_all_named(found)
    assert_measured(found)


def test_peak_memory_is_that_of_the_allocator(tmp_path):
    found = played(tmp_path, setup_of("1f1b", 4, 8, fused=True))
    peaks = [rank.peak_memory_bytes for rank in found.figures.ranks]
    per_microbatch = 300 * 1024**2
    assert [(peaks[0] - peak) / per_microbatch for peak in peaks] == [0, 1, 2, 3]


# Traps, each seen in somebody's trace.


@pytest.mark.parametrize("name", ["forward-only", "gpipe", "1f1b"])
@pytest.mark.parametrize("separate", [False, True])
def test_hidden_states_and_residual_are_one_hop(name, separate, tmp_path):
    fused = name == "1f1b"
    if fused and separate:
        pytest.skip("a fused exchange is one kernel")
    setup = setup_of(name, 4, 5, fused=fused, messages=2, separate=separate, even=False)
    found = played(tmp_path, setup)
    assert_all_named(found)
    assert_measured(found)
    assert found.figures.schedule == name
    ways = [(hop.source, hop.destination) for hop in found.figures.hops]
    assert len(set(ways)) == len(ways) == (3 if name == "forward-only" else 6)


def test_a_recomputed_forward_pass_belongs_to_its_backward_pass(tmp_path):
    found = played(tmp_path, setup_of("1f1b", 3, 6, fused=True, recompute=True))
    assert_all_named(found)
    assert_measured(found)


@pytest.mark.parametrize(("name", "labels"), [("forward-only", "none"), ("gpipe", "simple")])
def test_all_kernels_of_a_graph_belong_to_the_pass_that_launched_it(name, labels, tmp_path):
    found = played(tmp_path, setup_of(name, 3, 4, graphs=True), labels=labels)
    assert_all_named(found)
    assert_measured(found)


def test_work_belongs_to_the_step_of_its_launch_though_it_runs_in_the_next(tmp_path):
    found = played(tmp_path, setup_of("1f1b", 3, 4, fused=True, run_ahead=True))
    first, second = (step[1] for step in found.play.steps)
    late = [k for k in first.kernels if k.start_ns > second.start_ns and k.action]
    assert len(late) > len(first.kernels) // 2
    assert_all_named(found)


def test_a_host_that_waits_for_its_device_changes_nothing(tmp_path):
    found = played(tmp_path, setup_of("1f1b", 3, 4, fused=True, run_ahead=False))
    assert_all_named(found)
    assert_measured(found)


def test_the_last_ranks_token_to_the_first_is_no_hop(tmp_path):
    found = played(tmp_path, setup_of("forward-only", 3, 4))
    assert any(m.what[0] == "token" for k in found.play.steps[0][0].kernels for m in k.messages)
    assert [(hop.source, hop.destination) for hop in found.figures.hops] == [(0, 1), (1, 2)]


def test_peers_counted_inside_their_group_are_translated(tmp_path):
    setup = setup_of("1f1b", 4, 6, fused=True)
    found = played(tmp_path, setup, members=(1, 3, 5, 7), world=8)
    assert [rank.rank for rank in found.figures.ranks] == [1, 3, 5, 7]
    assert [rank.stages for rank in found.figures.ranks] == [(0,), (1,), (2,), (3,)]
    assert found.figures.schedule == "1f1b"
    assert_measured_shares(found)
    assert found.gaps == ()


def assert_measured_shares(found):
    for window, bubble in zip(found.figures.windows, true_bubbles(found.play), strict=True):
        assert window.bubble_fraction == pytest.approx(bubble, abs=0.001)


def test_two_replicas_are_two_pipelines(tmp_path):
    plays = []
    for replica in range(2):
        plays.append(Play(setup_of("1f1b", 2, 4, fused=True, seed=replica)))
        writing = Writing(members=(replica, replica + 2), world=4)
        write_run(plays[-1], tmp_path, writing)
    found = analyse(tmp_path, plays[0])
    assert found.timeline.pipelines == (0, 1)
    for number, play in enumerate(plays):
        figures = measure_pipeline(found.timeline, number)
        assert [rank.rank for rank in figures.ranks] == [number, number + 2]
        assert [w.bubble_fraction for w in figures.windows] == pytest.approx(true_bubbles(play))


@pytest.mark.parametrize("name", ["forward-only", "gpipe", "1f1b"])
@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_a_missing_rank_is_named_and_the_others_keep_their_places(name, missing, tmp_path):
    play = Play(setup_of(name, 4, 5, fused=name == "1f1b"))
    write_run(play, tmp_path, Writing())
    (tmp_path / f"rank{missing}.json").unlink()
    found = analyse(tmp_path, play)
    assert found.timeline.pipelines == (0,)
    kept = [rank for rank in range(4) if rank != missing]
    assert [(r.rank, r.position) for r in found.figures.ranks] == [(rank, rank) for rank in kept]
    assert sorted(names_of(found)) == sorted(n for n in true_names(found) if n[0] != missing)
    assert Code.MISSING_RANKS in [gap.code for gap in found.gaps]
