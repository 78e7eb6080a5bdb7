"""An op table in → its digest → the table again. One digest: the table holds all its ranks."""

from __future__ import annotations

import msgspec

from debubble.errors import Gap
from debubble.trace.columns import column_types
from debubble.trace.digest.archive import Head, Stamp, damaged, pack, unpack
from debubble.trace.digest.tables import (
    Layout,
    as_json,
    check_range,
    from_json,
    pack_tables,
    unpack_tables,
)
from debubble.trace.optable import Op, OpTable
from debubble.trace.source import DEFAULT_LIMITS, Limits, Source

_WANTED = {"operations": column_types(OpTable)}


class _Description(msgspec.Struct, frozen=True, kw_only=True):
    """All of an `OpTable` that is not a column."""

    format: str
    names: tuple[str, ...]
    events: int
    inflated_bytes: int
    gaps: tuple[Gap, ...]
    tables: dict[str, Layout]


def pack_table(table: OpTable, *, stamp: Stamp | None = None) -> bytes:
    """Return the digest of a table; `stamp` says of which file."""
    columns = {column: getattr(table, column) for column in _WANTED["operations"]}
    layouts, data = pack_tables({"operations": columns})
    description = _Description(
        format=table.format,
        names=table.names,
        events=table.events,
        inflated_bytes=table.inflated_bytes,
        gaps=table.gaps,
        tables=layouts,
    )
    return pack(Head(file=table.file, stamp=stamp, table=True), as_json(description), data)


def read_table(file: str, limits: Limits = DEFAULT_LIMITS) -> OpTable:
    """Read the digest of a table from a path or URL."""
    content = unpack(b"".join(Source(file, limits).pieces()), file, limits)
    if not content.head.table:
        raise damaged(file, "it is that of a rank")
    said = from_json(content, _Description, file)
    columns = unpack_tables(said.tables, content.columns, _WANTED, file)["operations"]
    missing = sorted(_WANTED["operations"].keys() - columns.keys())
    if missing:
        raise damaged(file, f"it has no {', '.join(missing)}")
    check_range(columns["name"], 0, len(said.names) - 1, file, "name")
    check_range(columns["op"], 0, max(Op), file, "op")
    return OpTable(
        file=content.head.file,
        format=said.format,
        names=said.names,
        events=said.events,
        inflated_bytes=said.inflated_bytes,
        gaps=said.gaps,
        **columns,
    )
