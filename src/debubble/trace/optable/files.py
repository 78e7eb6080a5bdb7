"""The three forms of op tables as raw columns: CSV, JSON lines, Parquet."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from debubble.errors import MissingExtra, TraceError, TraceTooLarge
from debubble.trace.optable.words import find_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Values = Sequence[object] | NDArray[Any]

_PARQUET_MAGIC: Final = b"PAR1"
_BOM: Final = b"\xef\xbb\xbf"
_DELIMITERS: Final = ",;\t"
# Of the fields below; fewer, or none that speaks of a pipeline, is some other table.
_FIELDS_OF_AN_OP_TABLE: Final = 3
_TELLING_FIELDS: Final = frozenset(
    {"step", "stage", "microbatch", "op", "start", "duration", "end"}
)
# A Parquet file of a few kilobytes may claim any number of equal rows. 50 million take about 4 GB.
_MAX_ROWS: Final = 50_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTable:
    """A table before its words and numbers are understood."""

    file: str
    format: str
    names: tuple[str, ...]
    rows: int
    column: Callable[[str], Values]
    lines: Sequence[int] | None
    """The line of each row as an editor counts them; None where the format has no lines."""
    file_bytes: int

    def error(self, message: str, *, row: int, column: str = "", hint: str = "") -> TraceError:
        """Say what is wrong with one row."""
        where = self.place(row) + (f", column {column}" if column else "")
        return TraceError(f"{where}: {message}", file=self.file, hint=hint)

    def place(self, row: int) -> str:
        """Name a row for a person: `line 7`, or `row 6` of a Parquet file, counted from 1."""
        return f"row {row + 1}" if self.lines is None else f"line {self.lines[row]}"


def sniff_op_table(prefix: bytes) -> str:
    """Tell `csv`, `jsonl` or `parquet` by a file's first bytes; empty where it is no op table."""
    if prefix.startswith(_PARQUET_MAGIC):
        return "parquet"
    first = prefix.removeprefix(_BOM).lstrip().split(b"\n", maxsplit=1)[0].strip()
    if first.startswith(b"{"):
        try:
            names = list(msgspec.json.decode(first, type=dict[str, object]))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return ""
        return "jsonl" if _looks_like_ops(names) else ""
    header = first.decode("utf-8", "replace")
    return "csv" if _looks_like_ops(header.split(_delimiter(header))) else ""


def read_raw(path: str, data: bytes | None) -> RawTable:
    """Read a table in whichever form it is."""
    try:
        content = Path(path).read_bytes() if data is None else data
    except OSError as error:
        raise TraceError(f"cannot be read: {error.strerror}", file=path) from error
    form = sniff_op_table(content[: 1 << 16])
    if form == "parquet":
        return _read_parquet(path, content)
    content = content.removeprefix(_BOM)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"line {line} is not UTF-8"
        raise TraceError(message, file=path, hint="save the table as UTF-8") from error
    if not text.strip():
        raise empty(path)
    if text.lstrip().startswith("{"):
        return _read_json_lines(path, content)
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
                raise _uneven(path, reader.line_num, len(row), len(names))
    except csv.Error as error:
        raise TraceError(f"line {reader.line_num}: {error}", file=path) from error
    return RawTable(
        file=path,
        format="csv",
        names=names,
        rows=len(lines),
        column=lambda name: columns[names.index(name)],
        lines=lines,
        file_bytes=file_bytes,
    )


def _uneven(path: str, line: int, fields: int, names: int) -> TraceError:
    message = f"line {line} has {fields} fields, the line of names has {names}"
    return TraceError(message, file=path, hint="is a field with a comma not quoted?")


def _read_json_lines(path: str, content: bytes) -> RawTable:
    decoder = msgspec.json.Decoder(dict[str, object])
    rows: list[dict[str, object]] = []
    lines: list[int] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(decoder.decode(line))
        except (msgspec.DecodeError, RecursionError) as error:
            message = f"line {number} is not a JSON object: {error}"
            raise TraceError(message, file=path, hint="write one object on each line") from error
        lines.append(number)
    return RawTable(
        file=path,
        format="jsonl",
        names=tuple({name: None for row in rows for name in row}),
        rows=len(rows),
        column=lambda name: [row.get(name) for row in rows],
        lines=lines,
        file_bytes=len(content),
    )


def _read_parquet(path: str, content: bytes) -> RawTable:
    try:
        import pyarrow as pa  # noqa: PLC0415  # an extra that most do not need
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError as error:
        hint = "pip install 'debubble[parquet]'"
        raise MissingExtra("reading Parquet needs pyarrow", file=path, hint=hint) from error

    def read(name: str) -> Values:
        try:
            values = _to_values(table.read(columns=[name], use_threads=False).column(0))
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            raise _broken(path, error) from error
        if len(values) != rows:
            raise _broken(path, f"column {name} has {len(values)} of {rows} rows")
        return values

    try:
        table = pq.ParquetFile(pa.BufferReader(content))
        names = tuple(table.schema_arrow.names)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _broken(path, error) from error
    rows = int(table.metadata.num_rows)
    if not 0 <= rows <= _MAX_ROWS:
        raise TraceTooLarge(f"the table claims {rows:,} rows", file=path, hint="cut it by steps")
    return RawTable(
        file=path,
        format="parquet",
        names=names,
        rows=rows,
        column=read,
        lines=None,
        file_bytes=len(content),
    )


def _broken(path: str, error: Exception | str) -> TraceError:
    return TraceError(f"the Parquet file cannot be read: {error}", file=path)


def _to_values(column: Any) -> Values:  # a pyarrow.ChunkedArray; pyarrow has no types
    """Return whole numbers and fractions as arrays, anything else or with holes as a list."""
    kind = str(column.type)
    if column.null_count == 0 and kind.startswith(("int", "uint", "float", "double")):
        return np.asarray(column.to_numpy())
    return list(column.to_pylist())
