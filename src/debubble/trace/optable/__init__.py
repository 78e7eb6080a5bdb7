"""Op tables (CSV, JSON lines, Parquet) in → `OpTable` out: one row an operation.

They come from shops that time their jobs themselves. Columns `step, pipeline, stage, microbatch,
op, start_us, duration_us` and, where known, `rank, chunk, bytes, peer, layer, memory_bytes`, by
these or their other usual names (`files.py`). A time's unit is the end of its column's name: `_s`,
`_ms`, `_us`, `_ns`. A time that names none has the unit given by the caller, else that of the
table's other times, else seconds.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from debubble.errors import Code, Gap, TraceError
from debubble.trace.columns import I64, MOST_RANKS, UNKNOWN, Interner, OpTable
from debubble.trace.format import Format, Reading, TraceFile
from debubble.trace.optable.files import (
    DEFAULT_UNIT,
    NAME,
    NS_PER,
    Layout,
    Op,
    RawTable,
    empty,
    find_columns,
    ops_of,
    read_integers,
    read_raw,
    read_times,
    recognise,
    sniff_op_table,
    spellings,
)
from debubble.trace.source import DEFAULT_LIMITS, Limits, inflate
from debubble.units import show_duration, show_first

# Op tables are held whole, some ten times their size; this is about four million passes.
HELD_BYTES = 256 * 1024**2
_REQUIRED: Final = ("step", "stage", "microbatch", "op", "start")
# Sixteen times the layers of the deepest models.
_MOST_STAGES: Final = 2**14
_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1
PASSES: Final = (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
# By column of whole numbers: the lowest and highest of them, and what a hole means; None: an error.
# Those of devices are within all clusters: all that is below a number would be held as missing.
_COLUMNS: Final[dict[str, tuple[int, int, int | None]]] = {
    "step": (-_INT64_MAX, _INT64_MAX, None),
    "pipeline": (UNKNOWN, MOST_RANKS - 1, 0),
    "stage": (UNKNOWN, _MOST_STAGES - 1, None),
    "microbatch": (UNKNOWN, _INT32_MAX, UNKNOWN),
    "rank": (UNKNOWN, MOST_RANKS - 1, UNKNOWN),
    "peer": (UNKNOWN, MOST_RANKS - 1, UNKNOWN),
    "layer": (UNKNOWN, _INT32_MAX, UNKNOWN),
    "chunk": (UNKNOWN, _MOST_STAGES - 1, UNKNOWN),
    "tensor": (UNKNOWN, _INT32_MAX, 0),
    "bytes": (UNKNOWN, _INT64_MAX, UNKNOWN),
    "memory": (UNKNOWN, _INT64_MAX, UNKNOWN),
}
# What makes two rows the same pass, beside a known microbatch.
_PASS_KEY: Final = ("step", "pipeline", "rank", "stage", "microbatch", "op", "layer")


def read_known(known: TraceFile, limits: Limits) -> Reading:
    """Read a table whole."""
    return Reading(table=read_op_table(known.file, limits=limits))


def read_op_table(
    path: str, *, data: bytes | None = None, limits: Limits = DEFAULT_LIMITS
) -> OpTable:
    """Read a table from `data`, or from the file where there is none."""
    return make_op_table(
        read_raw(path, inflate(path, limits, HELD_BYTES) if data is None else data, limits)
    )


def make_op_table(table: RawTable, gaps: tuple[Gap, ...] = ()) -> OpTable:
    """Understand and check the rows of a table, whichever format they come from."""
    layout = find_columns(table.names)
    _check_layout(table, layout)
    if not table.rows:
        raise empty(table.file)
    start, duration, assumed = _read_both_times(table, layout)
    name, names = _read_names(table, layout.fields["op"])
    columns = {key: _read(table, layout, key) for key in _COLUMNS}
    columns |= {
        "row": np.arange(table.rows),
        "start": start,
        "duration": duration,
        "name": name,
    }
    columns = _tell_ops(columns, names)
    columns |= _tell_chunks(columns)
    shared = np.unique(columns["tensor"])
    first = columns["tensor"] == shared[0]
    columns = {key: values[first] for key, values in columns.items()}
    columns["op"], split = _name_split_backwards(table.file, columns)
    _check_passes(table, columns)
    _check_sizes(table.file, columns)
    order = np.lexsort((columns["start"], columns["step"]))
    columns = {key: values[order] for key, values in columns.items()}
    small: dict[str, Any] = {
        key: columns[key].astype(np.int32)
        for key in ("pipeline", "stage", "microbatch", "name", "rank", "peer", "layer")
    }
    return OpTable(
        file=table.file,
        format=table.format,
        names=names,
        step=columns["step"],
        op=columns["op"].astype(np.uint8),
        start_ns=columns["start"],
        duration_ns=columns["duration"],
        message_bytes=columns["bytes"],
        memory_bytes=columns["memory"],
        events=table.rows,
        inflated_bytes=table.file_bytes,
        hosts=_read_hosts(table, layout, columns),
        gaps=gaps + assumed + split + shared_stages(len(shared), table.file),
        **small,
    )


def shared_stages(ranks: int, file: str) -> tuple[Gap, ...]:
    """Say that one rank is read of those that share a stage; nothing where none do."""
    if ranks < 2:
        return ()
    gap = Gap(
        code=Code.STAGES_SHARED,
        message=f"{ranks} ranks share each stage for tensor parallelism: the first is read",
        hint="they compute and wait together; to hold them apart, give traces of torch.profiler",
        file=file,
    )
    return (gap,)


def _check_sizes(file: str, columns: dict[str, I64]) -> None:
    """Refuse stages counted through chunks, and ranks through pipelines, beyond all clusters."""
    stage, rank = (int(columns[key].max(initial=0)) for key in ("stage", "rank"))
    if (columns["rank"] < 0).any():
        rank = max(rank, (int(columns["pipeline"].max()) + 1) * (stage + 1) - 1)
    for key, number, limit in (("stage", stage, _MOST_STAGES), ("rank", rank, MOST_RANKS)):
        if number >= limit:
            raise TraceError(f"{key} {number:,} is out of range", file=file)


def _tell_ops(columns: dict[str, I64], names: tuple[str, ...]) -> dict[str, I64]:
    """Say what each row did: one row for each message of those that one call exchanges."""
    ops = [ops_of(name) for name in names]
    counts = np.array([len(of_name) for of_name in ops])[columns["name"]]
    columns = {key: np.repeat(values, counts) for key, values in columns.items()}
    within = np.arange(len(columns["row"])) - np.repeat(np.cumsum(counts) - counts, counts)
    first = np.cumsum([0, *map(len, ops)])[columns["name"]]
    return columns | {"op": np.concatenate(ops).astype(np.int64)[first + within]}


def _tell_chunks(columns: dict[str, I64]) -> dict[str, I64]:
    """Return stages counted through the model, and ranks, where stages are positions with chunks.

    Jobs with several stages a rank write the position of the rank and the number of its chunk.
    """
    position, chunk = columns["stage"], columns["chunk"]
    passes = np.isin(columns["op"], PASSES)
    pairs = set(zip(position[passes].tolist(), chunk[passes].tolist(), strict=True))
    if chunk.max(initial=0) < 1 or len(pairs) == len({stage for stage, _ in pairs}):
        return {}
    positions = int(position.max()) + 1
    rank = columns["rank"]
    rank = np.where(rank < 0, columns["pipeline"] * positions + position, rank)
    return {"stage": np.maximum(chunk, 0) * positions + position, "rank": rank}


def _check_layout(table: RawTable, layout: Layout) -> None:
    """Say which columns are missing, what was looked for and what is there."""
    missing = [name for name in _REQUIRED if name not in layout.fields]
    if not {"duration", "end"} & layout.fields.keys():
        missing.append("duration")
    if missing in (["start"], ["step", "start"]) and "duration" in layout.fields:
        raise TraceError(
            "the table says how long passes took, and not when: no column for start",
            file=table.file,
            hint="waits cannot be told; what passes of each stage cost is enough for "
            "`debubble simulate --forward 5ms,7ms --backward 9ms,13ms`",
        )
    if missing:
        looked_for = "; ".join(f"{name}: {spellings(name)}" for name in missing)
        found = show_first(table.names)
        message = f"the table has no column for {', '.join(missing)}; it has {found}"
        raise TraceError(message, file=table.file, hint=f"looked for {looked_for}")
    if layout.repeated:
        message = f"the table has two columns called {layout.repeated[0]}"
        raise TraceError(message, file=table.file, hint="rename or remove one of them")


def _read(table: RawTable, layout: Layout, name: str) -> I64:
    """Read a column of whole numbers; one that the table lacks is missing all the way."""
    lowest, highest, missing = _COLUMNS[name]
    if name not in layout.fields:
        return np.full(table.rows, missing, dtype=np.int64)
    column = layout.fields[name]
    return read_integers(table, column, lowest=lowest, highest=highest, missing=missing)


def _read_both_times(table: RawTable, layout: Layout) -> tuple[I64, I64, tuple[Gap, ...]]:
    used = ("start", "duration" if "duration" in layout.fields else "end")
    units = [layout.units[time] for time in used if layout.units[time]]
    fallback = units[0] if units else DEFAULT_UNIT
    start, other = (
        read_times(table, layout.fields[time], NS_PER[layout.units[time] or fallback])
        for time in used
    )
    duration = other if used[1] == "duration" else other - start
    if np.any(duration < 0):
        row = int(np.argmax(duration < 0))
        message = f"a duration of {show_duration(int(duration[row]))} is negative"
        raise table.error(message, row=row, column=layout.fields[used[1]])
    if units:
        return start, duration, ()
    columns = " and ".join(layout.fields[time] for time in used)
    assumed = Gap(
        code=Code.UNIT_ASSUMED,
        message=f"the columns {columns} name no unit; read as seconds",
        hint="end their names in _s, _ms, _us or _ns",
        file=table.file,
    )
    return start, duration, (assumed,)


def _read_names(table: RawTable, column: str) -> tuple[I64, tuple[str, ...]]:
    """Intern the operations as the table spells them."""
    names: Interner[str] = Interner()
    numbers = []
    for row, cell in enumerate(table.columns[column]):
        if not isinstance(cell, str) or not cell.strip():
            raise table.error("is no name of an operation", row=row, column=column)
        numbers.append(names[cell])
    return np.array(numbers, dtype=np.int64), names.all()


def _read_hosts(
    table: RawTable, layout: Layout, columns: dict[str, I64]
) -> tuple[tuple[int, str], ...]:
    """Return the host of each rank, where a column names it: by the first row of the rank."""
    if "host" not in layout.fields:
        return ()
    hosts: dict[int, str] = {}
    cells = table.columns[layout.fields["host"]]
    for row, rank in sorted(zip(columns["row"].tolist(), columns["rank"].tolist(), strict=True)):
        if rank >= 0 and cells[row] is not None and str(cells[row]).strip():
            hosts.setdefault(rank, str(cells[row]).strip())
    return tuple(sorted(hosts.items()))


def _name_split_backwards(file: str, columns: dict[str, I64]) -> tuple[I64, tuple[Gap, ...]]:
    """Read B as the input gradient where the same pass has a W: the papers' F, B, W."""
    op = columns["op"]
    keys = np.stack([columns[key] for key in ("step", "pipeline", "rank", "stage", "microbatch")])
    _, unit = np.unique(keys, axis=1, return_inverse=True)
    unit = unit.reshape(-1)
    has_weight_gradient = np.zeros(unit.max() + 1, dtype=bool)
    has_weight_gradient[unit[op == Op.WEIGHT_GRAD]] = True
    has_weight_gradient[unit[op == Op.INPUT_GRAD]] = False
    split = (op == Op.BACKWARD) & has_weight_gradient[unit]
    if not split.any():
        return op, ()
    gap = Gap(
        code=Code.B_IS_INPUT_GRADIENT,
        message="backward passes with a weight gradient beside them are read as input gradients",
        hint="write them as I (input gradient) and W (weight gradient)",
        file=file,
    )
    return np.where(split, Op.INPUT_GRAD, op), (gap,)


def _check_passes(table: RawTable, columns: dict[str, I64]) -> None:
    """Refuse a table that has a pass twice: every sum over it would be wrong."""
    rows = np.flatnonzero(np.isin(columns["op"], PASSES) & (columns["microbatch"] >= 0))
    keys = np.stack([columns[key][rows] for key in _PASS_KEY])
    order = np.lexsort(keys)
    keys = keys[:, order]
    twice = np.flatnonzero(np.all(keys[:, 1:] == keys[:, :-1], axis=0))
    if not len(twice):
        return
    # The sort is stable: of two equal rows the earlier comes first.
    earliest = twice[np.argmin(rows[order[twice + 1]])]
    first, second = (int(rows[order[earliest + step]]) for step in (0, 1))
    key = ("step", "pipeline", "stage", "microbatch")
    message = f"the {Op(int(columns['op'][second])).name.lower()} pass of "
    message += ", ".join(f"{name} {columns[name][second]}" for name in key)
    message += f" is there twice, first on {table.where(int(columns['row'][first]))}"
    hint = "is a column missing that tells them apart: rank, pipeline or layer?"
    raise table.error(message, row=int(columns["row"][second]), hint=hint)


__all__ = [
    "FORMAT", "HELD_BYTES", "PASSES", "Op", "OpTable", "RawTable", "make_op_table",
    "read_op_table", "shared_stages", "sniff_op_table",
]  # fmt: skip

FORMAT = Format(
    name=NAME,
    position=30,
    in_names=(".parquet", ".csv"),
    recognise=recognise,
    read=read_known,
    one_a_rank=False,
)
