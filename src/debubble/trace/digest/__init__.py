"""Traces in → a `.npz` of half a percent of their size → the same traces out.

    debubble_digest   JSON: which file it is the digest of, and all that is no column
    0.kernels, …      a table of the first trace: by column, its differences from row to row

Nothing is ever unpickled. The archive's checksums tell damage; what leads outside of its table is
refused, since whatever comes after the readers follows indices without looking again.
"""

from __future__ import annotations

import io
import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

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
from debubble.trace.format import Format, Reading, Stamp, TraceFile, rank_from_name
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

NAME = "digest"
SUFFIX = ".debubble.npz"
BESIDE = "beside"
SCHEMA = "debubble.digest/3"

_TAIL_BYTES = 4096
_ABOUT, _OPERATIONS = "debubble_digest", "operations"
_SIGN = re.compile(rb"\APK\x03\x04.{26}%b\.npy" % _ABOUT.encode(), re.DOTALL)
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError, EOFError,
    OSError, ValueError, KeyError, MemoryError,
)  # fmt: skip
# By table, the columns that are kept and what each is made of.
_COLUMNS = {name: column_types(kind) for name, kind in {**TABLES, _OPERATIONS: OpTable}.items()}
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """All of a trace or a table that is not a column."""

    format: str
    names: tuple[str, ...]
    events: _Count
    inflated_bytes: _Count
    gaps: tuple[Gap, ...]
    columns: dict[str, tuple[str, ...]]
    """By table, in the order in which they lie."""
    rank: _Rank | None = None
    header: Header = Header()
    threads: tuple[Thread, ...] = ()
    groups: tuple[Group, ...] = ()
    sidecar: Sidecar | None = None
    hosts: tuple[tuple[int, str], ...] = ()


_KEPT = {
    kind: {f.name for f in fields(kind) if f.name not in column_types(kind)}.intersection(
        _Part.__struct_fields__
    )
    for kind in (RankTrace, OpTable)
}


class _About(msgspec.Struct, frozen=True, kw_only=True):
    """What a digest is of."""

    schema: str
    file: str
    """The trace, as it was named when it was read."""
    stamp: Stamp | None
    parts: tuple[_Part, ...]
    """One for each rank of the file; a table holds all its ranks."""


def pack_digest(*traces: RankTrace | OpTable, stamp: Stamp | None = None) -> bytes:
    """Return the digest of all that is in a file: the same content gives the same bytes."""
    parts, tables = [], {}
    for number, trace in enumerate(traces):
        held: dict[str, object] = {_OPERATIONS: trace}
        if isinstance(trace, RankTrace):
            held = {name: getattr(trace, name) for name in TABLES}
        for name, table in held.items():
            columns = [getattr(table, column).astype(np.int64) for column in _COLUMNS[name]]
            tables[f"{number}.{name}"] = np.diff(np.stack(columns), axis=1, prepend=0)
        kept = {name: getattr(trace, name) for name in _KEPT[type(trace)]}
        parts.append(_Part(**kept, columns={name: tuple(_COLUMNS[name]) for name in held}))
    file = mask_secrets(traces[0].file)
    about = _About(schema=SCHEMA, file=file, stamp=stamp, parts=tuple(parts))
    # Numbers of any size and text of any kind come back as they were: msgspec's JSON refuses some.
    text = json.dumps(msgspec.to_builtins(about), separators=(",", ":")).encode()
    archive = io.BytesIO()
    first = {_ABOUT: np.frombuffer(text, np.uint8)}
    np.savez_compressed(archive, allow_pickle=False, **first, **tables)
    return archive.getvalue()


def unpack_digest(
    data: bytes, file: str = "", limits: Limits = DEFAULT_LIMITS
) -> tuple[RankTrace | OpTable, ...]:
    """Return what was packed; `file` is the digest's own name, for errors."""
    with _opened(data, file, limits) as (about, tables):
        parts = enumerate(about.parts)
        return tuple(_unpack(tables, about.file, number, part) for number, part in parts)


@contextmanager
def _opened(
    data: bytes, file: str, limits: Limits = DEFAULT_LIMITS
) -> Iterator[tuple[_About, zipfile.ZipFile]]:
    """Lend what a digest is of, and its tables; whatever is wrong with it is a `TraceError`."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            limits.check(sum(m.file_size for m in archive.infolist()), len(data), file)
            said = json.loads(_array(archive, _ABOUT).astype(np.uint8).tobytes())
            if said["schema"] != SCHEMA:
                raise TraceError(
                    f"is a digest of another version ({said['schema']}); "
                    f"this debubble reads {SCHEMA}",
                    hint="make it again from its trace, or read it with the debubble that wrote it",
                    file=file,
                )
            yield msgspec.convert(said, _About), archive
    except _DAMAGE as error:
        raise TraceError(
            f"is a damaged digest: {str(error)[:100]}",
            hint="make it again from its trace, with --digest",
            file=file,
        ) from error


def _array(archive: zipfile.ZipFile, name: str) -> NDArray[np.int64]:
    """Read a member, whole by its checksum before numpy looks at it."""
    member = io.BytesIO(archive.read(f"{name}.npy"))
    values: NDArray[np.int64] = np.lib.format.read_array(member, allow_pickle=False)
    return values


def _unpack(archive: zipfile.ZipFile, file: str, number: int, part: _Part) -> RankTrace | OpTable:
    """Make one trace of its tables; raises `ValueError` for what no reader returns."""
    tables: dict[str, dict[str, NDArray[Any]]] = {}
    for name, spelled in part.columns.items():
        values = _array(archive, f"{number}.{name}").cumsum(axis=1)
        tables[name] = {
            column: row.astype(_COLUMNS[name][column], copy=False)
            for column, row in zip(spelled, values, strict=True)
        }
    sizes = {name: len(columns["start_ns"]) for name, columns in tables.items()}
    bounds = {
        **dict.fromkeys(("name", "dtype", "shape"), (UNKNOWN, len(part.names) - 1)),
        "thread": (UNKNOWN, len(part.threads) - 1),
        "group": (UNKNOWN, len(part.groups) - 1),
        "launch": (UNKNOWN, sizes.get("launches", 0) - 1),
        "kernel": (UNKNOWN, sizes.get("kernels", 0) - 1),
        "kind": (0, max(KernelKind)),
        "operation": (0, max(Operation)),
        "device_type": (0, max(MemoryDevice)),
        "op": (0, max(Op)),
        "duration_ns": (0, 2 * LAST_NS),
        "start_ns": (-2 * LAST_NS, 2 * LAST_NS),
    }
    for name, columns in tables.items():
        for column, (low, high) in bounds.items():
            values = columns.get(column, np.zeros(0))
            if len(values) and (values.min() < low or values.max() > high):
                raise ValueError(f"{name}.{column} is out of range")
        if name in TABLES and (np.diff(columns["start_ns"]) < 0).any():
            raise ValueError(f"its {name} are out of order")
    kind = OpTable if _OPERATIONS in tables else RankTrace
    kept: dict[str, Any] = {name: getattr(part, name) for name in _KEPT[kind]}
    if kind is OpTable:
        kept |= tables[_OPERATIONS]
    else:
        kept |= {name: build(table, sizes[name], **tables[name]) for name, table in TABLES.items()}
    return kind(file=file, **kept)


def recognise(file: str, prefix: bytes) -> TraceFile | None:
    """Tell a digest by its first member, which also says whose trace it is of."""
    if not _SIGN.match(prefix):
        return None
    with _opened(inflate(file, DEFAULT_LIMITS), file) as (about, _):
        pass
    whose = TraceFile(file=file, format=NAME, digest_of=about.file, stamp=about.stamp)
    if len(about.parts) != 1 or _OPERATIONS in about.parts[0].columns:
        return whose
    (part,) = about.parts
    rank = rank_from_name(whose.named) if part.rank is None else part.rank
    return replace(whose, rank=rank, world_size=part.header.world_size)


def read(known: TraceFile, limits: Limits) -> Reading:
    """Read what a digest was made of."""
    traces = unpack_digest(inflate(known.file, limits), known.file, limits)
    tables = [trace for trace in traces if isinstance(trace, OpTable)]
    ranks = [trace for trace in traces if isinstance(trace, RankTrace)]
    if len(ranks) == 1:
        ranks = [replace(ranks[0], rank=known.rank)]
    return Reading(traces=tuple(ranks), table=tables[0] if tables else None)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestPlace:
    """Where the digests of a run go: beside its traces, or below a folder or URL."""

    place: str
    root: str = ""
    """The folder of the run: below it, paths are kept as they are."""
    run: str = ""
    """What the run's own folder is called at the place."""

    def target(self, file: str) -> str:
        """Return the name of the digest of a file."""
        folder, slash, name = file.replace(os.sep, "/").rpartition("/")
        name = (strip_extensions(name.removesuffix(SUFFIX)) or name) + SUFFIX
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


def keep_digest(known: TraceFile, reading: Reading, place: DigestPlace) -> tuple[Gap, ...]:
    """Write the digest of a file, whole or not at all; a gap says where it cannot be.

    What else has its name is never replaced, nor the digest of another trace.
    """
    target = place.target(known.file)
    held: list[RankTrace | OpTable] = [*reading.traces]
    held += [reading.table] if reading.table else []
    if not held or target == known.file or (known.digest_of and place.place == BESIDE):
        return ()
    stamp = known.stamp or stamp_of(known.file)
    try:
        with closing(open_binary(target)) as stream:
            there = recognise(target, stream.read(_TAIL_BYTES))
        problem = "" if there else "something else has its name"
        if there and there.digest_of != mask_secrets(held[0].file) and there.stamp != stamp:
            problem = f"that of {there.digest_of} has its name"
    except TraceError:  # nothing is there, or nothing whole
        problem = ""
    if not problem:
        problem = _write(target, pack_digest(*held, stamp=stamp))
    if not problem:
        return ()
    gap = Gap(
        code=Code.DIGEST_NOT_WRITTEN,
        message=f"the digest is not written: {problem}",
        hint="give --digest another folder",
        file=target,
        rank=known.rank,
    )
    return (gap,)


def _write(target: str, data: bytes) -> str:
    """Write a file or an object; return what is in the way, if something is."""
    try:
        if is_url(target):
            system, path = locate(target)
            with plain_errors():
                system.makedirs(path.rpartition("/")[0], exist_ok=True)
                system.pipe_file(path, data)
        else:
            with replacing(Path(target), sync=False) as unfinished:
                unfinished.write_bytes(data)
    except (OSError, ImportError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


FORMAT = Format(
    name=NAME,
    position=40,
    in_names=(SUFFIX,),
    recognise=recognise,
    read=read,
)
