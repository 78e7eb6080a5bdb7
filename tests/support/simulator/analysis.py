"""Simulated runs in → what the analysis made of their traces, beside the truth."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from support.simulator.context_rings import is_ring
from support.simulator.devices import Play, true_bubbles, true_passes, true_windows
from support.simulator.host_programs import Setup
from support.simulator.written_traces import Writing, write_run

from debubble.timeline.build import build_timeline
from debubble.timeline.figures import PipelineFigures, measure_pipeline
from debubble.timeline.model import PassKind, Timeline
from debubble.trace.run import find_run, read_run

UNEVEN = (1.0, 0.6, 1.7, 0.9, 1.2, 0.7, 1.1, 0.8, 1.4, 1.0, 0.9, 1.3)
LOOPED = ("interleaved-1f1b", "looped-bfs", "interleaved-zb", "zbv", "dualpipe-v")
FUSED, BUFFERED, EARLY = {"fused": True}, {"buffered": True}, {"early": True}


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


def simulated(folder, setup, **writing):
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
    kernels = [k for step in play.steps for rank in step for k in rank.kernels if not is_ring(k)]
    return sum(len(kernel.messages) for kernel in kernels) // 2


def assert_all_named(found):
    assert sorted(names_of(found)) == sorted(true_names(found))
    assert len(found.timeline.transfers) == count_messages(found.play)
    assert found.gaps == ()


def assert_measured(found):
    """Absolute times as well as shares: each window, each pass, each bubble."""
    begin = found.timeline.passes.start_ns.min() - min(w[0] for w in true_windows(found.play))
    windows = [(w.start_ns - begin, w.end_ns - begin) for w in found.figures.windows]
    assert windows == true_windows(found.play)
    assert_measured_shares(found)
    spans = dict(
        zip(
            names_of(found),
            zip(found.timeline.passes.start_ns, found.timeline.passes.end_ns, strict=True),
            strict=True,
        )
    )
    for names, start_ns, end_ns in passes_at_once(found):
        assert min(spans[name][0] for name in names) == start_ns + begin
        assert max(spans[name][1] for name in names) == end_ns + begin
        ordered = sorted(spans[name] for name in names)
        assert all(before[1] <= after[0] for before, after in pairwise(ordered))


def passes_at_once(found):
    """Passes of a rank that truly ran at once, with the time of all: they are laid out in turn."""
    groups = []
    rows = zip(true_names(found), true_passes(found.play), strict=True)
    for name, true in sorted(rows, key=lambda row: (row[1].rank, row[1].start_ns)):
        if groups and groups[-1][0][-1][0] == true.rank and true.start_ns < groups[-1][2]:
            names, start_ns, end_ns = groups[-1]
            groups[-1] = ([*names, name], start_ns, max(end_ns, true.end_ns))
        else:
            groups.append(([name], true.start_ns, true.end_ns))
    return groups


def assert_measured_shares(found):
    for window, bubble in zip(found.figures.windows, true_bubbles(found.play), strict=True):
        assert window.bubble_fraction == pytest.approx(bubble, abs=0.001)
