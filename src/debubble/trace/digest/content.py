"""A rank or an op table in → its digest, and back; what is read is checked first.

The archive's checksum tells damage. The checks here are for digests that were made to mislead:
whatever comes after the readers follows indices, adds times and counts ranks without looking again.
Where digests are kept, files are written whole or not at all.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from uuid import uuid4

import msgspec
import numpy as np
from isal import isal_zlib

from debubble.errors import Code, Gap, TraceError, as_gap, mask_secrets
from debubble.trace.columns import (
    MOST_RANKS,
    UNKNOWN,
    Annotations,
    CpuOperators,
    Group,
    Header,
    KernelKind,
    Kernels,
    Launches,
    Memory,
    MemoryDevice,
    Operation,
    Operators,
    OpTable,
    RankTrace,
    Table,
    Thread,
    build,
    column_types,
)
from debubble.trace.digest.archive import (
    SIGN,
    as_json,
    check_range,
    damaged,
    from_json,
    pack,
    pack_table,
    peek_head,
    unpack,
    unpack_tables,
)
from debubble.trace.format import Head, Reading, Sidecar, Stamp, TraceFile, read_sidecar
from debubble.trace.optable import Op
from debubble.trace.optable.files import LAST_NS
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

SUFFIX = ".debubble.npz"
BESIDE = "beside"

_TAIL_BYTES = 4096
# A head with a long path is a few hundred bytes.
_HEAD_BYTES = 64 * 1024
_HINT = "give --digest another folder"


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
        folder, _, name = file.replace(os.sep, "/").rpartition("/")
        stem = strip_extensions(name.removesuffix(SUFFIX)) or name
        name = f"{stem}{SUFFIX}" if rank is None else f"{stem}.rank{rank}{SUFFIX}"
        if self.place == BESIDE:
            return _join(folder, name) if folder or not file.startswith("/") else f"/{name}"
        below = f"{folder}/".startswith(f"{self.root}/")
        inside = folder.removeprefix(self.root).strip("/") if below else ""
        return _join(self.place.rstrip("/"), self.run, inside, name)


def place_digests(place: str, typed: Sequence[str], files: Sequence[str]) -> DigestPlace:
    """Say where digests of these files go: at a place, a run is a folder with its own name."""
    if place == BESIDE:
        return DigestPlace(place=place)
    folders = [file.replace(os.sep, "/").rpartition("/")[0] for file in files]
    shared = folders[0].split("/")
    for folder in folders[1:]:
        same = [a == b for a, b in zip(shared, folder.split("/"), strict=False)]
        shared = shared[: same.index(False) if False in same else len(same)]
    root = "/".join(shared)
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


def write_digest(target: str, data: bytes) -> None:
    """Write a digest; another file or another trace's digest under that name is never replaced."""
    _check_free(target, peek_head(data, target))
    try:
        if is_url(target):
            system, path = locate(target)
            with plain_errors():
                system.makedirs(path.rpartition("/")[0], exist_ok=True)
                system.pipe_file(path, data)
        else:
            _write_file(target, data)
    except (OSError, ImportError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(
            f"the digest cannot be written: {reason}", hint=_HINT, file=target
        ) from error


def _check_free(target: str, head: Head) -> None:
    try:
        with closing(open_binary(target)) as stream:
            there = stream.read(_HEAD_BYTES)
    except TraceError:
        return
    if not SIGN.match(there):
        raise TraceError(
            "the digest is not written: something else has its name", hint=_HINT, file=target
        )
    try:
        known = peek_head(there, target)
    except TraceError:
        return
    is_same = known.stamp is not None and head.stamp is not None and known.stamp.is_of(head.stamp)
    if known.file != head.file and not is_same:
        raise TraceError(
            f"the digest is not written: that of {known.file} has its name",
            hint=_HINT,
            file=target,
        )


def _write_file(target: str, data: bytes) -> None:
    folder = os.path.dirname(target) or "."  # noqa: PTH120 (plain strings serve URLs alike)
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    unfinished = os.path.join(folder, f".{uuid4().hex}{SUFFIX}")  # noqa: PTH118
    try:
        with open(unfinished, "xb") as stream:  # noqa: PTH123
            stream.write(data)
        os.replace(unfinished, target)  # noqa: PTH105
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)  # noqa: PTH108
        raise


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)


# As readers write shapes of messages: 4096x1x8192.
_SHAPE = re.compile(r"\d{1,19}(x\d{1,19})*")
_KINDS: dict[str, type[IntEnum]] = {
    "kind": KernelKind,
    "operation": Operation,
    "device_type": MemoryDevice,
}
_TABLES: dict[str, type[Table]] = {
    "kernels": Kernels,
    "launches": Launches,
    "operators": Operators,
    "annotations": Annotations,
    "memory": Memory,
    "cpu_operators": CpuOperators,
}
_WANTED = {name: column_types(kind) for name, kind in _TABLES.items()}
_TABLE_WANTED = {"operations": column_types(OpTable)}


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
    trace: RankTrace,
    sidecar: Sidecar | None,
    *,
    stamp: Stamp | None = None,
    part: int = 0,
    parts: int = 1,
) -> bytes:
    """Return a rank's digest; `stamp` says of which recording, `part` which of a file's ranks."""
    description = _Description(
        format=trace.format,
        header=trace.header,
        names=trace.names,
        threads=trace.threads,
        groups=trace.groups,
        events=trace.events,
        inflated_bytes=trace.inflated_bytes,
        gaps=trace.gaps,
        sidecar=sidecar,
        columns={name: tuple(columns) for name, columns in _WANTED.items()},
    )
    head = Head(
        file=mask_secrets(trace.file),
        rank=trace.rank,
        world_size=trace.header.world_size,
        stamp=stamp,
        part=part,
        parts=parts,
    )
    tables = {name: pack_table(getattr(trace, name), _WANTED[name]) for name in _TABLES}
    return pack(head, as_json(description), tables)


def read_known(known: TraceFile, limits: Limits) -> Reading:
    """Read the rank, or the table, that a digest was made of."""
    if known.head is not None and known.head.table:
        return Reading(table=read_table(known.file, limits))
    trace, sidecar = read_digest(known.file, limits)
    return Reading(traces=(replace(trace, rank=known.rank),), sidecar=sidecar)


def read_digest(file: str, limits: Limits = DEFAULT_LIMITS) -> tuple[RankTrace, Sidecar | None]:
    """Read a digest from a path or URL: the trace as it was read, and what lay beside it."""
    return unpack_digest(inflate(file, limits), file, limits)


def unpack_digest(
    data: bytes, file: str = "", limits: Limits = DEFAULT_LIMITS
) -> tuple[RankTrace, Sidecar | None]:
    """Return what was packed; `file` is the digest's own name, for errors."""
    content = unpack(data, file, limits)
    if content.head.table:
        raise damaged(file, "it is that of an op table")
    description = from_json(content, _Description, file)
    tables = unpack_tables(content, description.columns, _WANTED, file)
    made = {}
    for name, kind in _TABLES.items():
        if "start_ns" not in tables[name]:
            raise damaged(file, f"{kind.__name__} has no starts")
        made[name] = build(kind, len(tables[name]["start_ns"]), **tables[name])
    trace = RankTrace(
        file=content.head.file,
        format=description.format,
        header=description.header,
        names=description.names,
        threads=description.threads,
        groups=description.groups,
        events=description.events,
        inflated_bytes=description.inflated_bytes,
        rank=content.head.rank,
        gaps=description.gaps,
        **made,  # type: ignore[arg-type]
    )
    _check_trace(trace, file)
    if description.sidecar is not None:
        _check_sidecar(description.sidecar, file)
    return trace, description.sidecar


def pack_op_table(table: OpTable, *, stamp: Stamp | None = None) -> bytes:
    """Return the digest of a table; `stamp` says of which file."""
    description = _Description(
        format=table.format,
        names=table.names,
        events=table.events,
        inflated_bytes=table.inflated_bytes,
        gaps=table.gaps,
        columns={name: tuple(columns) for name, columns in _TABLE_WANTED.items()},
        hosts=table.hosts,
    )
    head = Head(file=mask_secrets(table.file), stamp=stamp, table=True)
    rows = {name: pack_table(table, columns) for name, columns in _TABLE_WANTED.items()}
    return pack(head, as_json(description), rows)


def read_table(file: str, limits: Limits = DEFAULT_LIMITS) -> OpTable:
    """Read the digest of a table from a path or URL."""
    content = unpack(inflate(file, limits), file, limits)
    if not content.head.table:
        raise damaged(file, "it is that of a rank")
    description = from_json(content, _Description, file)
    columns = unpack_tables(content, description.columns, _TABLE_WANTED, file)["operations"]
    missing = sorted(_TABLE_WANTED["operations"].keys() - columns.keys())
    if missing:
        raise damaged(file, f"it has no {', '.join(missing)}")
    if not len(columns["step"]) or description.events < len(columns["step"]):
        raise damaged(file, "it has no rows, or too many")
    check_range(columns["name"], 0, len(description.names) - 1, file, "name")
    check_range(columns["op"], 0, max(Op), file, "op")
    check_range(columns["duration_ns"], 0, LAST_NS, file, "duration_ns")
    check_range(columns["start_ns"], -LAST_NS, LAST_NS, file, "start_ns")
    order = np.lexsort((columns["start_ns"], columns["step"]))
    if any(not np.array_equal(columns[key][order], columns[key]) for key in ("step", "start_ns")):
        raise damaged(file, "its rows are out of order")
    return OpTable(
        file=content.head.file,
        format=description.format,
        names=description.names,
        events=description.events,
        inflated_bytes=description.inflated_bytes,
        hosts=description.hosts,
        gaps=description.gaps,
        **columns,
    )


def keep_traces(file: str, traces: Sequence[RankTrace], place: DigestPlace) -> tuple[Gap, ...]:
    """Write a digest a rank; what cannot be written is a gap, and the answer goes on."""
    stamp = stamp_of(file)
    said, wrong = read_sidecar(file)
    gaps: list[Gap] = []
    for part, trace in enumerate(traces):
        whole = replace(trace, gaps=(*trace.gaps, wrong)) if wrong else trace
        data = pack_digest(whole, said, stamp=stamp, part=part, parts=len(traces))
        target = place.target(file, trace.rank if len(traces) > 1 else None)
        gaps += _write(target, data, trace.rank)
    return tuple(gaps)


def keep_table(file: str, table: OpTable, place: DigestPlace) -> tuple[Gap, ...]:
    """Write the digest of an op table."""
    return tuple(_write(place.target(file), pack_op_table(table, stamp=stamp_of(file)), None))


def copy_digest(file: str, rank: int | None, place: DigestPlace, limits: Limits) -> tuple[Gap, ...]:
    """Copy a digest to another place; beside its trace it lies already."""
    if place.place == BESIDE or place.target(file) == file:
        return ()
    return tuple(_write(place.target(file), inflate(file, limits), rank))


def _write(target: str, data: bytes, rank: int | None) -> list[Gap]:
    try:
        write_digest(target, data)
    except TraceError as error:
        return [replace(as_gap(error, code=Code.DIGEST_NOT_WRITTEN), rank=rank)]
    return []


def _check_trace(trace: RankTrace, file: str) -> None:
    """Refuse what no reader returns."""
    counts = (trace.header.rank, trace.header.world_size)
    if any(count is not None and not 0 <= count < MOST_RANKS for count in counts):
        raise damaged(file, "it has an absurd number of ranks")
    if trace.events < 0 or trace.inflated_bytes < 0:
        raise damaged(file, "it has a negative size")
    _check_texts(trace, file)
    sizes = {
        "name": len(trace.names),
        "dtype": len(trace.names),
        "shape": len(trace.names),
        "thread": len(trace.threads),
        "group": len(trace.groups),
        "launch": len(trace.launches),
        "kernel": len(trace.kernels),
    }
    for name in _TABLES:
        table: Table = getattr(trace, name)
        if len(table):
            _check_table(table, name, sizes, file)
    for row in np.unique(trace.operators.shape[trace.operators.shape >= 0]).tolist():
        if not _SHAPE.fullmatch(trace.names[row]):
            raise damaged(file, f"{trace.names[row][:60]!r} is no shape")


def _check_sidecar(sidecar: Sidecar, file: str) -> None:
    """Refuse numbers that the reader of sidecars passes over: they are divided by."""
    times = [*sidecar.steps.before_s, *sidecar.steps.profiled_s, *sidecar.steps.after_s]
    medians = (sidecar.steps.unprofiled_median_s, sidecar.steps.profiled_median_s)
    times += [time for time in medians if time is not None]
    values = [getattr(sidecar, field.name) for field in fields(sidecar)]
    counts = [value for value in values if isinstance(value, int)]
    counts += [*sidecar.held_stages, *sidecar.split, *sidecar.context_lengths]
    overhead = sidecar.steps.overhead_fraction
    is_sound = all(time > 0 and math.isfinite(time) for time in times)
    is_sound &= all(count >= 0 for count in counts)
    if not is_sound or (overhead is not None and not math.isfinite(overhead)):
        raise damaged(file, "its sidecar has absurd numbers")


def _check_table(table: Table, name: str, sizes: dict[str, int], file: str) -> None:
    for column, size in sizes.items():
        values = getattr(table, column, None)
        if values is not None:
            check_range(values, UNKNOWN, size - 1, file, f"{name}.{column}")
    for column, kind in _KINDS.items():
        values = getattr(table, column, None)
        if values is not None:
            check_range(values, 0, max(kind), file, f"{name}.{column}")
    starts = table.start_ns
    durations = getattr(table, "duration_ns", None)
    is_sound = bool((starts[1:] >= starts[:-1]).all())
    if durations is not None:
        is_sound &= int(durations.min()) >= 0 and bool((starts + durations >= starts).all())
    if not is_sound:
        raise damaged(file, f"the times of its {name} contradict each other")


def _check_texts(trace: RankTrace, file: str) -> None:
    """Refuse halves of characters, which nobody can print; file names alone may hold them."""
    header = trace.header
    texts = [*trace.names, trace.format, header.host, header.backend]
    texts += [part for thread in trace.threads for part in (thread.identity, thread.name)]
    texts += [part for group in trace.groups for part in (group.name, group.description)]
    texts += [part for group in header.groups for part in (group.name, group.description)]
    texts += [device.name for device in header.devices]
    texts += [part for pair in header.versions for part in pair]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise damaged(file, "a name in it is no text") from error
