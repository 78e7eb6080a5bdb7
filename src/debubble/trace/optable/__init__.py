"""Op tables (CSV, JSON lines, Parquet) in → `OpTable` out: one row an operation.

They come from shops that time their jobs themselves. Columns `step, pipeline, stage, microbatch,
op, start_us, duration_us` and, where known, `rank, chunk, bytes, peer, layer, memory_bytes`, by
these or their other usual names (`files.py`). A time's unit is the end of its column's name: `_s`,
`_ms`, `_us`, `_ns`. A time that names none has the unit given by the caller, else that of the
table's other times, else seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from debubble.errors import Code, Gap, TraceError, UsageError
from debubble.trace.columns import I64, MOST_RANKS, UNKNOWN, OpTable
from debubble.trace.format import Format, Reading, TraceFile
from debubble.trace.optable.files import (
    DEFAULT_UNIT,
    LAST_NS,
    NAME,
    NS_PER,
    Layout,
    Op,
    RawTable,
    classify_op,
    empty,
    exchange_of,
    find_columns,
    read_integers,
    read_raw,
    read_times,
    recognise,
    sniff_op_table,
    spellings,
)
from debubble.trace.source import Limits, Source
from debubble.units import show_duration

# Op tables are held whole, some ten times their size; this is about four million passes.
_TABLE_BYTES = 256 * 1024**2
_REQUIRED: Final = ("step", "stage", "microbatch", "op", "start")
# Sixteen times the layers of the deepest models.
_MOST_STAGES: Final = 2**14
_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1
_PASSES: Final = (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
_SMALL: Final = frozenset({"pipeline", "stage", "microbatch", "name", "rank", "peer", "layer"})
# A table with hundreds of columns does not make its error unreadable.
_NAMES_SHOWN: Final = 30
_FLAGS: Final = {
    Op.FORWARD: "--forward", Op.BACKWARD: "--backward",
    Op.INPUT_GRAD: "--input-grad", Op.WEIGHT_GRAD: "--weight-grad",
}  # fmt: skip
# What makes two rows the same pass, beside a known microbatch.
_MISSING: Final = {
    "step": 0, "pipeline": 0, "stage": 0, "microbatch": UNKNOWN, "start": 0, "duration": 0,
    "rank": UNKNOWN, "bytes": UNKNOWN, "peer": UNKNOWN, "layer": UNKNOWN, "memory": UNKNOWN,
}  # fmt: skip
_PASS_KEY: Final = ("step", "pipeline", "rank", "stage", "microbatch", "op", "layer")


def read_known(known: TraceFile, limits: Limits) -> Reading:
    """Read a table whole."""
    held = replace(limits, inflated_bytes=min(limits.inflated_bytes, _TABLE_BYTES))
    data = b"".join(Source(known.file, held).pieces())
    return Reading(table=read_op_table(known.file, data=data))


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
    columns["memory"] = _read(table, layout, "memory", highest=_INT64_MAX, missing=UNKNOWN)
    columns |= _tell_chunks(columns, _read(table, layout, "chunk", missing=UNKNOWN))
    tensor = _read(table, layout, "tensor", missing=0)
    rows = np.flatnonzero(tensor == tensor.min(initial=0))
    columns = {key: values[rows] for key, values in columns.items()}
    columns["op"], split = _name_split_backwards(table.file, columns)
    _check_passes(table, columns, rows)
    return make_table(
        columns,
        file=table.file,
        format=table.format,
        names=names,
        events=table.rows,
        inflated_bytes=table.file_bytes,
        hosts=_read_hosts(table, layout, columns),
        gaps=gaps + split + shared_stages(tensor.tolist(), table.file),
    )


def shared_stages(tensor: Sequence[int], file: str) -> tuple[Gap, ...]:
    """Say that one rank is read of those that share a stage; nothing where none do."""
    if len(shared := set(tensor)) < 2:
        return ()
    gap = Gap(
        code=Code.STAGES_SHARED,
        message=f"{len(shared)} ranks share each stage for tensor parallelism: the first is read",
        hint="they compute and wait together; to hold them apart, give traces of torch.profiler",
        file=file,
    )
    return (gap,)


def make_table(columns: dict[str, I64], **told: Any) -> OpTable:
    """Sort columns of whole numbers by step and start; `told` is all of a table that is none.

    A call that sends and receives together becomes a row for each. Numbers beyond all clusters are
    damage: what is between them would be held as ranks and stages that are missing.
    """
    most = {key: int(columns[key].max(initial=0)) for key in ("rank", "pipeline", "stage", "peer")}
    if (columns["rank"] < 0).any():  # counted through pipelines and stages
        most["rank"] = max(most["rank"], (most["pipeline"] + 1) * (most["stage"] + 1) - 1)
    for key, number in most.items():
        if number >= (_MOST_STAGES if key == "stage" else MOST_RANKS):
            raise TraceError(f"{key} {number:,} is out of range", file=str(told["file"]))
    for number, name in enumerate(told["names"]):
        messages = exchange_of(name)
        rows = np.flatnonzero(columns["name"] == number) if messages else ()
        for message in messages[1:]:
            more = {key: values[rows] for key, values in columns.items()}
            more["op"] = np.full(len(rows), message, dtype=np.int64)
            columns = {key: np.append(columns[key], more[key]) for key in columns}
        if messages:
            columns["op"] = columns["op"].copy()
            columns["op"][rows] = messages[0]
    order = np.lexsort((columns["start"], columns["step"]))
    columns = {key: values[order] for key, values in columns.items()}
    small: dict[str, Any] = {
        key: values.astype(np.int32) for key, values in columns.items() if key in _SMALL
    }
    return OpTable(
        step=columns["step"],
        op=columns["op"].astype(np.uint8),
        start_ns=columns["start"],
        duration_ns=columns["duration"],
        message_bytes=columns["bytes"],
        memory_bytes=columns["memory"],
        **small,
        **told,
    )


def table_of_passes(
    passes: Sequence[Mapping[str, int | str]],
    *,
    file: str,
    format: str,  # noqa: A002 (as tables call it)
    inflated_bytes: int,
    gaps: tuple[Gap, ...] = (),
) -> OpTable:
    """Make a table of rows that another format tells: `op` by name, all else whole numbers.

    What a row does not say is not known; of the pipeline, the first.
    """
    for row in passes:
        for key in _MISSING.keys() & row.keys():
            most = LAST_NS if key in {"start", "duration", "bytes", "memory"} else _INT32_MAX
            if not -most <= int(row[key]) <= most:
                raise TraceError(f"{row['op']}: a {key} that is out of range", file=file)
        if int(row.get("duration", 0)) < 0:
            raise TraceError(f"{row['op']}: a pass that ends before it begins", file=file)
    names = tuple(dict.fromkeys(str(row["op"]) for row in passes))
    told: dict[str, I64] = {
        key: np.array([row.get(key, missing) for row in passes], dtype=np.int64)
        for key, missing in _MISSING.items()
    }
    told["name"] = np.array([names.index(str(row["op"])) for row in passes], dtype=np.int64)
    told["op"] = np.array([classify_op(name) for name in names], dtype=np.int64)[told["name"]]
    chunk = np.array([row.get("chunk", UNKNOWN) for row in passes], dtype=np.int64)
    told |= _tell_chunks(told, chunk)
    told["op"], split = _name_split_backwards(file, told)
    keys = np.stack([told[key] for key in _PASS_KEY])[:, np.isin(told["op"], _PASSES)]
    unique, times = np.unique(keys, axis=1, return_counts=True)
    if times.max(initial=0) > 1:
        twice = dict(zip(_PASS_KEY, unique[:, times > 1][:, 0].tolist(), strict=True))
        said = ", ".join(f"{key} {twice[key]}" for key in ("step", "stage", "microbatch"))
        raise TraceError(
            f"the {Op(twice['op']).name.lower()} pass of {said} is there twice",
            file=file,
            hint="say which rank, chunk, microbatch and step each is of",
        )
    return make_table(
        told,
        file=file,
        format=format,
        names=names,
        events=len(passes),
        inflated_bytes=inflated_bytes,
        gaps=gaps + split,
    )


def _tell_chunks(columns: dict[str, I64], chunk: I64) -> dict[str, I64]:
    """Return stages counted through the model, and ranks, where stages are places with chunks.

    Jobs with several stages a rank write the place of the rank and the number of its chunk.
    """
    place = columns["stage"]
    passes = np.isin(columns["op"], _PASSES)
    pairs = set(zip(place[passes].tolist(), chunk[passes].tolist(), strict=True))
    if chunk.max(initial=0) < 1 or len(pairs) == len({stage for stage, _ in pairs}):
        return {}
    places = int(place.max()) + 1
    rank = columns["rank"]
    rank = np.where(rank < 0, columns["pipeline"] * places + place, rank)
    return {"stage": np.maximum(chunk, 0) * places + place, "rank": rank}


def _check_layout(table: RawTable, layout: Layout) -> None:
    """Say which columns are missing, what was looked for and what is there."""
    missing = [name for name in _REQUIRED if name not in layout.fields]
    if not {"duration", "end"} & layout.fields.keys():
        missing.append("duration")
    if missing in (["start"], ["step", "start"]) and "duration" in layout.fields:
        raise TraceError(
            "the table says how long passes took, and not when: no column for start",
            file=table.file,
            hint="waits cannot be told; what passes cost is enough for "
            f"`{_simulation(table, layout)}`",
        )
    if missing:
        looked_for = "; ".join(f"{name}: {spellings(name)}" for name in missing)
        found = ", ".join(table.names[:_NAMES_SHOWN])
        message = f"the table has no column for {', '.join(missing)}; it has {found}"
        raise TraceError(message, file=table.file, hint=f"looked for {looked_for}")
    if layout.repeated:
        message = f"the table has two columns called {layout.repeated[0]}"
        raise TraceError(message, file=table.file, hint="rename or remove one of them")


def _simulation(table: RawTable, layout: Layout) -> str:
    """Write the simulation that durations alone are enough for: medians of each stage and kind."""
    unit = layout.units["duration"] or DEFAULT_UNIT
    duration = read_times(table, layout.fields["duration"], NS_PER[unit])
    name, names = _read_names(table, layout.fields["op"])
    op = np.array([classify_op(spelled) for spelled in names], dtype=np.int64)[name]
    stage = _read(table, layout, "stage")
    microbatches = int(_read(table, layout, "microbatch").max()) + 1
    stages = sorted(set(stage[np.isin(op, _PASSES)].tolist()))
    words = [f"debubble simulate --stages {len(stages)} --microbatches {max(microbatches, 1)}"]
    for kind, flag in _FLAGS.items():
        medians = [duration[(op == kind) & (stage == one)] for one in stages]
        if all(map(len, medians)):
            costs = ",".join(f"{float(np.median(lengths)) / 1e6:.6g}ms" for lengths in medians)
            words.append(f"{flag} {costs}")
    return " ".join(words)


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
    if unit or told:
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
    index: dict[str, int] = {}
    found = []
    for row, cell in enumerate(table.column(column)):
        if not isinstance(cell, str) or not cell.strip():
            raise table.error("is no name of an operation", row=row, column=column)
        found.append(index.setdefault(cell, len(index)))
    return np.array(found, dtype=np.int64), tuple(index)


def _read_hosts(
    table: RawTable, layout: Layout, columns: dict[str, I64]
) -> tuple[tuple[int, str], ...]:
    """Return the host of each rank, where a column names it: by the first row of the rank."""
    if "host" not in layout.fields:
        return ()
    found: dict[int, str] = {}
    cells = table.column(layout.fields["host"])
    for rank, cell in zip(columns["rank"].tolist(), cells, strict=True):
        if rank >= 0 and cell is not None and str(cell).strip():
            found.setdefault(rank, str(cell).strip())
    return tuple(sorted(found.items()))


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


def _check_passes(table: RawTable, columns: dict[str, I64], kept: I64) -> None:
    """Refuse a table that has a pass twice: every sum over it would be wrong.

    `kept` are the rows of the table that the columns are of.
    """
    rows = np.flatnonzero(np.isin(columns["op"], _PASSES) & (columns["microbatch"] >= 0))
    keys = np.stack([columns[key][rows] for key in _PASS_KEY])
    order = np.lexsort(keys)
    keys = keys[:, order]
    twice = np.flatnonzero(np.all(keys[:, 1:] == keys[:, :-1], axis=0))
    if not len(twice):
        return
    # The sort is stable: of two equal rows the earlier comes first.
    earliest = twice[np.argmin(rows[order[twice + 1]])]
    first, second = (int(rows[order[earliest + step]]) for step in (0, 1))
    lines = int(kept[first]), int(kept[second])
    said = ", ".join(
        f"{key} {columns[key][second]}" for key in ("step", "pipeline", "stage", "microbatch")
    )
    message = f"the {Op(int(columns['op'][second])).name.lower()} pass of {said}"
    message += f" is there twice, first on {table.where(lines[0])}"
    hint = "is a column missing that tells them apart: rank, pipeline or layer?"
    raise table.error(message, row=lines[1], hint=hint)


__all__ = ["FORMAT", "Op", "OpTable", "read_op_table", "sniff_op_table", "table_of_passes"]

FORMAT = Format(
    name=NAME,
    a_file="an op table",
    ask_for="op tables",
    position=30,
    in_names=(".parquet", ".csv"),
    recognise=recognise,
    read=read_known,
    one_a_rank=False,
)
