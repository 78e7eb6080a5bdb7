"""Labelled turns and a rank's calls in → what its host does with the time of a batch.

Between a batch's last kernel and the next turn an engine's host hands shapes over to the next rank,
takes those of the next batch, has tokens broadcast, and comes back to its scheduler:

    ├ label: inputs made, kernels launched ┤ send ┤ broadcast ┤ scheduler … ┤ receive ┤├ label …
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from debubble.serving.batches import Batches
from debubble.timeline.model import Intervals, union_of, without
from debubble.timeline.work import find_synchronisations, names_like
from debubble.trace.columns import RankTrace
from debubble.units import NS_PER_S

_RECEIVES = re.compile(r"^gloo:recv$")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """What a host does with a batch's time, in seconds a batch; the parts add up."""

    rank: int
    launching_s: float
    """In the engine's label: inputs made, kernels launched."""
    handing_over_s: float
    """In sends to the next host: until it takes them."""
    receiving_s: float
    """In receives from the host before: until it sends."""
    kept_s: float
    """Kept until the device was done."""
    rest_s: float
    """Sampling, broadcast, the scheduler and what is between them; other threads' turns."""


def measure_hosts(batches: Batches, traces: Sequence[RankTrace]) -> tuple[HostTime, ...]:
    """Divide the span by what each host did; nothing where no label tells its turns."""
    by_rank = {trace.rank: trace for trace in traces}
    found = []
    for place, rank in enumerate(batches.ranks):
        trace, turns = by_rank.get(rank.rank), rank.turns
        begin, end = batches.span
        passes = int(((batches.end[:, place] > begin) & (batches.end[:, place] <= end)).sum())
        if trace is None or turns is None or not passes:
            return ()
        offset = rank.clock_offset_ns
        calls, annotations = find_synchronisations(trace), trace.annotations
        rows = names_like(trace, _RECEIVES)[annotations.name] & (annotations.stream < 0)
        start = annotations.start_ns[rows] + offset
        kept = union_of(calls.start_ns + offset, calls.end_ns + offset)
        received = without(union_of(start, start + annotations.duration_ns[rows]), kept)
        over = without(without(rank.handing_over, kept), received)
        labels = union_of(turns.begin_ns, turns.end_ns)
        for other in (kept, received, over):
            labels = without(labels, other)

        def a_batch(part: Intervals) -> int:
            return round(part.inside(begin, end) / passes)  # noqa: B023 (called in its turn)

        parts = [a_batch(part) for part in (labels, over, received, kept)]
        parts.append(max(round((end - begin) / passes) - sum(parts), 0))
        launching, handing_over, receiving, waiting, rest = (part / NS_PER_S for part in parts)
        found.append(
            HostTime(
                rank=rank.rank,
                launching_s=launching,
                handing_over_s=handing_over,
                receiving_s=receiving,
                kept_s=waiting,
                rest_s=rest,
            )
        )
    return tuple(found)
