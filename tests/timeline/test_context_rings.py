"""Rings of context parallelism: messages between ranks that share a stage are no hops."""

from __future__ import annotations

import pytest
from support.simulator.analysis import BUFFERED, FUSED, analyse, assert_all_named, setup_of
from support.simulator.devices import Play, true_bubbles
from support.simulator.written_traces import Writing, write_run

from debubble.errors import NoPipeline
from debubble.timeline.figures import measure_pipeline

# schedule, ranks of a pipeline, ranks that share a stage, how messages behave, labels
RUNS = [
    ("1f1b", 2, 2, FUSED, "none"),
    ("1f1b", 4, 2, FUSED, "none"),
    ("1f1b", 2, 4, FUSED, "none"),
    ("gpipe", 2, 2, {}, "none"),
    ("gpipe", 3, 3, {}, "simple"),
    ("forward-only", 4, 2, {}, "none"),
    ("forward-only", 2, 2, {"answers": False}, "none"),
    ("interleaved-1f1b", 2, 2, BUFFERED, "runtime"),
    ("zbv", 2, 2, BUFFERED, "runtime"),
]
EACH_RUN = pytest.mark.parametrize(("name", "ranks", "context", "behaviour", "labels"), RUNS)


@pytest.mark.slow
@EACH_RUN
@pytest.mark.parametrize("group", ["pp", "0"], ids=["group-each", "one-group"])
def test_blocks_passed_around_a_ring_are_no_hops(
    name, ranks, context, behaviour, labels, group, tmp_path
):
    play = Play(setup_of(name, ranks, 6, context=context, steps=2, **behaviour))
    write_run(play, tmp_path, Writing(labels=labels, group=group))
    found = analyse(tmp_path, play)
    assert_all_named(found)
    lanes = [tuple(range(lane, ranks * context, context)) for lane in range(context)]
    for pipeline, lane in enumerate(lanes):
        figures = measure_pipeline(found.timeline, pipeline)
        assert tuple(rank.rank for rank in figures.ranks) == lane
        assert {(hop.source % context, hop.destination % context) for hop in figures.hops} == {
            (pipeline, pipeline)
        }
        if figures.kind != "stream":
            assert figures.schedule == name
            assert [w.bubble_fraction for w in figures.windows] == pytest.approx(
                true_bubbles(play, lane), abs=0.001
            )
            # The ring's time that compute does not cover is occupied, and not useful.
            assert 1 - figures.bubble_fraction - figures.useful_fraction > 0.05


@pytest.mark.parametrize(("context", "missing"), [(2, ()), (4, ()), (4, (0,)), (4, (1, 2))])
@pytest.mark.parametrize("group", ["pp", "0"])
def test_a_ring_alone_is_no_pipeline(context, missing, group, tmp_path):
    play = Play(setup_of("gpipe", 1, 4, context=context))
    write_run(play, tmp_path, Writing(group=group))
    for rank in missing:
        (tmp_path / f"rank{rank}.json").unlink()
    with pytest.raises(NoPipeline, match=r"no pipeline in these traces: .* around a ring"):
        analyse(tmp_path, play)


@pytest.mark.parametrize(
    ("ranks", "context", "missing"), [(2, 2, 3), (2, 2, 0), (4, 2, 4), (3, 3, 4)]
)
def test_a_missing_rank_breaks_neither_the_ring_nor_the_pipelines(
    ranks, context, missing, tmp_path
):
    play = Play(setup_of("1f1b", ranks, 6, context=context, fused=True))
    write_run(play, tmp_path, Writing())
    (tmp_path / f"rank{missing}.json").unlink()
    found = analyse(tmp_path, play)
    for pipeline in range(context):
        lane = tuple(range(pipeline, ranks * context, context))
        figures = measure_pipeline(found.timeline, pipeline)
        assert figures.ranks[0].members == lane
        assert figures.absent == tuple(rank for rank in lane if rank == missing)
