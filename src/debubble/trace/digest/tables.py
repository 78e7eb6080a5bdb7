"""Named tables of columns in → layouts and one string of bytes → the tables out, sizes checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from debubble.trace.digest.archive import Content, damaged
from debubble.trace.digest.planes import Plane, pack_column, unpack_column

Columns = dict[str, NDArray[Any]]
# By table and column, the type of its values.
Wanted = Mapping[str, Mapping[str, type[np.integer[Any]]]]
_Kind = TypeVar("_Kind")
_WIDEST = 8


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A table in the bytes: its columns lie one after the other, in this order."""

    rows: int
    columns: dict[str, Plane]


def pack_tables(tables: Mapping[str, object], wanted: Wanted) -> tuple[dict[str, Layout], bytes]:
    """Return where the wanted columns of everything lie, and the bytes."""
    layouts, parts = {}, []
    for name, columns in wanted.items():
        planes, rows = {}, 0
        for column in columns:
            values = getattr(tables[name], column)
            planes[column], data = pack_column(values)
            rows = len(values)
            parts.append(data)
        layouts[name] = Layout(rows=rows, columns=planes)
    return layouts, b"".join(parts)


def unpack_tables(
    layouts: Mapping[str, Layout],
    data: memoryview,
    wanted: Wanted,
    file: str,
) -> dict[str, Columns]:
    """Return the wanted columns in their types; what a digest lacks is left out, and so not known.

    Columns that a later debubble added are passed over.
    """
    tables: dict[str, Columns] = {name: {} for name in wanted}
    at = 0
    for name, layout in layouts.items():
        for column, plane in layout.columns.items():
            size = plane.width * layout.rows
            if layout.rows < 0 or not 1 <= plane.width <= _WIDEST or at + size > len(data):
                raise damaged(file, f"no room for {name}.{column}")
            kind = wanted.get(name, {}).get(column)
            if kind is not None:
                values = unpack_column(plane, data[at : at + size], layout.rows)
                tables[name][column] = _narrow(values, kind, file, f"{name}.{column}")
            at += size
    if at != len(data):
        raise damaged(file, "more columns than it names")
    return tables


def _narrow(
    values: NDArray[np.int64], kind: type[np.integer[Any]], file: str, what: str
) -> NDArray[Any]:
    if kind is np.int64 or not len(values):
        return values.astype(kind, copy=False)
    bounds = np.iinfo(kind)
    check_range(values, bounds.min, bounds.max, file, what)
    return values.astype(kind)


def check_range(values: NDArray[Any], low: int, high: int, file: str, what: str) -> None:
    """Refuse a column that points outside of what it points into."""
    if len(values) and (int(values.min()) < low or int(values.max()) > high):
        raise damaged(file, f"{what} is out of range")


def as_json(said: object) -> bytes:
    """Write what is no column; numbers of any size and text of any kind come back as they were."""
    return json.dumps(msgspec.to_builtins(said), separators=(",", ":")).encode()


def from_json(content: Content, kind: type[_Kind], file: str) -> _Kind:
    """Read it again, every field of the type it should have."""
    try:
        return msgspec.convert(json.loads(content.description), kind)
    except (ValueError, RecursionError) as error:
        raise damaged(file, str(error)) from error
