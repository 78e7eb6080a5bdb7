"""Ranks that pass blocks around a ring in → the same, with those messages called collectives.

Context parallelism sends keys and values around the ranks that share a stage, point to point, many
times in each pass. Nobody waits for an input before it sends: each rank of a ring posts its sends
together with as many receives, always, from the first on. In a pipeline all but the first rank
receive first, then compute, and then send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from debubble.timeline.model import I64, Flags
from debubble.timeline.work import Messages, Work, ends_of_posts, find_messages
from debubble.trace.columns import KernelKind, Operation, RankTrace

# A buffer made for a receive, between the send and it, is no compute.
_ALLOCATION = "aten::empty"
# One rank alone may as well be the first of a pipeline that sends one microbatch a step.
_FEWEST_MEMBERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands in a ring."""

    source: int
    target: int


def find_rings(traces: Sequence[RankTrace], work: Sequence[Work]) -> dict[int, Place]:
    """Return the place of each rank that passes blocks around a ring."""
    messages: dict[int, Messages] = {}
    could: dict[int, list[Place]] = {}
    for trace, computed in zip(traces, work, strict=True):
        if trace.rank is not None:
            messages[trace.rank] = find_messages(trace)
            could[trace.rank] = _places(messages[trace.rank], _computes_at(trace, computed))
    rings: dict[int, Place] = {}
    for rank in sorted(could):
        for place in could[rank]:
            ring = _follow(rank, place, could) if rank not in rings else {}
            if len(ring) >= _FEWEST_MEMBERS and _all_alike(ring, messages):
                rings |= ring
    return rings | _left_alone(rings, could)


def _left_alone(
    rings: Mapping[int, Place], could: Mapping[int, Sequence[Place]]
) -> dict[int, Place]:
    """Return the places of ranks whose whole ring is missing, where others of the run have one."""
    return {
        rank: place
        for rank, places in could.items()
        for place in places
        if rings and rank not in rings and not {place.source, place.target} & set(could)
    }


def as_collectives(trace: RankTrace, rings: Mapping[int, Place]) -> RankTrace:
    """Call a rank's messages around its ring what they are: no pipeline lever removes them."""
    place = rings.get(-1 if trace.rank is None else trace.rank)
    if place is None:
        return trace
    operators, kernels = trace.operators, trace.kernels
    sent = (operators.operation == Operation.SEND) & (operators.peer == place.target)
    received = (operators.operation == Operation.RECEIVE) & (operators.peer == place.source)
    rows = sent | received
    carriers = operators.kernel[rows & (operators.kernel >= 0)]
    kind = kernels.kind.copy()
    kind[carriers] = KernelKind.COLLECTIVE
    duration = operators.duration_ns.copy()
    posts = np.flatnonzero(rows)
    duration[posts] = ends_of_posts(trace, posts) - operators.start_ns[posts]
    return replace(
        trace,
        kernels=replace(kernels, kind=kind),
        operators=replace(
            operators,
            operation=np.where(rows, np.uint8(Operation.COLLECTIVE), operators.operation),
            duration_ns=duration,
        ),
    )


def _computes_at(trace: RankTrace, work: Work) -> I64:
    allocates = np.array([name.startswith(_ALLOCATION) for name in trace.names] or [False])
    kept: I64 = work.issued_ns[~allocates[work.name]]
    return kept


def _places(posts: Messages, computes_at: I64) -> list[Place]:
    """Return all pairs of peers between which a rank could stand in a ring."""
    batch = np.searchsorted(computes_at, posts.issued_ns)
    known = posts.peer >= 0
    targets = np.unique(posts.peer[known & posts.is_send]).tolist()
    sources = np.unique(posts.peer[known & ~posts.is_send]).tolist()
    return [
        Place(source=source, target=target)
        for source, target in product(sources, targets)
        if _balanced(
            batch[posts.is_send & (posts.peer == target)],
            batch[~posts.is_send & (posts.peer == source)],
        )
    ]


def _balanced(sent: I64, received: I64) -> bool:
    """Tell whether each batch of messages, with no compute between them, sends and receives."""
    return len(sent) == len(received) and bool((sent == received).all())


def _follow(rank: int, place: Place, could: Mapping[int, list[Place]]) -> dict[int, Place]:
    """Return the captured ranks of a ring; nothing where one of them does not fit into it."""
    ring = {rank: place}
    for back in (False, True):
        here, at = rank, place
        while (following := at.source if back else at.target) in could and following not in ring:
            fitting = [
                one for one in could[following] if (one.target if back else one.source) == here
            ]
            if len(fitting) != 1:
                return {}
            here, at = following, fitting[0]
            ring[here] = at
        if following == rank or (following in ring and not back):
            closes = ring[following].source == here
            return ring if closes else {}
    return ring


def _all_alike(ring: Mapping[int, Place], messages: Mapping[int, Messages]) -> bool:
    """Tell whether every hop of a ring carries the same: a server's answer weighs less."""

    def sizes(rank: int, place: Place) -> frozenset[int]:
        posts = messages[rank]
        mine: Flags = posts.is_send & (posts.peer == place.target)
        return frozenset(posts.message_bytes[mine].tolist())

    return len({sizes(rank, place) for rank, place in ring.items()}) == 1
