"""Matched transfers in → what messages took, kept as they were seen: their tail is the point.

Medians miss real runs by a tenth. So messages are drawn from those measured, by what they met: an
exchange, a receiver that waited, or one that came later.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import F64, Timeline, Transfers

# Both ways at once against one way, where a run shows only one of them.
_BOTH_OVER_ONE = 1.15
# Taking in what is there already, against the wire.
_DRAIN_OVER_WIRE = 0.5
# Fewer are no sample.
_FEWEST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WirePools:
    """Nanoseconds of messages of one size."""

    both_ways: F64
    one_way: F64
    """From the send's start to the receive's end, the receiver waiting."""
    drain: F64
    """Of the receive, the message being there."""
    sending: F64
    """Of the send alone, buffered."""
    message_bytes: int
    """Below 0 where not known."""
    buffers: bool
    """A send may end before its receive begins."""
    assumed: tuple[str, ...]
    """What the run does not show, in words."""


def pool_wires(timeline: Timeline, pipeline: int, but: tuple[int, int] | None = None) -> WirePools:
    """Gather the messages between ranks of a pipeline; those of one hop may be left out."""
    places = {rank.rank: rank.position for rank in timeline.ranks_of(pipeline)}
    transfers = timeline.transfers
    mine = np.isin(transfers.source, list(places)) & np.isin(transfers.destination, list(places))
    if but is not None:
        mine &= ~((transfers.source == but[0]) & (transfers.destination == but[1]))
    largest = int(transfers.message_bytes[mine].max(initial=-1))
    return _pool(transfers.where(mine & (transfers.message_bytes == largest)), largest)


def _pool(transfers: Transfers, message_bytes: int) -> WirePools:
    both_there = np.maximum(transfers.send_start_ns, transfers.receive_start_ns)
    wire = np.maximum(transfers.receive_end_ns - both_there, 0).astype(np.float64)
    fused = transfers.fused
    early = ~fused & (transfers.send_end_ns <= transfers.receive_start_ns)
    # Of a receive that begins while its message travels only the rest is seen: it tells no wire.
    waited = ~fused & (transfers.receive_start_ns <= transfers.send_start_ns)
    if not (waited | fused).any():
        waited = ~early
        wire = np.where(waited, transfers.receive_end_ns - transfers.send_start_ns, wire)
    sending = np.minimum(transfers.send_end_ns, transfers.receive_end_ns) - transfers.send_start_ns
    both, one, drain = wire[fused], wire[waited], wire[early]
    said = []
    if len(one) < _FEWEST:
        said.append("one way takes what both ways at once take, over 1.15")
        one = both / _BOTH_OVER_ONE if len(both) else one
    if len(one) == 0:
        said = ["transfers take no time: none was seen"]
        one = np.zeros(1)
    if len(both) == 0:
        said.append("both ways at once take 1.15 times one way")
        both = one * _BOTH_OVER_ONE
    if len(drain) == 0:
        drain = one * _DRAIN_OVER_WIRE
    sends = sending[~fused].astype(np.float64)
    return WirePools(
        both_ways=both,
        one_way=one,
        drain=drain,
        sending=np.maximum(sends, 0) if len(sends) else one,
        message_bytes=message_bytes,
        buffers=bool(early.any()),
        assumed=tuple(said),
    )
