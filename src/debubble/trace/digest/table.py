"""An op table in → its digest → the table again. One digest: the table holds all its ranks."""

from __future__ import annotations

import msgspec
import numpy as np

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

# Half of what fits: an end is a start and a duration.
_LONGEST = 2**62
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
    layouts, columns = pack_tables({"operations": table}, _WANTED)
    description = _Description(
        format=table.format,
        names=table.names,
        events=table.events,
        inflated_bytes=table.inflated_bytes,
        gaps=table.gaps,
        tables=layouts,
    )
    return pack(Head(file=table.file, stamp=stamp, table=True), as_json(description), columns)


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
    if not len(columns["step"]) or said.events < len(columns["step"]):
        raise damaged(file, "it has no rows, or too many")
    check_range(columns["name"], 0, len(said.names) - 1, file, "name")
    check_range(columns["op"], 0, max(Op), file, "op")
    check_range(columns["duration_ns"], 0, _LONGEST, file, "duration_ns")
    check_range(columns["start_ns"], -_LONGEST, _LONGEST, file, "start_ns")
    order = np.lexsort((columns["start_ns"], columns["step"]))
    if not np.array_equal(columns["step"][order], columns["step"]) or not np.array_equal(
        columns["start_ns"][order], columns["start_ns"]
    ):
        raise damaged(file, "its rows are out of order")
    return OpTable(
        file=content.head.file,
        format=said.format,
        names=said.names,
        events=said.events,
        inflated_bytes=said.inflated_bytes,
        gaps=said.gaps,
        **columns,
    )
