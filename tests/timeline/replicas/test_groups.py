"""Which groups join replicas, and which only share a stage; ends that many ranks have in common."""

from __future__ import annotations

import numpy as np
import pytest
from support.simulator.replicas import STEP_NS, collectives, figures

from debubble.timeline.replicas import judge_replicas
from debubble.trace.columns import Group

MS = 1_000_000
# Two stages, two replicas of two lanes: tensor-parallel ranks lie side by side.
PIPELINES = {lane: (lane, 4 + lane) for lane in range(4)}


def tensor_group(rank):
    return tuple(sorted((rank, rank ^ 1)))


def data_group(rank):
    return tuple(sorted((rank, rank ^ 2)))


def rank_with_both(rank, names, late_ns, steps=5):
    """A tensor-parallel collective in each step's forward pass, then a reduction of gradients."""
    groups = (
        Group(name="1", description=names[0], ranks=tensor_group(rank)),
        Group(name="2", description=names[1], ranks=data_group(rank)),
    )
    rows = []
    for step in range(steps):
        begin = step * STEP_NS
        rows.append((0, step, begin + 10 * MS, begin + 12 * MS, True))
        rows.append((1, step, begin + 50 * MS + late_ns[step], begin + 90 * MS, False))
    return collectives(groups, rows)


def test_peers_of_context_parallelism_are_no_replicas_though_they_reduce_nothing_in_a_pass():
    groups = (
        Group(name="1", description="CONTEXT_PARALLEL_GROUP", ranks=(0, 1)),
        Group(name="2", description="DATA_PARALLEL_GROUP_WITH_CP", ranks=(0, 1)),
    )
    reductions = [(1, step, step * STEP_NS, step * STEP_NS + MS, False) for step in range(5)]
    ranks = {rank: collectives(groups, reductions) for rank in range(2)}
    assert judge_replicas(ranks, {0: (0,), 1: (1,)}, figures({0: (0,), 1: (1,)})) is None
    apart = {rank: collectives(groups[1:], [(0, *row[1:]) for row in reductions]) for rank in ranks}
    assert judge_replicas(apart, {0: (0,), 1: (1,)}, figures({0: (0,), 1: (1,)})) is not None


def test_weights_gathered_in_forward_passes_keep_replicas_in_step():
    """Five gathers a step, each 2 ms late on one replica: the step would be 10 ms shorter."""
    chance = np.random.default_rng(0)
    pipelines = {0: (0,), 1: (1,)}
    group = (Group(name="1", description="mesh_fsdp", ranks=(0, 1)),)
    rows = {0: [], 1: []}
    for step in range(5):
        end = step * STEP_NS
        for _ in range(5):
            ready = [end + 10 * MS, end + 12 * MS + int(chance.normal(scale=0.05 * MS))]
            end = max(ready) + MS
            for rank in (0, 1):
                rows[rank].append((0, step, ready[rank], end, True))
    ranks = {rank: collectives(group, mine) for rank, mine in rows.items()}
    found = judge_replicas(ranks, pipelines, figures(pipelines))
    assert (found.verdict, found.slowest) == ("drags", 1)
    assert found.saved_s * 1e9 == pytest.approx(10 * MS, rel=0.05)
    assert found.replicas[0].late_s * 1e9 == pytest.approx(-10 * MS, rel=0.05)


def test_members_that_do_not_hold_the_same_collectives_are_not_compared():
    ranks = {rank: rank_with_both(rank, ("tp", "dp"), [0] * 5) for rank in range(8)}
    ranks = {
        rank: one if rank % 4 < 2 else one.where(one.group == 0) for rank, one in ranks.items()
    }
    assert judge_replicas(ranks, PIPELINES, figures(PIPELINES)) is None


def test_a_group_whose_members_torch_left_out_is_told_by_its_name():
    ranks = {}
    for rank in range(4):
        group = (Group(name=f"dp_{rank % 2}", ranks=()),)
        late = [(20 if rank >= 2 else 0) * MS + 1000 * step for step in range(5)]
        rows = [
            (0, s, s * STEP_NS + 50 * MS + late[s], s * STEP_NS + 90 * MS, False) for s in range(5)
        ]
        ranks[rank] = collectives(group, rows)
    pipelines = {0: (0, 1), 1: (2, 3)}
    found = judge_replicas(ranks, pipelines, figures(pipelines))
    assert (found.verdict, found.slowest) == ("drags", 1)


def test_members_that_see_ends_a_little_apart_lose_no_gain():
    """gloo's threads wake up when they do: the next reduction is still asked for after the last."""
    pipelines = {0: (0,), 1: (1,)}
    group = (Group(name="1", description="dp", ranks=(0, 1)),)
    ranks = {}
    for rank, (late, wakes) in enumerate(((0, 0), (30 * MS, 2 * MS))):
        rows = []
        for step in range(5):
            begin = step * STEP_NS
            first = begin + 50 * MS + wakes
            rows.append((0, step, begin + 10 * MS + late + step * 1000, first, False))
            rows.append((0, step, first + MS // 10, begin + 53 * MS, False))
        ranks[rank] = collectives(group, rows)
    found = judge_replicas(ranks, pipelines, figures(pipelines))
    assert found.slowest == 1
    assert found.saved_s * 1e9 == pytest.approx(30 * MS, abs=3 * MS)
