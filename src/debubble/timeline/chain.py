"""All ranks' messages in → who passes to whom: pipelines, and each rank's place in its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import Flags
from debubble.timeline.structure import Neighbours
from debubble.timeline.work import Messages


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
