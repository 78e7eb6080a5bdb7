"""Op tables: one row an operation, from shops that time their jobs themselves.

Columns `step, pipeline, stage, microbatch, op, start_us, duration_us` and, where known, `rank,
bytes, peer, layer`, by these or their other usual names (`words.py`), as CSV, JSON lines or
Parquet. A time's unit is the end of its column's name: `_s`, `_ms`, `_us`, `_ns`. A time that
names none has the unit given by the caller, else that of the table's other times, else seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from debubble.errors import Code, Gap, TraceError, UsageError
from debubble.trace.columns import I32, I64, U8, UNKNOWN
from debubble.trace.optable.files import (
    DEFAULT_UNIT,
    NS_PER,
    Layout,
    Op,
    RawTable,
    classify_op,
    empty,
    find_columns,
    read_integers,
    read_raw,
    read_times,
    sniff_op_table,
    spellings,
)
from debubble.units import show_duration

__all__ = ["Op", "OpTable", "read_op_table", "sniff_op_table"]

_REQUIRED: Final = ("step", "stage", "microbatch", "op", "start")
_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1
_PASSES: Final = (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
_SMALL: Final = frozenset({"pipeline", "stage", "microbatch", "name", "rank", "peer", "layer"})
# A table with hundreds of columns does not make its error unreadable.
_NAMES_SHOWN: Final = 30
# What makes two rows the same pass, beside a known microbatch.
_PASS_KEY: Final = ("step", "pipeline", "rank", "stage", "microbatch", "op", "layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable:
    """All operations of a job, sorted by step and start. Starts may count from each step's own."""

    file: str
    format: str
    """`csv`, `jsonl` or `parquet`."""
    names: tuple[str, ...]
    """The operations as the table spells them."""
    step: I64
    pipeline: I32
    stage: I32
    microbatch: I32
    """-1 where the table does not tell, as is usual for transfers."""
    op: U8
    name: I32
    start_ns: I64
    duration_ns: I64
    rank: I32
    message_bytes: I64
    peer: I32
    layer: I32
    events: int
    inflated_bytes: int
    gaps: tuple[Gap, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.step)


def read_op_table(path: str, *, data: bytes | None = None, unit: str | None = None) -> OpTable:
    """Read a table from `data`, or from the file where there is none.

    `unit` (s, ms, us, ns) is that of times whose columns name none.
    """
    if unit is not None and unit not in NS_PER:
        message = f"{unit!r} is no unit of an op table"
        raise UsageError(message, hint=f"one of {', '.join(NS_PER)}")
    table = read_raw(path, data)
    layout = find_columns(table.names)
    _check_layout(table, layout)
    if not table.rows:
        raise empty(path)
    start, duration, gaps = _read_both_times(table, layout, unit)
    name, names = _read_names(table, layout.fields["op"])
    ops = np.array([classify_op(spelled) for spelled in names], dtype=np.int64)
    columns = {
        "step": _read(table, layout, "step", lowest=-_INT64_MAX, highest=_INT64_MAX),
        "pipeline": _read(table, layout, "pipeline", missing=0),
        "stage": _read(table, layout, "stage"),
        "op": ops[name],
        "name": name,
        "start": start,
        "duration": duration,
        "bytes": _read(table, layout, "bytes", highest=_INT64_MAX, missing=UNKNOWN),
    }
    for known_or_not in ("microbatch", "rank", "peer", "layer"):
        columns[known_or_not] = _read(table, layout, known_or_not, missing=UNKNOWN)
    columns["op"], split = _name_split_backwards(table, columns)
    _check_passes(table, columns)
    order = np.lexsort((start, columns["step"]))
    return _make(
        table, names, {key: values[order] for key, values in columns.items()}, gaps + split
    )


def _make(
    table: RawTable, names: tuple[str, ...], columns: dict[str, I64], gaps: tuple[Gap, ...]
) -> OpTable:
    small = {key: values.astype(np.int32) for key, values in columns.items() if key in _SMALL}
    return OpTable(
        file=table.file,
        format=table.format,
        names=names,
        step=columns["step"],
        pipeline=small["pipeline"],
        stage=small["stage"],
        microbatch=small["microbatch"],
        op=columns["op"].astype(np.uint8),
        name=small["name"],
        start_ns=columns["start"],
        duration_ns=columns["duration"],
        rank=small["rank"],
        message_bytes=columns["bytes"],
        peer=small["peer"],
        layer=small["layer"],
        events=table.rows,
        inflated_bytes=table.file_bytes,
        gaps=gaps,
    )


def _check_layout(table: RawTable, layout: Layout) -> None:
    """Say which columns are missing, what was looked for and what is there."""
    missing = [name for name in _REQUIRED if name not in layout.fields]
    if not {"duration", "end"} & layout.fields.keys():
        missing.append("duration")
    if missing:
        looked_for = "; ".join(f"{name}: {spellings(name)}" for name in missing)
        found = ", ".join(table.names[:_NAMES_SHOWN])
        message = f"the table has no column for {', '.join(missing)}; it has {found}"
        raise TraceError(message, file=table.file, hint=f"looked for {looked_for}")
    if layout.repeated:
        message = f"the table has two columns called {layout.repeated[0]}"
        raise TraceError(message, file=table.file, hint="rename or remove one of them")


def _read(  # noqa: PLR0913  # a column and its bounds
    table: RawTable,
    layout: Layout,
    name: str,
    *,
    lowest: int = UNKNOWN,
    highest: int = _INT32_MAX,
    missing: int | None = None,
) -> I64:
    """Read a column of whole numbers; one that the table lacks is `missing` all the way."""
    if name not in layout.fields:
        return np.full(table.rows, missing, dtype=np.int64)
    column = layout.fields[name]
    return read_integers(table, column, lowest=lowest, highest=highest, missing=missing)


def _read_both_times(
    table: RawTable, layout: Layout, unit: str | None
) -> tuple[I64, I64, tuple[Gap, ...]]:
    used = ("start", "duration" if "duration" in layout.fields else "end")
    told = [layout.units[time] for time in used if layout.units[time]]
    fallback = unit or (told[0] if told else DEFAULT_UNIT)
    start, other = (
        read_times(table, layout.fields[time], NS_PER[layout.units[time] or fallback])
        for time in used
    )
    duration = other if used[1] == "duration" else other - start
    if np.any(duration < 0):
        row = int(np.argmax(duration < 0))
        message = f"a duration of {show_duration(int(duration[row]))} is negative"
        raise table.error(message, row=row, column=layout.fields[used[1]])
    assumed = () if unit or told else (_unit_assumed(table, layout, used),)
    return start, duration, assumed


def _unit_assumed(table: RawTable, layout: Layout, used: tuple[str, str]) -> Gap:
    columns = " and ".join(layout.fields[time] for time in used)
    return Gap(
        code=Code.UNIT_ASSUMED,
        message=f"the columns {columns} name no unit; read as seconds",
        hint="end their names in _s, _ms, _us or _ns",
        file=table.file,
    )


def _read_names(table: RawTable, column: str) -> tuple[I64, tuple[str, ...]]:
    """Intern the operations as the table spells them."""
    index: dict[str, int] = {}
    found = []
    for row, cell in enumerate(table.column(column)):
        if not isinstance(cell, str) or not cell.strip():
            raise table.error("is no name of an operation", row=row, column=column)
        found.append(index.setdefault(cell, len(index)))
    return np.array(found, dtype=np.int64), tuple(index)


def _name_split_backwards(table: RawTable, columns: dict[str, I64]) -> tuple[I64, tuple[Gap, ...]]:
    """Read B as the input gradient where the same pass has a W: the papers' F, B, W."""
    op = columns["op"]
    places = np.stack([columns[key] for key in ("step", "pipeline", "rank", "stage", "microbatch")])
    _, place = np.unique(places, axis=1, return_inverse=True)
    place = place.reshape(-1)
    has_weight_gradient = np.zeros(place.max() + 1, dtype=bool)
    has_weight_gradient[place[op == Op.WEIGHT_GRAD]] = True
    has_weight_gradient[place[op == Op.INPUT_GRAD]] = False
    split = (op == Op.BACKWARD) & has_weight_gradient[place]
    if not split.any():
        return op, ()
    gap = Gap(
        code=Code.B_IS_INPUT_GRADIENT,
        message="backward passes with a weight gradient beside them are read as input gradients",
        hint="write them as I (input gradient) and W (weight gradient)",
        file=table.file,
    )
    return np.where(split, Op.INPUT_GRAD, op), (gap,)


def _check_passes(table: RawTable, columns: dict[str, I64]) -> None:
    """Refuse a table that has a pass twice: every sum over it would be wrong."""
    rows = np.flatnonzero(np.isin(columns["op"], _PASSES) & (columns["microbatch"] >= 0))
    keys = np.stack([columns[key][rows] for key in _PASS_KEY])
    order = np.lexsort(keys)
    keys = keys[:, order]
    twice = np.flatnonzero(np.all(keys[:, 1:] == keys[:, :-1], axis=0))
    if not len(twice):
        return
    # The sort is stable: of two equal rows the earlier comes first.
    place = twice[np.argmin(rows[order[twice + 1]])]
    first, second = (int(rows[order[place + step]]) for step in (0, 1))
    said = ", ".join(
        f"{key} {columns[key][second]}" for key in ("step", "pipeline", "stage", "microbatch")
    )
    message = f"the {Op(int(columns['op'][second])).name.lower()} pass of {said}"
    message += f" is there twice, first on {table.place(first)}"
    hint = "is a column missing that tells them apart: rank, pipeline or layer?"
    raise table.error(message, row=second, hint=hint)
