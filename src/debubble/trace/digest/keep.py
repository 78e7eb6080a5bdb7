"""What was read of a file in → its digests, written where they are to be kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from debubble.errors import Code, Gap, TraceError, as_gap
from debubble.trace.columns import RankTrace
from debubble.trace.digest.place import BESIDE, DigestPlace, stamp_of, write_digest
from debubble.trace.digest.rank import pack_digest
from debubble.trace.sidecar import read_sidecar
from debubble.trace.source import Limits, Source

if TYPE_CHECKING:
    from debubble.trace.optable import OpTable


def keep_traces(file: str, traces: Sequence[RankTrace], place: DigestPlace) -> tuple[Gap, ...]:
    """Write a digest a rank; what cannot be written is a gap, and the answer goes on."""
    stamp = stamp_of(file)
    said, wrong = read_sidecar(file)
    gaps: list[Gap] = []
    for part, trace in enumerate(traces):
        whole = replace(trace, gaps=(*trace.gaps, wrong)) if wrong else trace
        data = pack_digest(whole, said, stamp=stamp, part=part, parts=len(traces))
        target = place.target(file, trace.rank if len(traces) > 1 else None)
        gaps += _write(target, data, trace.rank)
    return tuple(gaps)


def keep_table(file: str, table: OpTable, place: DigestPlace) -> tuple[Gap, ...]:
    """Write the digest of an op table."""
    from debubble.trace.digest.table import pack_table  # noqa: PLC0415 (rare, and 20 ms)

    return tuple(_write(place.target(file), pack_table(table, stamp=stamp_of(file)), None))


def copy_digest(file: str, rank: int | None, place: DigestPlace, limits: Limits) -> tuple[Gap, ...]:
    """Copy a digest to another place; beside its trace it lies already."""
    if place.place == BESIDE or place.target(file) == file:
        return ()
    return tuple(_write(place.target(file), b"".join(Source(file, limits).pieces()), rank))


def _write(target: str, data: bytes, rank: int | None) -> list[Gap]:
    try:
        write_digest(target, data)
    except TraceError as error:
        return [replace(as_gap(error, code=Code.DIGEST_NOT_WRITTEN), rank=rank)]
    return []
