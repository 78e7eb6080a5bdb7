"""Who sends to whom in → peers by their ranks, the chains of ranks, rings that are no pipeline.

Forward comes before backward, so the first messages tell who passes to whom:

    rank 0   send to 1 …                              the first: it sends before it receives
    rank 1   receive from 0, send to 2 …
    rank 2   receive from 1, send to 1 (a gradient)   the last: what it answers is no hop
    →        chain 0, 1, 2

Three things stand in the way. gloo's operators tell the peer as its group counts it, and not which
group. The wrong groups contradict themselves: all first stages of a data-parallel group send to its
member 1, member 1 to itself; and what one rank sends under the wrong group, no other receives. A
group whose members agree about every message is believed; where several do, one that is called
after the pipeline.

Ranks that were not captured cannot tell whom they pass to: two of them side by side tear a pipeline
apart. The process group that the messages went through still lists all its ranks in their order.

Context parallelism sends keys and values around the ranks that share a stage, point to point, many
times in each pass. Nobody waits for an input before it sends: each rank of a ring posts its sends
together with as many receives, always, from the first on. In a pipeline all but the first rank
receive first, then compute, and then send. See docs/explanation/how-the-timeline-is-built.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from debubble.errors import Code, Gap
from debubble.timeline.model import I32, I64, UNKNOWN, Flags, Role, role_of
from debubble.timeline.passes import Neighbours
from debubble.timeline.work import Messages, Work, ends_of_posts, find_messages
from debubble.trace.columns import Group, KernelKind, Operation, RankTrace
from debubble.units import counted

# A buffer made for a receive, between the send and it, is no compute.
_ALLOCATION = "aten::empty"
# One rank alone may as well be the first of a pipeline that sends one microbatch a step.
_FEWEST_MEMBERS = 2

Edges = set[tuple[bool, int]]
"""Whether sent, and the peer as its group counts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The ranks of one pipeline in the order a microbatch goes through them."""

    ranks: tuple[int, ...]

    def beside(self, rank: int) -> Neighbours:
        """Return a rank's neighbours."""
        position = self.ranks.index(rank)
        return Neighbours(
            previous=self.ranks[position - 1] if position else None,
            next=self.ranks[position + 1] if position + 1 < len(self.ranks) else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPlace:
    """Whom a rank receives from and sends to in a ring."""

    source: int
    target: int


def name_peers(traces: Sequence[RankTrace]) -> tuple[tuple[RankTrace, ...], tuple[Gap, ...]]:
    """Fill in the global rank of every peer whose group can be told; report where none can."""
    members, gaps = choose_groups(traces)
    return tuple(translate_peers(trace, members.get(rank_of(trace))) for trace in traces), gaps


def choose_groups(
    traces: Sequence[RankTrace],
) -> tuple[dict[int, tuple[int, ...]], tuple[Gap, ...]]:
    """Return whom each rank's unnamed peers are counted among, where that is certain."""
    edges: dict[int, Edges] = {}
    for trace in traces:
        if trace.rank is not None:
            rows, operators = _unnamed(trace), trace.operators
            sent = (operators.operation[rows] == Operation.SEND).tolist()
            peers = operators.local_peer[rows].tolist()
            edges[trace.rank] = set(zip(sent, peers, strict=True))
    chosen: dict[int, tuple[int, ...]] = {}
    gaps = []
    for trace in traces:
        rank = trace.rank
        if rank is None or not edges[rank]:
            continue
        fitting = [group for group in trace.groups if _agrees(group, rank, edges)]
        if len({group.ranks for group in fitting}) > 1:
            fitting = [group for group in fitting if role_of(group) is Role.PIPELINE]
        members = {group.ranks for group in fitting}
        if len(members) == 1:
            chosen[rank] = members.pop()
            continue
        count = counted(int(_unnamed(trace).sum()), "message")
        gaps.append(
            Gap(
                code=Code.UNKNOWN_GROUP,
                message=f"{count} left out: their process group, and so their peer, is unknown",
                hint="name the pipeline's group, such as new_group(ranks, group_desc='pp')",
                file=trace.file,
                rank=rank,
            )
        )
    return chosen, tuple(gaps)


def _unnamed(trace: RankTrace) -> Flags:
    """Tell messages whose peer is counted in a group that is not named.

    Where kernels carry those of a named one, such a message without a kernel goes the host's way:
    a plan, a sampled token. It is no message of the pipeline.
    """
    operators = trace.operators
    messages = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
    unnamed: Flags = messages & (operators.peer < 0) & (operators.local_peer >= 0)
    if (messages & (operators.peer >= 0) & (operators.kernel >= 0)).any():
        unnamed &= operators.kernel >= 0
    return unnamed


def _agrees(group: Group, rank: int, edges: Mapping[int, Edges]) -> bool:
    """Tell whether all captured members of a group could have exchanged these messages in it."""
    if rank not in group.ranks:
        return False
    for position, member in enumerate(group.ranks):
        for sent, peer in edges.get(member, ()):
            if peer >= len(group.ranks) or peer == position:
                return False
            other = edges.get(group.ranks[peer])
            if other is not None and (not sent, position) not in other:
                return False
    return True


def translate_peers(trace: RankTrace, members: tuple[int, ...] | None) -> RankTrace:
    """Fill in the peers that are counted inside a group, once it is known which."""
    if members is None:
        return trace
    operators = trace.operators
    rows = _unnamed(trace)
    peer: I32 = operators.peer.copy()
    peer[rows] = np.array(members, dtype=np.int32)[operators.local_peer[rows]]
    found = next(row for row, group in enumerate(trace.groups) if group.ranks == members)
    group = np.where(rows, np.int32(found), operators.group)
    return replace(trace, operators=replace(operators, peer=peer, group=group))


def rank_of(trace: RankTrace) -> int:
    """Return a rank that was settled; -1 where none was."""
    return UNKNOWN if trace.rank is None else trace.rank


def find_chains(messages: Mapping[int, Messages]) -> tuple[Chain, ...]:
    """Follow the first messages: forward comes before backward, whatever the schedule.

    A rank's first receive comes from the rank before it, its first send goes to the rank after it.
    A rank that sends first is the first of its pipeline; a last rank's answer to it is no hop.
    Receives count from their end: they may be posted long ahead.
    Where a rank only ever receives from one and sends to another, the order does not matter: a
    server may be captured while it runs.
    """
    after: dict[int, int] = {}
    heads = set()
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
            heads.add(rank)
            after.setdefault(rank, peer)
        else:
            after.setdefault(peer, rank)
    # A rank that was not captured cannot tell who leads to it.
    for rank, posts in sorted(messages.items()):
        peer = _first_peer(posts, is_send=True)
        if rank in after or peer in messages or peer in after.values():
            continue
        if peer != UNKNOWN and peer != _first_peer(posts, is_send=False):
            after[rank] = peer
    heads |= set(after) - set(after.values())  # the pipeline's first rank was not captured
    chains = [_follow(head, after) for head in sorted(heads)]
    placed = {rank for chain in chains for rank in chain.ranks}
    while left := sorted(set(after) - placed):
        ring = _follow(left[0], after).ranks
        chains.append(_follow(_first_of_ring(ring, messages), after))
        placed.update(ring)
    return tuple(chains)


def _first_peer(posts: Messages, *, is_send: bool) -> int:
    """Return whom a rank first sends to or receives from; a last rank may send to nobody."""
    mine = (posts.is_send == is_send) & (posts.peer >= 0)
    return int(posts.peer[_first(posts, mine)]) if mine.any() else UNKNOWN


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
        posts, sends_first = messages.get(rank), False
        if posts is not None and (posts.peer >= 0).any():
            sends_first = bool(posts.is_send[_first(posts, posts.peer >= 0)])
        return _arriving_bytes(rank, messages), not sends_first, rank

    return min(ring, key=weight)


def _arriving_bytes(rank: int, messages: Mapping[int, Messages]) -> float:
    """Return the size of what a rank receives, as itself or its senders tell; else no bound."""
    posts = messages.get(rank)
    if posts is not None:
        arrived = posts.message_bytes[~posts.is_send]
    else:
        senders = messages.values()
        arrived = np.concatenate(
            [sent.message_bytes[sent.is_send & (sent.peer == rank)] for sent in senders]
        )
    return float(np.median(arrived)) if len(arrived) else np.inf


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
        alone = bool(trace.header.groups) and len({group.ranks for group in trace.groups}) == 1
        for row in np.unique(operators.group[posts & (operators.group >= 0)]).tolist():
            group = trace.groups[row]
            named = role_of(group) is Role.PIPELINE
            part = len(group.ranks) < (trace.header.world_size or 0)
            if len(group.ranks) > 1 and (named or alone or part):
                found.add(group.ranks)
    return found


def _begin_with_answered(chain: Chain, messages: Mapping[int, Messages]) -> Chain:
    """Turn a ring that missing ranks tore open, so that it begins where the answers go.

    Only a token tells: it weighs less than half of any activation.
    """
    ends_missing = chain.ranks[0] not in messages and chain.ranks[-1] not in messages
    if not ends_missing:
        return chain
    weights = sorted((_arriving_bytes(rank, messages), rank) for rank in chain.ranks[1:])
    first = chain.ranks.index(weights[0][1])
    if not 0 < 2 * weights[0][0] < weights[1][0] < np.inf:
        return chain
    return Chain(ranks=chain.ranks[first:] + chain.ranks[:first])


def find_rings(traces: Sequence[RankTrace], work: Sequence[Work]) -> dict[int, RingPlace]:
    """Return the place of each rank that passes blocks around a ring."""
    messages: dict[int, Messages] = {}
    could: dict[int, list[RingPlace]] = {}
    for trace, computed in zip(traces, work, strict=True):
        if trace.rank is not None:
            messages[trace.rank] = find_messages(trace)
            allocates = np.array([n.startswith(_ALLOCATION) for n in trace.names] or [False])
            computes_at = computed.issued_ns[~allocates[computed.name]]
            could[trace.rank] = _ring_places(messages[trace.rank], computes_at)
    rings: dict[int, RingPlace] = {}
    for rank in sorted(could):
        for place in could[rank]:
            ring = _follow_ring(rank, place, could) if rank not in rings else {}
            if len(ring) >= _FEWEST_MEMBERS and _all_alike(ring, messages):
                rings |= ring
    # Ranks whose whole ring is missing, where others of the run have one.
    return rings | {
        rank: place
        for rank, places in could.items()
        for place in places
        if rings and rank not in rings and not {place.source, place.target} & set(could)
    }


def as_collectives(trace: RankTrace, rings: Mapping[int, RingPlace]) -> RankTrace:
    """Call a rank's messages around its ring what they are: no pipeline lever removes them."""
    place = rings.get(rank_of(trace))
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


def _ring_places(posts: Messages, computes_at: I64) -> list[RingPlace]:
    """Return all pairs of peers between which a rank could stand in a ring.

    Each batch of messages, with no compute between them, sends to one as often as it receives from
    the other.
    """
    batch = np.searchsorted(computes_at, posts.issued_ns)
    known = posts.peer >= 0
    targets = np.unique(posts.peer[known & posts.is_send]).tolist()
    sources = np.unique(posts.peer[known & ~posts.is_send]).tolist()
    return [
        RingPlace(source=source, target=target)
        for source, target in product(sources, targets)
        if np.array_equal(
            batch[posts.is_send & (posts.peer == target)],
            batch[~posts.is_send & (posts.peer == source)],
        )
    ]


def _follow_ring(
    rank: int, place: RingPlace, could: Mapping[int, list[RingPlace]]
) -> dict[int, RingPlace]:
    """Return the captured ranks of a ring; nothing where one of them does not fit into it."""
    ring = {rank: place}
    for back in (False, True):
        here, at = rank, place
        while (following := at.source if back else at.target) in could and following not in ring:
            fitting = [
                other
                for other in could[following]
                if (other.target if back else other.source) == here
            ]
            if len(fitting) != 1:
                return {}
            here, at = following, fitting[0]
            ring[here] = at
        if following == rank or (following in ring and not back):
            closes = ring[following].source == here
            return ring if closes else {}
    return ring


def _all_alike(ring: Mapping[int, RingPlace], messages: Mapping[int, Messages]) -> bool:
    """Tell whether every hop of a ring carries the same: a server's answer weighs less."""
    sizes = set()
    for rank, place in ring.items():
        posts = messages[rank]
        mine = posts.is_send & (posts.peer == place.target)
        sizes.add(frozenset(posts.message_bytes[mine].tolist()))
    return len(sizes) == 1
