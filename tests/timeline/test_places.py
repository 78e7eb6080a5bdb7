"""Which rank stands where: pipelines that close no ring, or of which ranks are missing."""

from __future__ import annotations

import pytest
from support.simulator.analysis import analyse, names_of, setup_of, simulated, true_names
from support.simulator.devices import Play, Setup, true_passes
from support.simulator.written_traces import Writing, write_run

from debubble.api import find
from debubble.errors import Code


def test_a_last_rank_that_answers_nobody_leads_to_no_rank(tmp_path):
    found = simulated(tmp_path, setup_of("forward-only", 4, 6, answers=False))
    assert {rank.members for rank in found.timeline.ranks} == {(0, 1, 2, 3)}
    assert found.figures.absent == ()


def test_batches_in_flight_are_those_begun_on_the_first_rank_and_not_ended_on_the_last(tmp_path):
    found = simulated(
        tmp_path, setup_of("forward-only", 4, 6, answers=False, steps=6, buffered=True)
    )
    stream, passes = found.figures.stream, true_passes(found.play)
    assert found.figures.kind == "stream"
    entered = sorted(one.start_ns for one in passes if one.rank == 0)
    left = sorted(one.end_ns for one in passes if one.rank == 3)
    begin = min(one.start_ns for one in passes if one.rank == 3)
    end = max(one.end_ns for one in passes if one.rank == 0)
    inside = sum(
        min(out, end) - max(into, begin)
        for into, out in zip(entered, left, strict=True)
        if out > begin and into < end
    )
    assert stream.batches_in_flight == pytest.approx(inside / (end - begin), rel=0.01)


MISSING = [
    *((4, (rank,)) for rank in range(4)),
    (4, (1, 2)),
    (4, (0, 1)),
    (4, (2, 3)),
    (6, (2, 3)),
    (6, (1, 2, 3)),
    (6, (0, 2, 3, 5)),
    (6, (0, 1, 4, 5)),
]


def without(folder, play, missing, **writing):
    write_run(play, folder, Writing(**writing))
    for rank in missing:
        (folder / f"rank{rank}.json").unlink()
    return analyse(folder, play)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "missing"), MISSING, ids=str)
@pytest.mark.parametrize(
    ("name", "behaviour"),
    [
        ("forward-only", {}),
        ("forward-only", {"answers": False}),
        ("gpipe", {}),
        ("1f1b", {"fused": True}),
    ],
)
def test_missing_ranks_leave_one_pipeline_in_part_and_the_others_in_their_places(
    name, behaviour, ranks, missing, tmp_path
):
    play = Play(setup_of(name, ranks, 8, **behaviour))
    found = without(tmp_path, play, missing)
    assert found.timeline.pipelines == (0,)
    assert [(r.rank, r.position) for r in found.figures.ranks] == [
        (rank, rank) for rank in range(ranks) if rank not in missing
    ]
    assert found.figures.ranks[0].members == tuple(range(ranks))
    assert found.figures.absent == missing
    assert sorted(names_of(found)) == sorted(n for n in true_names(found) if n[0] not in missing)
    assert Code.MISSING_RANKS in [gap.code for gap in found.gaps]
    assert find(tmp_path).verdict.startswith("In part, with no trace of rank")


def test_the_only_group_of_a_job_tells_all_missing_ranks(tmp_path):
    """Rank 2 talks to no captured rank."""
    play = Play(setup_of("gpipe", 6, 8))
    found = without(tmp_path, play, (1, 2, 3), group="0", groups={"0": tuple(range(6))})
    assert found.figures.absent == (1, 2, 3)
    (gap,) = [gap for gap in found.gaps if gap.code == Code.MISSING_RANKS]
    assert "ranks 1-3" in gap.message


def test_a_group_that_may_hold_several_pipelines_joins_none(tmp_path):
    """Ranks 0-1 and 2-3 may be two pipelines that share the group of all ranks."""
    play = Play(setup_of("1f1b", 4, 6, fused=True))
    found = without(tmp_path, play, (1, 2), group="0", groups={"0": (0, 1, 2, 3), "1": (0, 2)})
    assert [r.members for r in found.timeline.ranks] == [(0, 1), (2, 3)]


def test_replicas_in_one_group_stay_apart(tmp_path):
    """Two pipelines over the group of all ranks, the inner ends of both captured."""
    for replica in range(2):
        play = Play(setup_of("1f1b", 2, 4, fused=True, seed=replica))
        shift = 2 * replica
        write_run(play, tmp_path, Writing(members=(shift, shift + 1), world=4, group="0",
                                          groups={"0": (0, 1, 2, 3)}))  # fmt: skip
    (tmp_path / "rank0.json").unlink()
    (tmp_path / "rank3.json").unlink()
    found = analyse(tmp_path, play)
    assert [rank.members for rank in found.timeline.ranks] == [(0, 1), (2, 3)]


@pytest.mark.parametrize(("weights", "sets"), [((9, 4, 4, 4), True), ((4, 4, 4, 9), False)])
def test_a_first_stage_that_sets_the_pace_hides_how_many_may_be_in_flight(tmp_path, weights, sets):
    """Each batch has left before its driver's number shows: what is seen is the least it may be."""
    slow_first = Setup(
        schedule="forward-only", ranks=4, microbatches=2, steps=16, answers=False, buffered=True,
        weights=weights,
    )  # fmt: skip
    stream = simulated(tmp_path, slow_first).figures.stream
    assert stream.first_sets_pace == sets
    if sets:
        assert stream.usual_in_flight < 4
        said = find(tmp_path).verdict
        assert f"{stream.usual_in_flight} or more batches in flight" in said
        assert find(tmp_path).stream.bubble_fraction_of_equal_stages is None
