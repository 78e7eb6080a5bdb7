"""Who sends to whom in → peers, the chain of stages, who is missing, rings that are none.

gloo's operators tell the peer as its group counts it, and not which group. The wrong groups
contradict themselves: all first stages of a data-parallel group send to its member 1, member 1 to
itself; and what one rank sends under the wrong group, no other receives. A group whose members
agree about every message is believed; where several do, one that is called after the pipeline.

Ranks that were not captured cannot tell whom they pass to: two of them side by side tear a pipeline
apart. The process group that the messages went through still lists all its ranks in their order.

Context parallelism sends keys and values around the ranks that share a stage, point to point, many
times in each pass. Nobody waits for an input before it sends: each rank of a ring posts its sends
together with as many receives, always, from the first on. In a pipeline all but the first rank
receive first, then compute, and then send.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from debubble.errors import Code, Gap
from debubble.timeline.model import I32, I64, UNKNOWN, Flags
from debubble.timeline.parallelism import Role, role_of
from debubble.timeline.passes import Neighbours
from debubble.timeline.work import Messages, Work, ends_of_posts, find_messages
from debubble.trace.columns import Group, KernelKind, Operation, RankTrace
from debubble.units import counted

Edges = set[tuple[bool, int]]
"""Whether sent, and the peer as its group counts it."""


def name_peers(traces: Sequence[RankTrace]) -> tuple[tuple[RankTrace, ...], tuple[Gap, ...]]:
    """Fill in the global rank of every peer whose group can be told; report where none can."""
    members, gaps = choose_groups(traces)
    return tuple(translate_peers(trace, members.get(rank_of(trace))) for trace in traces), gaps


def choose_groups(
    traces: Sequence[RankTrace],
) -> tuple[dict[int, tuple[int, ...]], tuple[Gap, ...]]:
    """Return whom each rank's unnamed peers are counted among, where that can be told."""
    edges = {trace.rank: _edges(trace) for trace in traces if trace.rank is not None}
    chosen: dict[int, tuple[int, ...]] = {}
    gaps = []
    for trace in traces:
        rank = trace.rank
        if rank is None or not edges[rank]:
            continue
        members = _members(trace, rank, edges)
        if members is None:
            gaps.append(_unknown_group(trace, rank))
        else:
            chosen[rank] = members
    return chosen, tuple(gaps)


def rank_of(trace: RankTrace) -> int:
    """Return a rank that was settled; -1 where none was."""
    return UNKNOWN if trace.rank is None else trace.rank


def _unnamed(trace: RankTrace) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    operators = trace.operators
    messages = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
    return messages & (operators.peer < 0) & (operators.local_peer >= 0)


def _edges(trace: RankTrace) -> Edges:
    rows = _unnamed(trace)
    sent = (trace.operators.operation[rows] == Operation.SEND).tolist()
    return set(zip(sent, trace.operators.local_peer[rows].tolist(), strict=True))


def _members(trace: RankTrace, rank: int, edges: Mapping[int, Edges]) -> tuple[int, ...] | None:
    """Return the members of the group that the messages went through; None where not certain."""
    fitting = [group for group in trace.groups if _agrees(group, rank, edges)]
    if len({group.ranks for group in fitting}) > 1:
        fitting = [group for group in fitting if role_of(group) is Role.PIPELINE]
    found = {group.ranks for group in fitting}
    return found.pop() if len(found) == 1 else None


def _agrees(group: Group, rank: int, edges: Mapping[int, Edges]) -> bool:
    """Tell whether all captured members of a group could have exchanged these messages in it."""
    if rank not in group.ranks:
        return False
    for place, member in enumerate(group.ranks):
        for sent, peer in edges.get(member, ()):
            if peer >= len(group.ranks) or peer == place:
                return False
            other = edges.get(group.ranks[peer])
            if other is not None and (not sent, place) not in other:
                return False
    return True


def translate_peers(trace: RankTrace, members: tuple[int, ...] | None) -> RankTrace:
    """Fill in the peers that are counted inside a group, once it is known which."""
    if members is None:
        return trace
    operators = trace.operators
    rows = _unnamed(trace)
    known = np.array(members, dtype=np.int32)
    peer: I32 = np.full(len(operators), UNKNOWN, dtype=np.int32)
    peer[rows] = known[operators.local_peer[rows]]
    found = next(row for row, group in enumerate(trace.groups) if group.ranks == members)
    return replace(
        trace,
        operators=replace(
            operators,
            peer=np.where(rows, peer, operators.peer),
            group=np.where(rows, np.int32(found), operators.group),
        ),
    )


def _unknown_group(trace: RankTrace, rank: int) -> Gap:
    count = counted(int(_unnamed(trace).sum()), "message")
    return Gap(
        code=Code.UNKNOWN_GROUP,
        message=f"{count} left out: their process group, and so their peer, cannot be told",
        hint="name the pipeline's group, such as new_group(ranks, group_desc='pp')",
        file=trace.file,
        rank=rank,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The ranks of one pipeline in the order a microbatch goes through them."""

    ranks: tuple[int, ...]

    def beside(self, rank: int) -> Neighbours:
        """Return a rank's neighbours."""
        place = self.ranks.index(rank)
        return Neighbours(
            previous=self.ranks[place - 1] if place else None,
            next=self.ranks[place + 1] if place + 1 < len(self.ranks) else None,
        )


def find_chains(messages: Mapping[int, Messages]) -> tuple[Chain, ...]:
    """Follow the first messages: forward comes before backward, whatever the schedule.

    A rank's first receive comes from the rank before it, its first send goes to the rank after it.
    A rank that sends first is the first of its pipeline; a last rank's answer to it is no hop.
    Receives count from their end: they may be posted long ahead.
    Where a rank only ever receives from one and sends to another, the order does not matter: a
    server may be captured while it runs.
    """
    after: dict[int, int] = {}
    heads = []
    for rank, posts in sorted(messages.items()):
        if not (posts.peer >= 0).any():
            continue
        first = _first(posts, posts.peer >= 0)
        peer = int(posts.peer[first])
        if (way := _one_way(posts)) is not None:
            previous, following = way
            after.setdefault(previous, rank)
            after.setdefault(rank, following)
        elif posts.is_send[first]:
            heads.append(rank)
            after.setdefault(rank, peer)
        else:
            after.setdefault(peer, rank)
    _lead_to_missing(after, messages)
    chains = [_follow(head, after) for head in _all_heads(heads, after)]
    placed = {rank for chain in chains for rank in chain.ranks}
    while left := sorted(set(after) - placed):
        ring = _follow(left[0], after).ranks
        chains.append(_follow(_first_of_ring(ring, messages), after))
        placed.update(ring)
    return tuple(chains)


def _lead_to_missing(after: dict[int, int], messages: Mapping[int, Messages]) -> None:
    """Let ranks lead to a rank that was not captured and so cannot tell who leads to it."""
    for rank, posts in sorted(messages.items()):
        first = _first_peer(posts, is_send=True)
        if first is None or rank in after or first in messages or first in after.values():
            continue
        if first != _first_peer(posts, is_send=False):
            after[rank] = first


def _first_peer(posts: Messages, *, is_send: bool) -> int | None:
    """Return whom a rank first sends to or receives from; a last rank may send to nobody."""
    mine = (posts.is_send == is_send) & (posts.peer >= 0)
    return int(posts.peer[_first(posts, mine)]) if mine.any() else None


def _first(posts: Messages, kept: Flags) -> int:
    """Return which of some messages was used first: a send begins, a receive ends.

    Of those that one kernel carried, it is the one that was issued first.
    Only the host's call is known of one whose kernel was not recorded, and hosts run ahead.
    """
    timed = kept & posts.timed
    rows = np.flatnonzero(timed if timed.any() else kept)
    used = np.where(posts.is_send, posts.start_ns, posts.end_ns)
    first = int(rows[used[rows].argmin()])
    together = (posts.start_ns == posts.start_ns[first]) & (posts.end_ns == posts.end_ns[first])
    return int(np.flatnonzero(together & kept)[0])


def _one_way(posts: Messages) -> tuple[int, int] | None:
    """Return whom a rank receives from and sends to, where it is one and another."""
    known = posts.peer >= 0
    sources = set(posts.peer[known & ~posts.is_send].tolist())
    targets = set(posts.peer[known & posts.is_send].tolist())
    if len(sources) != 1 or len(targets) != 1 or sources == targets:
        return None
    return sources.pop(), targets.pop()


def _first_of_ring(ring: tuple[int, ...], messages: Mapping[int, Messages]) -> int:
    """Return the first rank of a ring: the last one answers it, or stages go around.

    Tokens weigh less than activations. Where nothing does, the first rank sends before it receives,
    if it was captured from its start; else it is the lowest.
    """

    def weight(rank: int) -> tuple[float, bool, int]:
        posts = messages.get(rank)
        sends_first = posts is not None and bool(posts.is_send[_first(posts, posts.peer >= 0)])
        return arriving_bytes(rank, messages), not sends_first, rank

    return min(ring, key=weight)


def arriving_bytes(rank: int, messages: Mapping[int, Messages]) -> float:
    """Return the size of what a rank receives, as itself or its senders tell; else no bound."""
    posts = messages.get(rank)
    if posts is not None:
        arrived = posts.message_bytes[~posts.is_send]
    else:
        told = (one.message_bytes[one.is_send & (one.peer == rank)] for one in messages.values())
        arrived = np.concatenate(list(told))
    return float(np.median(arrived)) if len(arrived) else np.inf


def _all_heads(heads: list[int], after: Mapping[int, int]) -> list[int]:
    """Add ranks that nobody leads to: the pipeline's first rank was not captured."""
    led_to = set(after.values())
    return sorted({*heads, *(rank for rank in after if rank not in led_to)})


def _follow(head: int, after: Mapping[int, int]) -> Chain:
    ranks = [head]
    while (following := after.get(ranks[-1])) is not None and following not in ranks:
        ranks.append(following)
    return Chain(ranks=tuple(ranks))


def join_over_missing(
    chains: Sequence[Chain], traces: Sequence[RankTrace], messages: Mapping[int, Messages]
) -> tuple[Chain, ...]:
    """Put the pieces of each pipeline together in the order of its process group."""
    captured = {trace.rank for trace in traces if trace.rank is not None}
    joined = list(chains)
    for members in sorted(pipeline_groups(traces)):
        inside = [chain for chain in joined if set(chain.ranks) <= set(members)]
        if inside and not captured >= set(members) and _fit(inside, members, captured):
            joined = [chain for chain in joined if chain not in inside]
            joined.append(Chain(ranks=members))
    turned = (_begin_with_answered(chain, messages) for chain in joined)
    return tuple(sorted(turned, key=lambda chain: chain.ranks))


def _fit(pieces: Sequence[Chain], members: tuple[int, ...], captured: Collection[int]) -> bool:
    """Tell whether the pieces lie in a group one after the other, torn at missing ranks only."""
    hops = set(pairwise(members))
    answer = (members[-1], members[0])
    found = {hop for piece in pieces for hop in pairwise(piece.ranks)} - {answer}
    torn = [rank for hop in hops - found for rank in hop]
    return found <= hops and not set(torn) & set(captured)


def pipeline_groups(traces: Sequence[RankTrace]) -> set[tuple[int, ...]]:
    """Return the members of the groups that messages went through, each for one pipeline.

    A group of all ranks may hold several pipelines, unless it is called after one or the job has no
    other: replicas would have a group to reduce their gradients in.
    """
    found = set()
    for trace in traces:
        operators = trace.operators
        posts = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
        for row in np.unique(operators.group[posts & (operators.group >= 0)]).tolist():
            group = trace.groups[row]
            if len(group.ranks) > 1 and _is_one_pipeline(group, trace):
                found.add(group.ranks)
    return found


def _is_one_pipeline(group: Group, trace: RankTrace) -> bool:
    named = role_of(group) is Role.PIPELINE
    alone = trace.header.groups and {one.ranks for one in trace.groups} == {group.ranks}
    return named or bool(alone) or len(group.ranks) < (trace.header.world_size or 0)


def _begin_with_answered(chain: Chain, messages: Mapping[int, Messages]) -> Chain:
    """Turn a ring that missing ranks tore open, so that it begins where the answers go.

    Only a token tells: it weighs less than half of any activation.
    """
    ends_missing = chain.ranks[0] not in messages and chain.ranks[-1] not in messages
    if not ends_missing:
        return chain
    weights = sorted((arriving_bytes(rank, messages), rank) for rank in chain.ranks[1:])
    place = chain.ranks.index(weights[0][1])
    if not 0 < 2 * weights[0][0] < weights[1][0] < np.inf:
        return chain
    return Chain(ranks=chain.ranks[place:] + chain.ranks[:place])


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
            ring = _follow_ring(rank, place, could) if rank not in rings else {}
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


def _follow_ring(rank: int, place: Place, could: Mapping[int, list[Place]]) -> dict[int, Place]:
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
