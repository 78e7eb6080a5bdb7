"""Matched transfers in → what each hop takes: wire, wait, and how much of it is buffered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import I64, PassKind, RankTimeline, Timeline, Transfers, rows_by_hop
from debubble.units import NS_PER_S

# One message in twenty is slower: transfers are heavy-tailed, and a median hides it.
_TAIL_PERCENT = 95


@dataclass(frozen=True, slots=True, kw_only=True)
class HopFigures:
    """One direction between two ranks.

    Wire is from the moment both sides are there to the receive's end; where the message had left
    before the receive began (`buffered`), it is hidden, and no wire is claimed.
    """

    source: int
    destination: int
    stages: tuple[tuple[int, int], ...]
    """From which stage to which; several where ranks hold several."""
    message_bytes: int
    """The largest; below 0 where no size is known."""
    wire_ns: int | None
    wire_p95_ns: int | None
    wires: int
    """How many messages showed their wire."""
    wait_ns: int
    """How long the receive waited for its send."""
    wait_p95_ns: int
    buffered_fraction: float
    count: int

    @property
    def bytes_per_s(self) -> float | None:
        """What the wire carried, where both size and wire are known."""
        if self.message_bytes <= 0 or not self.wire_ns:
            return None
        return self.message_bytes * NS_PER_S / self.wire_ns


def measure_hops(timeline: Timeline, ranks: tuple[RankTimeline, ...]) -> tuple[HopFigures, ...]:
    """Measure each direction between ranks with neighbouring stages.

    A last rank's answer to the first is no hop, unless stages go around from the one to the other.
    """
    passes, transfers = timeline.passes, timeline.transfers
    mine = np.isin(passes.rank, [rank.rank for rank in ranks])
    trains = bool((passes.kind[mine] != PassKind.F).any())
    place = {rank.rank: number for number, rank in enumerate(ranks)}
    figures = []
    of_hops = {
        (place[source], place[destination]): rows
        for (source, destination), rows in rows_by_hop(transfers).items()
        if source in place and destination in place
    }
    # Pairs as ranks stand, each both ways.
    for source, destination in sorted(of_hops, key=lambda hop: (min(hop), max(hop), hop)):
        here, there = ranks[source], ranks[destination]
        stages = _neighbours(here, there, trains=trains)
        if stages:
            rows = transfers.where(of_hops[source, destination])
            figures.append(_measure(rows, here.rank, there.rank, stages))
    return tuple(figures)


def _neighbours(
    source: RankTimeline, destination: RankTimeline, *, trains: bool
) -> tuple[tuple[int, int], ...]:
    """Return the stages that pass activations on, and gradients back where there are any."""
    ways = (1, -1) if trains else (1,)
    return tuple(
        (stage, stage + way)
        for stage in source.stages
        for way in ways
        if stage + way in destination.stages
    )


def _measure(
    rows: Transfers, source: int, destination: int, stages: tuple[tuple[int, int], ...]
) -> HopFigures:
    buffered = rows.send_end_ns < rows.receive_start_ns
    both_there = np.maximum(rows.send_start_ns, rows.receive_start_ns)
    wire = (rows.receive_end_ns - both_there)[~buffered]
    wait = np.maximum(both_there - rows.receive_start_ns, 0)
    return HopFigures(
        source=source,
        destination=destination,
        stages=stages,
        message_bytes=int(rows.message_bytes.max()),
        wire_ns=_percentile(wire, 50) if len(wire) else None,
        wire_p95_ns=_percentile(wire, _TAIL_PERCENT) if len(wire) else None,
        wires=len(wire),
        wait_ns=_percentile(wait, 50),
        wait_p95_ns=_percentile(wait, _TAIL_PERCENT),
        buffered_fraction=float(buffered.mean()),
        count=len(rows),
    )


def _percentile(values: I64, percent: int) -> int:
    return round(float(np.percentile(values, percent)))
