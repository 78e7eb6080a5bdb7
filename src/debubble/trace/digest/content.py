"""A rank or an op table in → its digest, and back; what is read is checked first.

The archive's checksum tells damage. The checks here are for digests that were made to mislead:
whatever comes after the readers follows indices, adds times and counts ranks without looking again.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from debubble.errors import Code, Gap, TraceError, mask_secrets
from debubble.trace.columns import (
    LAST_NS,
    MOST_RANKS,
    TABLES,
    UNKNOWN,
    Group,
    Header,
    KernelKind,
    MemoryDevice,
    Operation,
    OpTable,
    RankTrace,
    Thread,
    build,
    column_types,
)
from debubble.trace.digest.archive import SIGN, Content, damaged, pack, peek_head, unpack
from debubble.trace.format import Head, Reading, Stamp, TraceFile
from debubble.trace.optable import Op
from debubble.trace.sidecar import Sidecar
from debubble.trace.source import (
    DEFAULT_LIMITS,
    GZIP_MAGIC,
    PIECE_BYTES,
    Limits,
    inflate,
    is_url,
    locate,
    open_binary,
    plain_errors,
    read_tail,
    strip_extensions,
)
from debubble.units import replacing

SUFFIX = ".debubble.npz"
BESIDE = "beside"

_TAIL_BYTES = 4096
# A head with a long path is a few hundred bytes.
_HEAD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestPlace:
    """Where the digests of a run go: beside its traces, or below a folder or URL."""

    place: str
    root: str = ""
    """The folder of the run: below it, paths are kept as they are."""
    run: str = ""
    """What the run's own folder is called at the place."""

    def target(self, file: str, rank: int | None = None) -> str:
        """Return the digest's name; of a file with several ranks, that of one of them."""
        folder, slash, name = file.replace(os.sep, "/").rpartition("/")
        stem = strip_extensions(name.removesuffix(SUFFIX)) or name
        name = f"{stem}{SUFFIX}" if rank is None else f"{stem}.rank{rank}{SUFFIX}"
        if self.place == BESIDE:
            return f"{folder}{slash}{name}"
        below = f"{folder}/".startswith(f"{self.root}/")
        inside = folder.removeprefix(self.root).strip("/") if below else ""
        return "/".join(filter(None, (self.place.rstrip("/"), self.run, inside, name)))


def place_digests(place: str, typed: Sequence[str], files: Sequence[str]) -> DigestPlace:
    """Say where digests of these files go: at a place, a run is a folder with its own name."""
    if place == BESIDE:
        return DigestPlace(place=place)
    folders = [file.replace(os.sep, "/").split("/")[:-1] for file in files]
    shared = takewhile(lambda level: len(set(level)) == 1, zip(*folders, strict=False))
    root = "/".join(level[0] for level in shared)
    asked = typed[0].rstrip("/") if len(typed) == 1 else ""
    if asked and asked not in files and f"{root}/".startswith(f"{asked}/"):
        root = asked
    whole = root if is_url(root) else os.path.abspath(root)  # noqa: PTH100 (URLs alike)
    run = re.sub(r"^.*://", "", whole).rstrip("/").rpartition("/")[2]
    return DigestPlace(place=place, root=root, run=run)


def stamp_of(file: str) -> Stamp | None:
    """Return what tells a trace from others of its name; None where it cannot be asked."""
    whole = None
    try:
        if is_url(file):
            size, tail = read_tail(file, _TAIL_BYTES)
        else:
            with closing(open_binary(file)) as stream:
                packed = stream.read(len(GZIP_MAGIC)) == GZIP_MAGIC
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(0, size - _TAIL_BYTES))
                tail = stream.read(_TAIL_BYTES)
                stream.seek(0)
                if not packed:
                    whole = 0
                    while piece := stream.read(PIECE_BYTES):
                        whole = isal_zlib.crc32(piece, whole)
    except (TraceError, OSError, ValueError, KeyError):
        return None
    return Stamp(bytes=size, tail=zlib.crc32(tail), whole=whole)


def _write(target: str, data: bytes, rank: int | None) -> tuple[Gap, ...]:
    """Write a digest whole or not at all; what else has its name is never replaced."""
    try:
        _check_free(target, peek_head(data, target))
        if is_url(target):
            system, path = locate(target)
            with plain_errors():
                system.makedirs(path.rpartition("/")[0], exist_ok=True)
                system.pipe_file(path, data)
        else:
            with replacing(Path(target), sync=False) as unfinished:
                unfinished.write_bytes(data)
    except TraceError as error:
        problem = error.message
    except (OSError, ImportError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = f"the digest cannot be written: {reason}"
    else:
        return ()
    code, hint = Code.DIGEST_NOT_WRITTEN, "give --digest another folder"
    return (Gap(code=code, message=problem, hint=hint, file=target, rank=rank),)


def _check_free(target: str, head: Head) -> None:
    """Refuse to replace another file, or another trace's digest."""
    try:
        with closing(open_binary(target)) as stream:
            there = stream.read(_HEAD_BYTES)
    except TraceError:
        return
    problem = "" if SIGN.match(there) else "something else has its name"
    try:
        known = None if problem else peek_head(there, target)
    except TraceError:
        return
    if known is not None and known.file != head.file:
        is_same = known.stamp and head.stamp and known.stamp.is_of(head.stamp)
        problem = "" if is_same else f"that of {known.file} has its name"
    if problem:
        raise TraceError(f"the digest is not written: {problem}", file=target)


# As readers write shapes of messages: 4096x1x8192.
_SHAPE = re.compile(r"\d{1,19}(x\d{1,19})*")
_OPERATIONS = "operations"
# By table, the columns that are kept and what each is made of.
_COLUMNS = {name: column_types(kind) for name, kind in {**TABLES, _OPERATIONS: OpTable}.items()}


class _Description(msgspec.Struct, frozen=True, kw_only=True):
    """All of a `RankTrace` or an `OpTable` that is not a column, and the sidecar."""

    format: str
    names: tuple[str, ...]
    events: int
    inflated_bytes: int
    gaps: tuple[Gap, ...]
    columns: dict[str, tuple[str, ...]]
    """By table, in the order in which they lie."""
    header: Header = Header()
    threads: tuple[Thread, ...] = ()
    groups: tuple[Group, ...] = ()
    sidecar: Sidecar | None = None
    hosts: tuple[tuple[int, str], ...] = ()


def pack_digest(
    trace: RankTrace | OpTable, *, stamp: Stamp | None = None, part: int = 0, parts: int = 1
) -> bytes:
    """Return a digest; `stamp` says of which recording, `part` which of a file's ranks."""
    head = Head(file=mask_secrets(trace.file), stamp=stamp, part=part, parts=parts, table=True)
    tables: dict[str, object] = {_OPERATIONS: trace}
    if isinstance(trace, RankTrace):
        world = trace.header.world_size
        head = replace(head, rank=trace.rank, world_size=world, table=False)
        tables = {name: getattr(trace, name) for name in TABLES}
    description = _Description(
        **{
            name: getattr(trace, name)
            for name in _Description.__struct_fields__
            if hasattr(trace, name)
        },
        columns={name: tuple(_COLUMNS[name]) for name in tables},
    )
    # Numbers of any size and text of any kind come back as they were: msgspec's JSON refuses some.
    text = json.dumps(msgspec.to_builtins(description), separators=(",", ":")).encode()
    return pack(head, text, {name: _pack_table(table, name) for name, table in tables.items()})


def _pack_table(table: object, name: str) -> NDArray[np.uint8]:
    """Return the columns of a table as bytes: by column, significance and row."""
    values = np.stack([getattr(table, column).astype("<i8") for column in _COLUMNS[name]])
    steps = np.diff(values, axis=1, prepend=0)
    by_row = steps.view(np.uint8).reshape(*steps.shape, 8)
    return np.ascontiguousarray(by_row.transpose(0, 2, 1))


def _unpack_table(content: Content, names: Sequence[str], table: str, file: str) -> dict[str, Any]:
    """Return the columns of a table; what a digest lacks is left out, and so not known.

    Columns that a later debubble added are passed over.
    """
    stored, kinds = content.tables.get(table), _COLUMNS[table]
    if stored is None or stored.shape[:-1] != (len(names), 8):
        raise damaged(file, f"its {table} are not what it says they are")
    by_row = np.ascontiguousarray(stored.transpose(0, 2, 1))
    values = by_row.view("<i8").reshape(len(names), -1).cumsum(axis=1)
    columns = {column: row for column, row in zip(names, values, strict=True) if column in kinds}
    bounds = {column: np.iinfo(kinds[column]) for column in columns}
    _check_bounds(columns, {column: (b.min, b.max) for column, b in bounds.items()}, table, file)
    return {column: row.astype(kinds[column], copy=False) for column, row in columns.items()}


def read_known(known: TraceFile, limits: Limits) -> Reading:
    """Read the rank, or the table, that a digest was made of."""
    trace = unpack_digest(inflate(known.file, limits), known.file, limits)
    if isinstance(trace, OpTable):
        return Reading(table=trace)
    return Reading(traces=(replace(trace, rank=known.rank),))


def unpack_digest(
    data: bytes, file: str = "", limits: Limits = DEFAULT_LIMITS
) -> RankTrace | OpTable:
    """Return what was packed; `file` is the digest's own name, for errors."""
    content = unpack(data, file, limits)
    try:
        description = msgspec.convert(json.loads(content.description), _Description)
    except (ValueError, RecursionError) as error:
        raise damaged(file, str(error)) from error
    names = [_OPERATIONS] if content.head.table else list(TABLES)
    tables = {
        name: _unpack_table(content, description.columns.get(name, ()), name, file)
        for name in names
    }
    if description.events < 0 or description.inflated_bytes < 0:
        raise damaged(file, "it has a negative size")
    kind = OpTable if content.head.table else RankTrace
    shared = {field.name for field in fields(kind)}.intersection(_Description.__struct_fields__)
    kept: dict[str, Any] = {name: getattr(description, name) for name in shared}
    if content.head.table:
        _check_operations(tables[_OPERATIONS], description, file)
        return OpTable(file=content.head.file, **kept, **tables[_OPERATIONS])
    for name, columns in tables.items():
        if "start_ns" not in columns:
            raise damaged(file, f"its {name} have no starts")
    made: dict[str, Any] = {
        name: build(table, len(tables[name]["start_ns"]), **tables[name])
        for name, table in TABLES.items()
    }
    trace = RankTrace(file=content.head.file, rank=content.head.rank, **kept, **made)
    _check_trace(trace, file)
    return trace


def keep_digests(file: str, reading: Reading, place: DigestPlace) -> tuple[Gap, ...]:
    """Write a digest a rank, or one of a table; what cannot be written is a gap."""
    stamp = stamp_of(file)
    if reading.table is not None:
        return _write(place.target(file), pack_digest(reading.table, stamp=stamp), None)
    gaps: tuple[Gap, ...] = ()
    parts = len(reading.traces)
    for part, trace in enumerate(reading.traces):
        data = pack_digest(trace, stamp=stamp, part=part, parts=parts)
        gaps += _write(place.target(file, trace.rank if parts > 1 else None), data, trace.rank)
    return gaps


def copy_digest(file: str, rank: int | None, place: DigestPlace, limits: Limits) -> tuple[Gap, ...]:
    """Copy a digest to another place; beside its trace it lies already."""
    if place.place == BESIDE or place.target(file) == file:
        return ()
    return _write(place.target(file), inflate(file, limits), rank)


def _check_bounds(
    columns: Mapping[str, NDArray[Any]],
    bounds: Mapping[str, tuple[int, int]],
    table: str,
    file: str,
) -> None:
    """Refuse columns with values out of bounds, such as one that points outside of a table."""
    for column, (low, high) in bounds.items():
        values = columns.get(column)
        if values is not None and len(values) and (values.min() < low or values.max() > high):
            raise damaged(file, f"{table}.{column} is out of range")


def _check_operations(
    columns: Mapping[str, NDArray[Any]], description: _Description, file: str
) -> None:
    """Refuse an op table that no reader returns."""
    missing = sorted(_COLUMNS[_OPERATIONS].keys() - columns.keys())
    if missing:
        raise damaged(file, f"it has no {', '.join(missing)}")
    if not 0 < len(columns["step"]) <= description.events:
        raise damaged(file, "it has no rows, or too many")
    bounds = {
        "name": (0, len(description.names) - 1),
        "op": (0, max(Op)),
        "duration_ns": (0, LAST_NS),
        "start_ns": (-LAST_NS, LAST_NS),
    }
    _check_bounds(columns, bounds, _OPERATIONS, file)
    order = np.lexsort((columns["start_ns"], columns["step"]))
    if any(not np.array_equal(columns[key][order], columns[key]) for key in ("step", "start_ns")):
        raise damaged(file, "its rows are out of order")


def _check_trace(trace: RankTrace, file: str) -> None:
    """Refuse what no reader returns."""
    header = trace.header
    if any(n is not None and not 0 <= n < MOST_RANKS for n in (header.rank, header.world_size)):
        raise damaged(file, "it has an absurd number of ranks")
    names = (UNKNOWN, len(trace.names) - 1)
    bounds = {
        "name": names,
        "dtype": names,
        "shape": names,
        "thread": (UNKNOWN, len(trace.threads) - 1),
        "group": (UNKNOWN, len(trace.groups) - 1),
        "launch": (UNKNOWN, len(trace.launches) - 1),
        "kernel": (UNKNOWN, len(trace.kernels) - 1),
        "kind": (0, max(KernelKind)),
        "operation": (0, max(Operation)),
        "device_type": (0, max(MemoryDevice)),
    }
    for name in TABLES:
        columns = {column: getattr(getattr(trace, name), column) for column in _COLUMNS[name]}
        _check_bounds(columns, bounds, name, file)
        starts = columns["start_ns"]
        durations = columns.get("duration_ns", np.zeros(len(starts), np.int64))
        if (
            (starts[1:] < starts[:-1]).any()
            or (durations < 0).any()
            or (starts + durations < starts).any()
        ):
            raise damaged(file, f"the times of its {name} contradict each other")
    for row in np.unique(trace.operators.shape[trace.operators.shape >= 0]).tolist():
        if not _SHAPE.fullmatch(trace.names[row]):
            raise damaged(file, f"{trace.names[row][:60]!r} is no shape")
    # Halves of characters nobody can print; file names alone may hold them.
    texts = [trace.names, trace.format, header, trace.threads, trace.groups]
    try:
        json.dumps(msgspec.to_builtins(texts), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise damaged(file, "a name in it is no text") from error
