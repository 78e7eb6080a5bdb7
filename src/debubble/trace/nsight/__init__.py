"""Nsight Systems SQLite exports in → `RankTrace`s out."""

from __future__ import annotations

import re
from dataclasses import replace

from debubble.errors import TraceError
from debubble.trace.format import OTHER, Format, Reading, TraceFile, rank_from_name
from debubble.trace.source import Limits, local_copy

_SQLITE = re.compile(rb"\ASQLite format 3\0")
# What `nsys profile` itself leaves; its form is nobody's but NVIDIA's.
_REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")


def recognise(file: str, prefix: bytes) -> TraceFile | None:
    """Tell a database; whether it is an export shows when it is read."""
    if file.lower().endswith(_REPORTS):
        why = TraceError(
            "is a report of Nsight Systems, which is read as its SQLite export",
            hint="run `nsys export --type sqlite` on it, and give the file that this writes",
            file=file,
        )
        return TraceFile(file=file, format=OTHER, why_not=why)
    if not _SQLITE.match(prefix):
        return None
    return TraceFile(file=file, format=FORMAT.name, rank=rank_from_name(file))


def read_known(known: TraceFile, limits: Limits) -> Reading:
    """Read every process of an export."""
    from debubble.trace.nsight.read import read_nsight  # noqa: PLC0415 (rare, and 30 ms)

    with local_copy(known.file, limits) as path:
        traces = tuple(replace(trace, file=known.file) for trace in read_nsight(path))
    return Reading(traces=traces)


FORMAT = Format(
    name="nsight",
    position=20,
    in_names=(".sqlite", *_REPORTS),
    recognise=recognise,
    read=read_known,
    one_a_rank=False,
)
