"""All ranks' messages in → who passes to whom: pipelines, and each rank's place in its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """
    after: dict[int, int] = {}
    heads = []
    for rank, posts in sorted(messages.items()):
        known = posts.peer >= 0
        if not known.any():
            continue
        first = int(known.argmax())
        peer = int(posts.peer[first])
        if posts.is_send[first]:
            heads.append(rank)
            after.setdefault(rank, peer)
        else:
            after.setdefault(peer, rank)
    return tuple(_follow(head, after) for head in _all_heads(heads, after))


def _all_heads(heads: list[int], after: Mapping[int, int]) -> list[int]:
    """Add ranks that nobody leads to: the pipeline's first rank was not captured."""
    led_to = set(after.values())
    return sorted({*heads, *(rank for rank in after if rank not in led_to)})


def _follow(head: int, after: Mapping[int, int]) -> Chain:
    ranks = [head]
    while (following := after.get(ranks[-1])) is not None and following not in ranks:
        ranks.append(following)
    return Chain(ranks=tuple(ranks))
