"""Rows in CSV, JSON lines or Parquet in → columns of numbers and words.

Three questions, in this order: which column is which (`find_columns`, `ops_of`), what form the
file has (`sniff_op_table`, `read_raw`), and what its cells say (`read_integers`, `read_times`).
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from enum import IntEnum
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from debubble.errors import MissingExtra, TraceError
from debubble.trace.columns import I64, LAST_NS
from debubble.trace.format import TraceFile
from debubble.trace.source import Limits
from debubble.units import NS_PER_S, NS_PER_US

NAME = "op table"
Values = Sequence[object] | NDArray[Any]


class Op(IntEnum):
    """What a row of an op table did."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    INPUT_GRAD = 3
    WEIGHT_GRAD = 4
    FORWARD_SEND = 5
    FORWARD_RECEIVE = 6
    BACKWARD_SEND = 7
    BACKWARD_RECEIVE = 8
    COLLECTIVE = 9
    OPTIMIZER = 10


NS_PER: Final[Mapping[str, int]] = {"s": NS_PER_S, "ms": 1_000_000, "us": NS_PER_US, "ns": 1}
# ByteDance's published tables, whose `start_ts` and `duration` name no unit, are in seconds.
DEFAULT_UNIT: Final = "s"

# Each field of ours, and the columns it may be called by; where a table has several, the first.
ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "step": ("step", "step_id", "global_step", "train_step", "iteration", "iter"),
    "pipeline": ("pipeline", "pipeline_id", "dp_rank", "dp_rk", "data_parallel_rank", "replica"),
    "stage": (
        *("stage", "stage_id", "pp_stage", "pp_rank", "pp_rk", "pipeline_stage", "pipeline_rank"),
    ),
    "microbatch": ("microbatch", "micro_batch", "microbatch_id", "micro_batch_id", "mb_id", "mb"),
    "op": ("op", "optype", "op_type", "operation", "op_name", "type", "name"),
    "rank": ("rank", "global_rank", "g_rk", "world_rank"),
    "tensor": ("tp_rank", "tp_rk", "tensor_parallel_rank", "tensor_rank"),
    "bytes": ("bytes", "message_bytes", "size_bytes", "nbytes"),
    "peer": ("peer", "peer_rank"),
    "layer": ("layer", "layer_id", "layer_index"),
    "chunk": ("chunk", "chunk_id", "model_chunk", "mc", "vpp_rank", "vp_stage", "virtual_stage"),
    "host": ("host", "hostname", "host_name", "node", "node_name", "machine"),
    "memory": ("memory_bytes", "peak_memory_bytes", "reserved_bytes", "allocated_bytes"),
}
# The same for times, without the unit that follows: `start_us`, `dur_ms`.
TIME_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "start": ("start", "start_ts", "start_time", "begin", "begin_ts", "ts", "timestamp"),
    "duration": ("duration", "dur", "elapsed"),
    "end": ("end", "end_ts", "end_time", "stop"),
}

_SPLIT: Final = re.compile(r"[^a-z0-9]+")
_COLLECTIVE: Final = re.compile(r"all-?reduce|reduce-?scatter|all-?gather|all-?to-?all|broadcast")
_OPTIMIZER: Final = re.compile(r"optimi[sz]er|optim(?:-|$)")
_FORWARD, _BACKWARD = r"(?:f|fw|fwd|forward)", r"(?:b|bw|bwd|backward)"
_SEND, _RECEIVE = r"i?send", r"i?(?:recv|receive)"
# What schedules add to the name of a pass.
_PART = r"(?:-(?:compute|pass|step|warmup|steady|cooldown))?"
_RULES: Final = tuple(
    (re.compile(f"(?:{pattern})"), op)
    for pattern, op in (
        (f"{_FORWARD}{_PART}", Op.FORWARD),
        (f"(?:full-)?{_BACKWARD}{_PART}", Op.BACKWARD),
        (rf"i|input-grad(?:ient)?s?|dgrad|{_BACKWARD}-(?:input|dgrad){_PART}", Op.INPUT_GRAD),
        (rf"w|weight-grad(?:ient)?s?|wgrad|{_BACKWARD}-(?:weight|wgrad){_PART}", Op.WEIGHT_GRAD),
        (f"{_FORWARD}-{_SEND}|{_SEND}-(?:{_FORWARD}|warmup)", Op.FORWARD_SEND),
        (f"{_FORWARD}-{_RECEIVE}|{_RECEIVE}-(?:{_FORWARD}|warmup)", Op.FORWARD_RECEIVE),
        (f"{_BACKWARD}-{_SEND}|{_SEND}-(?:{_BACKWARD}|cooldown)", Op.BACKWARD_SEND),
        (f"{_BACKWARD}-{_RECEIVE}|{_RECEIVE}-(?:{_BACKWARD}|cooldown)", Op.BACKWARD_RECEIVE),
    )
)
# A send and a receive in one call, as Megatron's timers and MegatronApp name them.
_EXCHANGES: Final = {
    "exchange-next": "forward-send-backward-recv",
    "exchange-prev": "backward-send-forward-recv",
}
_MESSAGES: Final = tuple(
    re.compile(message)
    for message in (
        rf"(?:{_FORWARD}|{_BACKWARD})-(?:{_SEND}|{_RECEIVE})",
        rf"(?:{_SEND}|{_RECEIVE})-(?:{_FORWARD}|{_BACKWARD})(?![a-z])",
    )
)

_PARQUET_MAGIC: Final = b"PAR1"
_BOM: Final = b"\xef\xbb\xbf"
_DELIMITERS: Final = ",;\t"
# Of the fields below; fewer, or none that speaks of a pipeline, is some other table.
_FIELDS_OF_AN_OP_TABLE: Final = 3
_TELLING_FIELDS: Final = frozenset(
    {"step", "stage", "microbatch", "op", "start", "duration", "end"}
)
# A Parquet file of a few kilobytes may claim any number of equal rows: what a cell takes while it
# is read. Real tables take 40 to 60 times their file.
_CELL_BYTES: Final = 64

_INT64: Final = np.iinfo(np.int64)
# Whole numbers up to here are exact in float64.
_EXACT_FLOAT: Final = 2**53
# No number is longer; a longer cell is cut in messages.
_LONGEST_NUMBER: Final = 40
_EMPTY_WORDS: Final = frozenset({"", "nan", "null", "none", "na", "n/a"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which column holds which field; times with the unit that their name tells, or none."""

    fields: Mapping[str, str]
    units: Mapping[str, str]
    repeated: tuple[str, ...]
    """Columns that we would use but that the table has twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTable:
    """A table before its words and numbers are understood."""

    file: str
    format: str
    names: tuple[str, ...]
    rows: int
    columns: Mapping[str, Values]
    lines: Sequence[int] | None
    """The line of each row of CSV as an editor counts them."""
    file_bytes: int

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[Mapping[str, object]],
        *,
        file: str,
        format: str,  # noqa: A002 (as tables call it)
        file_bytes: int,
    ) -> RawTable:
        """Make a table of rows by column; what a row does not hold is empty."""
        names = tuple({name: None for row in rows for name in row})
        return cls(
            file=file,
            format=format,
            names=names,
            rows=len(rows),
            columns={name: [row.get(name) for row in rows] for name in names},
            lines=None,
            file_bytes=file_bytes,
        )

    def error(self, message: str, *, row: int, column: str = "", hint: str = "") -> TraceError:
        """Say what is wrong with one row."""
        at = self.where(row) + (f", column {column}" if column else "")
        return TraceError(f"{at}: {message}", file=self.file, hint=hint)

    def where(self, row: int) -> str:
        """Name a row for a person: `line 7` of CSV, else `row 6`, counted from 1."""
        return f"row {row + 1}" if self.lines is None else f"line {self.lines[row]}"


def find_columns(names: Iterable[str]) -> Layout:
    """Recognise a table's columns by their names."""
    spelled: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for name in names:
        plain = _SPLIT.sub("_", name.strip().lower()).strip("_")
        spelled.setdefault(plain, name)
        counts[plain] += 1
    fields: dict[str, str] = {}
    units: dict[str, str] = {}
    for field, aliases in ALIASES.items():
        found = next((alias for alias in aliases if alias in spelled), None)
        if found is not None:
            fields[field] = found
    for field, aliases in TIME_ALIASES.items():
        wanted = [(f"{a}_{unit}", unit) for a in aliases for unit in NS_PER]
        wanted += [(alias, "") for alias in aliases]
        time = next((pair for pair in wanted if pair[0] in spelled), None)
        if time is not None:
            fields[field], units[field] = time
    return Layout(
        fields={field: spelled[plain] for field, plain in fields.items()},
        units=units,
        repeated=tuple(spelled[plain] for plain in fields.values() if counts[plain] > 1),
    )


def spellings(field: str) -> str:
    """List the names that a field is looked for under, for error messages."""
    if field in ALIASES:
        return ", ".join(ALIASES[field])
    return ", ".join((f"{TIME_ALIASES[field][0]}_us (or _s, _ms, _ns)", *TIME_ALIASES[field]))


def ops_of(name: str) -> tuple[Op, ...]:
    """Say what an operation's name means: one op, or the messages that one call exchanges."""
    spelled = _SPLIT.sub("-", name.strip().lower()).strip("-")
    for rule, op in _RULES:
        if rule.fullmatch(spelled):
            return (op,)
    if _OPTIMIZER.match(spelled):
        return (Op.OPTIMIZER,)
    if _COLLECTIVE.search(spelled):
        return (Op.COLLECTIVE,)
    spelled = _EXCHANGES.get(spelled, spelled)
    for message in _MESSAGES:
        messages = message.findall(spelled)
        if len(messages) > 1 and "-".join(messages) == spelled:
            return tuple(dict.fromkeys(op for part in messages for op in ops_of(part)))
    return (Op.OTHER,)


# An array's first row, which holds no other object.
_FIRST_ROW = re.compile(rb"\s*\[\s*(\{[^{}]*\})")


def sniff_op_table(prefix: bytes) -> str:
    """Tell `csv`, `jsonl` or `parquet` by a file's first bytes; empty where it is no op table."""
    if prefix.startswith(_PARQUET_MAGIC):
        return "parquet"
    first = prefix.removeprefix(_BOM).lstrip().split(b"\n", maxsplit=1)[0].strip()
    if first.startswith(b"["):  # an array of rows, over however many lines
        row = _FIRST_ROW.match(prefix.removeprefix(_BOM))
        first = b"" if row is None else row[1].replace(b"\n", b" ")
    if first.startswith(b"{"):
        try:
            names = list(msgspec.json.decode(first, type=dict[str, object]))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return ""
        return "jsonl" if _looks_like_ops(names) else ""
    header = first.decode("utf-8", "replace")
    return "csv" if _looks_like_ops(header.split(_delimiter(header))) else ""


def recognise(file: str, prefix: bytes) -> TraceFile | None:
    """Tell a table by the names of its columns."""
    return TraceFile(file=file, format=NAME) if sniff_op_table(prefix) else None


def read_raw(path: str, content: bytes, limits: Limits) -> RawTable:
    """Read a table in whichever form it is."""
    if sniff_op_table(content[: 1 << 16]) == "parquet":
        return _read_parquet(path, content, limits)
    content = content.removeprefix(_BOM)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"line {line} is not UTF-8"
        raise TraceError(message, file=path, hint="save the table as UTF-8") from error
    if not text.strip():
        raise empty(path)
    if text.lstrip().startswith(("[", "{")):
        rows = _read_json(path, content)
        return RawTable.of_rows(rows, file=path, format="jsonl", file_bytes=len(content))
    return _read_csv(path, text, len(content))


def empty(path: str) -> TraceError:
    """Make the error of a table without rows."""
    hint = "a table has one row for each operation, and in CSV a line of column names above them"
    return TraceError("the table has no rows", file=path, hint=hint)


def _looks_like_ops(names: Sequence[str]) -> bool:
    told = _TELLING_FIELDS & find_columns(names).fields.keys()
    return len(told) >= _FIELDS_OF_AN_OP_TABLE and bool(told & {"stage", "microbatch"})


def _delimiter(header: str) -> str:
    return max(_DELIMITERS, key=header.count)


def _read_csv(path: str, text: str, file_bytes: int) -> RawTable:
    header = text.lstrip("\r\n").split("\n", maxsplit=1)[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(header))
    names: tuple[str, ...] = ()
    columns: list[list[str]] = []
    lines: list[int] = []
    try:
        for row in reader:
            if not names:
                names, columns = tuple(row), [[] for _ in row]
            elif len(row) == len(names):
                lines.append(reader.line_num)
                for column, cell in zip(columns, row, strict=True):
                    column.append(cell)
            elif row:
                message = f"line {reader.line_num} has {len(row)} fields"
                message += f", the line of names has {len(names)}"
                raise TraceError(message, file=path, hint="is a field with a comma not quoted?")
    except csv.Error as error:
        raise TraceError(f"line {reader.line_num}: {error}", file=path) from error
    return RawTable(
        file=path,
        format="csv",
        names=names,
        rows=len(lines),
        columns=dict(zip(names, columns, strict=True)),
        lines=lines,
        file_bytes=file_bytes,
    )


def _read_json(path: str, content: bytes) -> list[dict[str, object]]:
    """Read an array of objects, or an object a line."""
    decoder = msgspec.json.Decoder(dict[str, object])
    try:
        if content.lstrip().startswith(b"["):
            return msgspec.json.decode(content, type=list[dict[str, object]])
        return decoder.decode_lines(content)
    except (msgspec.DecodeError, RecursionError) as error:
        message = f"a row is not a JSON object: {error}"
        raise TraceError(message, file=path, hint="write one object on each line") from error


def _read_parquet(path: str, content: bytes, limits: Limits) -> RawTable:
    try:
        import pyarrow as pa  # noqa: PLC0415  # an extra that most do not need
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError as error:
        hint = "pip install 'debubble[parquet]'"
        raise MissingExtra("reading Parquet needs pyarrow", file=path, hint=hint) from error

    def values_of(column: Any) -> Values:
        numeric = str(column.type).startswith(("int", "uint", "float", "double"))
        if numeric and column.null_count == 0:  # other words, or holes: a list
            return np.asarray(column.to_numpy())
        return list(column.to_pylist())

    try:
        table = pq.ParquetFile(pa.BufferReader(content))
        names, rows = tuple(table.schema_arrow.names), int(table.metadata.num_rows)
        wanted = tuple(find_columns(names).fields.values())
        limits.check(rows * len(wanted) * _CELL_BYTES, len(content), path)
        read = table.read(columns=list(wanted), use_threads=False)
        columns = {name: values_of(read.column(name)) for name in wanted}
    except (pa.ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
        raise _broken(path, error) from error
    short = next((name for name, values in columns.items() if len(values) != rows), None)
    if short is not None:
        raise _broken(path, f"column {short} has {len(columns[short])} of {rows} rows")
    return RawTable(
        file=path,
        format="parquet",
        names=names,
        rows=rows,
        columns=columns,
        lines=None,
        file_bytes=len(content),
    )


def _broken(path: str, error: Exception | str) -> TraceError:
    return TraceError(f"the Parquet file cannot be read: {error}", file=path)


def read_integers(
    table: RawTable, column: str, *, lowest: int, highest: int, missing: int | None
) -> I64:
    """Read whole numbers; empty cells become `missing`, or are an error where that is None."""
    numbers = _numbers(table, column, missing)
    outside = (numbers < lowest) | (numbers > highest)
    if numbers.dtype.kind == "f":
        holes = np.isnan(numbers)
        if missing is None:
            _refuse(table, column, numbers, holes, "is empty")
        else:
            numbers = np.where(holes, missing, numbers)
        _refuse(table, column, numbers, numbers != np.rint(numbers), "{} is not a whole number")
        outside |= np.abs(numbers) > _EXACT_FLOAT
    _refuse(table, column, numbers, outside, f"{{}} is out of range, {lowest} to {highest}")
    return numbers.astype(np.int64)


def read_times(table: RawTable, column: str, ns_per_unit: int) -> I64:
    """Read times in any unit as nanoseconds, exact where the table is."""
    numbers = _numbers(table, column, None)
    floats = numbers.astype(np.float64)
    _refuse(table, column, floats, ~np.isfinite(floats), "{} is no time")
    hint = "is the unit right? A column's name may end in _s, _ms, _us or _ns"
    absurd = np.abs(floats) * ns_per_unit >= LAST_NS
    _refuse(table, column, numbers, absurd, "{} is a time beyond 126 years", hint=hint)
    if numbers.dtype.kind != "f":
        return numbers.astype(np.int64) * ns_per_unit
    nanoseconds = floats * ns_per_unit
    if not isinstance(table.columns[column], np.ndarray) and np.any(
        np.abs(nanoseconds) >= _EXACT_FLOAT
    ):
        cells = table.columns[column]
        exact = [int((Decimal(str(cell)) * ns_per_unit).to_integral_value()) for cell in cells]
        return np.array(exact, dtype=np.int64)
    rounded: I64 = np.rint(nanoseconds).astype(np.int64)
    return rounded


def _refuse(  # noqa: PLR0913 (one argument a part of the sentence)
    table: RawTable,
    column: str,
    numbers: NDArray[Any],
    wrong: NDArray[np.bool_],
    message: str,
    *,
    hint: str = "",
) -> None:
    """Refuse the table where a number is wrong, and name the first; `{}` stands for it."""
    if wrong.any():
        row = int(np.argmax(wrong))
        raise table.error(message.format(numbers[row]), row=row, column=column, hint=hint)


def _numbers(table: RawTable, column: str, missing: int | None) -> NDArray[Any]:
    """Return an integer or float64 array of a column's cells; holes as `missing`."""
    cells = table.columns[column]
    if isinstance(cells, np.ndarray):
        return cells if cells.dtype.kind in "iu" else cells.astype(np.float64)
    quick = _all_at_once(cells)
    if quick is not None:
        return quick
    parsed = [_read_cell(table, column, row, cell, missing) for row, cell in enumerate(cells)]
    whole = all(isinstance(number, int) for number in parsed)
    return np.array(parsed, dtype=np.int64 if whole else np.float64)


def _all_at_once(cells: Sequence[object]) -> NDArray[Any] | None:
    """Convert a clean column fast; None where it has to be looked at cell by cell."""
    kinds = set(map(type, cells))
    if kinds == {str}:
        choices: tuple[type[int | float], ...] = (int, float)
    elif kinds <= {int, float}:
        choices = (float,) if float in kinds else (int,)
    else:
        return None
    for kind in choices:
        try:
            return np.fromiter(map(kind, cells), dtype=kind, count=len(cells))
        except (ValueError, OverflowError):
            continue
    return None


def _read_cell(
    table: RawTable, column: str, row: int, cell: object, missing: int | None
) -> int | float:
    if cell is None or (isinstance(cell, str) and cell.strip().lower() in _EMPTY_WORDS):
        if missing is None:
            raise table.error("is empty", row=row, column=column)
        return missing
    text = str(cell)
    number: int | float | None = None
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        number = cell
    elif isinstance(cell, str | Decimal) and len(text) <= _LONGEST_NUMBER:
        for kind in (float, int):  # a whole number stays one
            with suppress(ValueError, OverflowError):
                number = kind(text)
    if number is None:
        raise table.error(f"{text[:_LONGEST_NUMBER]!r} is no number", row=row, column=column)
    if isinstance(number, int) and not _INT64.min <= number <= _INT64.max:
        raise table.error(f"{text[:_LONGEST_NUMBER]} is out of range", row=row, column=column)
    return number
