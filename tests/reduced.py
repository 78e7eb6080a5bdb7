"""Reductions of ranks without traces: what `judge_replicas` is given, made by hand or of a play."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from replicated import members_of

from debubble.timeline.model import CollectiveKind, RankCollectives
from debubble.timeline.replicas import judge_replicas
from debubble.trace.columns import Group

STEP_NS = 100_000_000


def collectives(groups, rows):
    """Make a rank's collectives of (group, step, start, end, in a forward pass)."""
    group, step, start, end, forward = (np.array(column) for column in zip(*rows, strict=True))
    return RankCollectives(
        groups=groups,
        group=group.astype(np.int32),
        kind=np.full(len(rows), CollectiveKind.ALL_REDUCE, dtype=np.uint8),
        step=step.astype(np.int32),
        ready_ns=start,
        start_ns=start,
        end_ns=end,
        exposed_ns=end - start,
        blocks=np.ones(len(rows), dtype=bool),
        in_forward=forward.astype(bool),
        message_bytes=np.full(len(rows), 1024),
    )


def figures(pipelines, steps=5):
    return [
        SimpleNamespace(
            pipeline=number,
            ranks=[SimpleNamespace(rank=rank, position=place) for place, rank in enumerate(ranks)],
            windows=[SimpleNamespace(step=step) for step in range(steps)],
            step_time_ns=STEP_NS,
            stages=(),
            hops=(),
            outside_ns={},
            microbatches=4,
        )
        for number, ranks in pipelines.items()
    ]


def judge_plays(plays):
    """Judge replicas by their reductions as they were played."""
    count, ranks, steps = len(plays), plays[0].setup.ranks, len(plays[0].steps)
    found = {}
    for replica, play in enumerate(plays):
        for place in range(ranks):
            members = tuple(range(place * count, (place + 1) * count))
            group = (Group(name="1", description="dp", ranks=members),)
            rows = [
                (0, number, kernel.start_ns, kernel.end_ns, False)
                for number, step in enumerate(play.steps)
                for kernel in step[place].kernels
                if kernel.collective
            ]
            found[members[replica]] = collectives(group, rows)
    pipelines = {replica: members_of(replica, count, ranks) for replica in range(count)}
    return judge_replicas(found, pipelines, figures(pipelines, steps))
