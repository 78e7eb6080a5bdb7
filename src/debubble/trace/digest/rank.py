"""One rank's trace and sidecar in → a digest → both again, checked to the last index."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from debubble.errors import Gap
from debubble.trace.columns import (
    Annotations,
    CpuOperators,
    Group,
    Header,
    Kernels,
    Launches,
    Memory,
    Operators,
    RankTrace,
    Table,
    Thread,
    build,
    column_types,
)
from debubble.trace.digest.archive import Head, Stamp, damaged, pack, unpack
from debubble.trace.digest.check import check_sidecar, check_trace
from debubble.trace.digest.tables import (
    Columns,
    Layout,
    as_json,
    from_json,
    pack_tables,
    unpack_tables,
)
from debubble.trace.sidecar import Sidecar
from debubble.trace.source import DEFAULT_LIMITS, Limits, Source

_TABLES: dict[str, type[Table]] = {
    "kernels": Kernels,
    "launches": Launches,
    "operators": Operators,
    "annotations": Annotations,
    "memory": Memory,
    "cpu_operators": CpuOperators,
}
_WANTED = {name: column_types(kind) for name, kind in _TABLES.items()}
_TableType = TypeVar("_TableType", bound=Table)


class _Description(msgspec.Struct, frozen=True, kw_only=True):
    """All of a `RankTrace` that is not a column, and the sidecar."""

    format: str
    header: Header
    names: tuple[str, ...]
    threads: tuple[Thread, ...]
    groups: tuple[Group, ...]
    events: int
    inflated_bytes: int
    gaps: tuple[Gap, ...]
    sidecar: Sidecar | None
    tables: dict[str, Layout]


def pack_digest(
    trace: RankTrace,
    sidecar: Sidecar | None,
    *,
    stamp: Stamp | None = None,
    part: int = 0,
    parts: int = 1,
) -> bytes:
    """Return a rank's digest; `stamp` says of which recording, `part` which of a file's ranks."""
    layouts, columns = pack_tables({name: getattr(trace, name) for name in _TABLES}, _WANTED)
    description = _Description(
        format=trace.format,
        header=trace.header,
        names=trace.names,
        threads=trace.threads,
        groups=trace.groups,
        events=trace.events,
        inflated_bytes=trace.inflated_bytes,
        gaps=trace.gaps,
        sidecar=sidecar,
        tables=layouts,
    )
    head = Head(
        file=trace.file,
        rank=trace.rank,
        world_size=trace.header.world_size,
        stamp=stamp,
        part=part,
        parts=parts,
    )
    return pack(head, as_json(description), columns)


def read_digest(file: str, limits: Limits = DEFAULT_LIMITS) -> tuple[RankTrace, Sidecar | None]:
    """Read a digest from a path or URL: the trace as it was read, and what lay beside it."""
    return unpack_digest(b"".join(Source(file, limits).pieces()), file, limits)


def unpack_digest(
    data: bytes, file: str = "", limits: Limits = DEFAULT_LIMITS
) -> tuple[RankTrace, Sidecar | None]:
    """Return what was packed; `file` is the digest's own name, for errors."""
    content = unpack(data, file, limits)
    if content.head.table:
        raise damaged(file, "it is that of an op table")
    said = from_json(content, _Description, file)
    tables = unpack_tables(said.tables, content.columns, _WANTED, file)
    made = {name: _build(kind, tables[name], file) for name, kind in _TABLES.items()}
    trace = RankTrace(
        file=content.head.file,
        format=said.format,
        header=said.header,
        names=said.names,
        threads=said.threads,
        groups=said.groups,
        events=said.events,
        inflated_bytes=said.inflated_bytes,
        rank=content.head.rank,
        gaps=said.gaps,
        **made,  # type: ignore[arg-type]
    )
    check_trace(trace, file)
    if said.sidecar is not None:
        check_sidecar(said.sidecar, file)
    return trace, said.sidecar


def _build(kind: type[_TableType], columns: Columns, file: str) -> _TableType:
    starts = columns.get("start_ns")
    if starts is None:
        raise damaged(file, f"{kind.__name__} has no starts")
    return build(kind, len(starts), **columns)
