"""Replicas whose truth is known, written as traces and read back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulator.analysis import setup_of
from support.simulator.host_programs import MS
from support.simulator.replicas import (
    Replicas,
    judge_plays,
    members_of,
    replicas_of,
    true_cost,
    write_replicas,
)
from support.simulator.written_traces import Writing, write_run

from debubble.errors import Code
from debubble.timeline.build import build_timeline
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.replicas import judge_run
from debubble.trace.run import find_run, read_run

BASE = setup_of("1f1b", 3, 6, fused=True, steps=5)
SLOW_STAGE = {"weights": (1.0, 1.3, 1.0)}
SLOW_HOP = {"slow_hop": (0, 1, 8.0)}


def read(folder, **steps):
    timeline = build_timeline(read_run(find_run([str(folder)])).ranks)
    return judge_run([measure_pipeline(timeline, one, **steps) for one in timeline.pipelines])


def judged(folder, replicas, **writing):
    write_replicas(folder, replicas.play(), **writing)
    return read(folder)


@pytest.mark.slow
@pytest.mark.parametrize("bucketed", [False, True], ids=["at the end", "in buckets"])
@pytest.mark.parametrize("planted", [SLOW_STAGE, SLOW_HOP], ids=["stage", "hop"])
@pytest.mark.parametrize("count", [2, 4, 16])
def test_the_slower_replica_is_named_with_its_reason_and_its_cost(
    count, planted, bucketed, tmp_path
):
    replicas = replace(replicas_of(BASE, count, **planted), bucketed=bucketed)
    found = judged(tmp_path, replicas)
    assert (found.verdict, found.slowest) == ("drags", count - 1)
    assert found.saved_s * 1e9 == pytest.approx(true_cost(replicas, BASE), rel=0.05)
    assert found.replicas[-1].last_steps == BASE.steps
    if planted is SLOW_STAGE:
        assert (found.why.what, found.why.stage) == ("stage", 1)
        assert found.why.here_s == pytest.approx(1.3 * found.why.elsewhere_s, rel=0.03)
    else:
        ranks = members_of(count - 1, count, 3)
        assert (found.why.what, found.why.from_rank, found.why.to_rank) == (
            "hop",
            ranks[0],
            ranks[1],
        )
        assert found.why.here_s == pytest.approx(8 * found.why.elsewhere_s, rel=0.03)


@pytest.mark.parametrize("transfer_ms", [0.2, 6])
def test_the_cost_is_true_whether_or_not_the_wire_is_what_limits_buckets(transfer_ms, tmp_path):
    replicas = replicas_of(BASE, 2, **SLOW_STAGE)
    replicas = replace(replicas, bucketed=True, transfer_ns=round(transfer_ms * MS))
    found = judged(tmp_path, replicas)
    assert found.saved_s * 1e9 == pytest.approx(true_cost(replicas, BASE), rel=0.05)


def test_what_compute_covers_is_no_wait(tmp_path):
    whole = judged(tmp_path / "a", replicas_of(BASE, 2, **SLOW_STAGE))
    replicas = replace(replicas_of(BASE, 2, **SLOW_STAGE), bucketed=True)
    covered = judged(tmp_path / "b", replicas)
    assert 0 < covered.waited_s < 0.8 * whole.waited_s
    late = whole.replicas[1].late_s
    assert whole.replicas[0].waited_s == pytest.approx(3 * late, rel=0.1)
    assert whole.replicas[1].waited_s < 0.01 * late


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "steps", "noise"),
    [
        (2, 3, 0.03),
        (2, 5, 0.03),
        (4, 5, 0.1),
        pytest.param(16, 3, 0.03, marks=pytest.mark.accuracy),
    ],
)
def test_of_200_runs_of_equal_replicas_two_name_one_at_most(count, steps, noise):
    base = setup_of("1f1b", 2, 4, fused=True, steps=steps, noise=noise)
    runs = (replicas_of(replace(base, seed=seed), count).play() for seed in range(200))
    assert [judge_plays(plays).verdict for plays in runs].count("drags") <= 2


def test_two_even_steps_of_two_replicas_are_too_few(tmp_path):
    found = judged(tmp_path, replicas_of(replace(BASE, steps=2), 2, **SLOW_STAGE))
    assert (found.verdict, found.slowest) == ("undecided", 1)


def test_a_replica_without_traces_is_said_and_the_others_are_judged(tmp_path):
    write_replicas(tmp_path, replicas_of(BASE, 4, **SLOW_STAGE).play())
    for rank in members_of(3, 4, 3):
        (tmp_path / f"rank{rank}.json").unlink()
    found = read(tmp_path)
    assert found.missing_ranks == (3, 7, 11)
    assert [gap.code for gap in found.gaps] == [Code.MISSING_REPLICAS]
    assert found.verdict != "drags"


def test_pipelines_that_reduce_nothing_together_are_not_judged(tmp_path):
    setups = (BASE, replace(BASE, seed=1))
    assert judged(tmp_path, Replicas(setups=setups), data=()) is None


def test_groups_called_after_tensor_parallelism_join_no_replicas(tmp_path):
    assert judged(tmp_path, replicas_of(BASE, 2), data_name="mesh_tp") is None


@pytest.mark.slow
@pytest.mark.parametrize("names", [("", ""), ("mesh_tp", "mesh_dp")], ids=["unnamed", "named"])
def test_ranks_that_share_a_stage_are_no_replicas_of_each_other(names, tmp_path):
    """Lanes 0 and 1 are one replica, 2 and 3 the other: each pair reduces inside its passes."""
    base = replace(BASE, collective=(1, MS))
    setups = [replace(base, seed=lane // 2) for lane in range(4)]
    setups[2:] = [replace(one, **SLOW_STAGE) for one in setups[2:]]
    plays = Replicas(setups=tuple(setups)).play()
    for lane, play in enumerate(plays):
        ranks = range(3)
        writing = Writing(
            members=members_of(lane, 4, 3),
            world=12,
            inner=tuple((4 * place + lane // 2 * 2, 4 * place + lane // 2 * 2 + 1)
                        for place in ranks),
            inner_name=names[0],
            data=tuple((4 * place + lane % 2, 4 * place + lane % 2 + 2) for place in ranks),
            data_name=names[1],
        )  # fmt: skip
        write_run(play, tmp_path, writing)
    found = read(tmp_path)
    assert [one.pipelines for one in found.replicas] == [(0, 1), (2, 3)]
    assert (found.verdict, found.slowest) == ("drags", 1)
