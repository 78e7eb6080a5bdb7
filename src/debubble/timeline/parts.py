"""Ranks in → the parts of a run that share no message, each built alone, and put together again.

Replicas only meet in collectives: each pipeline has its own messages, steps and clock. So a part
can be built wherever its ranks are, and a run of thousands is a run of many small ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from debubble.errors import Gap, NoPipeline
from debubble.timeline.missing import pipeline_groups
from debubble.timeline.model import Timeline, join_columns
from debubble.timeline.part import NoChain
from debubble.trace.columns import Operation, RankTrace
from debubble.units import counted


def find_parts(named: Sequence[RankTrace]) -> tuple[tuple[int, ...], ...]:
    """Return the captured ranks of each part: who exchanges messages, over missing ranks too."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        parent.setdefault(rank, rank)
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    captured = [trace.rank for trace in named if trace.rank is not None]
    for rank, peers in _talks(named):
        for peer in peers:
            parent[root(peer)] = root(rank)
    parts: dict[int, list[int]] = {}
    for rank in sorted(captured):
        parts.setdefault(root(rank), []).append(rank)
    return tuple(tuple(ranks) for ranks in parts.values())


def _talks(named: Sequence[RankTrace]) -> Iterable[tuple[int, Iterable[int]]]:
    for trace in named:
        if trace.rank is None:
            continue
        operators = trace.operators
        posts = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
        yield trace.rank, np.unique(operators.peer[posts & (operators.peer >= 0)]).tolist()
    for members in pipeline_groups(named):
        yield members[0], members[1:]


def all_inferred_alike(parts: Sequence[Timeline | NoChain]) -> bool:
    """Tell whether the rhythm told the steps of all pipelines, or of none."""
    return len({part.inferred for part in parts if isinstance(part, Timeline)}) <= 1


def join_parts(parts: Sequence[Timeline | NoChain], gaps: Sequence[Gap] = ()) -> Timeline:
    """Put the timelines of strangers together, pipelines numbered in the order of their ranks."""
    built = [part for part in parts if isinstance(part, Timeline)]
    if not built:
        raise _no_pipeline([part for part in parts if isinstance(part, NoChain)], gaps)
    numbers = number_pipelines(members for part in built for members in part.members.values())
    built = [renumber(part, numbers) for part in built]
    if len(built) == 1:
        return replace(built[0], gaps=(*gaps, *built[0].gaps))
    return Timeline(
        ranks=tuple(
            sorted(
                (rank for part in built for rank in part.ranks),
                key=lambda rank: (rank.pipeline, rank.position),
            )
        ),
        passes=join_columns([part.passes for part in built], by="start_ns"),
        transfers=join_columns([part.transfers for part in built], by="receive_end_ns"),
        steps=tuple(sorted({step for part in built for step in part.steps})),
        clock_uncertainty_ns=max(part.clock_uncertainty_ns for part in built),
        gaps=(*gaps, *(gap for part in built for gap in part.gaps)),
        unmatched=tuple(one for part in built for one in part.unmatched),
        inferred=any(part.inferred for part in built),
        mixed=frozenset(number for part in built for number in part.mixed),
    )


def number_pipelines(members: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Give each pipeline of a whole run its number."""
    return {ranks: number for number, ranks in enumerate(sorted(members))}


def renumber(part: Timeline, numbers: Mapping[tuple[int, ...], int]) -> Timeline:
    """Return a part with its pipelines as the whole run numbers them."""
    own = {number: numbers[members] for number, members in part.members.items()}
    return replace(
        part,
        ranks=tuple(replace(rank, pipeline=own[rank.pipeline]) for rank in part.ranks),
        mixed=frozenset(own[number] for number in part.mixed),
    )


def _no_pipeline(parts: Sequence[NoChain], unknown_groups: Sequence[Gap]) -> NoPipeline:
    posts = sum(part.messages for part in parts)
    if not posts and any(part.rings for part in parts):
        return NoPipeline(
            "no pipeline in these traces: ranks only pass blocks around a ring",
            hint="context parallelism looks so; it makes no pipeline, nor do collectives",
        )
    if not posts:
        return NoPipeline(
            "no pipeline in these traces: no rank sends or receives point to point",
            hint="`debubble inspect` says what they hold; collectives alone make no pipeline",
        )
    return NoPipeline(
        f"no pipeline can be told: the peers of all {counted(posts, 'message')} are unknown",
        hint=unknown_groups[0].hint if unknown_groups else "record with record_shapes=True",
    )
