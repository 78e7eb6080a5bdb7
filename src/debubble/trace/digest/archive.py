"""Tables in → one `.npz` archive, and back.

    debubble_digest   JSON, first: a look at the beginning tells the version, and whose trace it is
    description       JSON: all that is no column, and the names of the columns
    kernels, …        a table: (columns, 8, rows), the bytes of differences from row to row

All that numpy reads of it are arrays of bytes; nothing is ever unpickled. Times grow by little, so
differences deflate better than values; bytes of one significance resemble each other.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from debubble.errors import TraceError, TraceTooLarge
from debubble.trace.columns import MOST_RANKS
from debubble.trace.format import Head, TraceFile, rank_from_name
from debubble.trace.source import RATIO_APPLIES_FROM_BYTES, Limits
from debubble.units import show_bytes

NAME = "digest"
SCHEMA = "debubble.digest/2"
_FAMILY, _, _VERSION = SCHEMA.partition("/")

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_HEAD, _DESCRIPTION = "debubble_digest", "description"
SIGN = re.compile(
    rb"\APK\x03\x04.{%d}%b\.npy" % (_LOCAL_HEADER.size - 4, _HEAD.encode()), re.DOTALL
)
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError, EOFError,
    OSError, ValueError, KeyError, RecursionError,
)  # fmt: skip

# By table, the columns that it holds as int64.
Columns = Mapping[str, Mapping[str, NDArray[np.integer[Any]]]]
# By table and column, the type of its values.
Wanted = Mapping[str, Mapping[str, type[np.integer[Any]]]]
_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A digest, taken apart."""

    head: Head
    description: bytes
    tables: Mapping[str, NDArray[np.uint8]]


class _SealedHead(msgspec.Struct, frozen=True, kw_only=True):
    """The head as it lies in the file, with fields that a later version may have added."""

    schema: str
    head: dict[str, Any]
    checksum: str


def pack(head: Head, description: bytes, tables: Mapping[str, NDArray[np.uint8]]) -> bytes:
    """Return the file's bytes: the same content gives the same bytes."""
    parts = {_DESCRIPTION: np.frombuffer(description, np.uint8), **tables}
    fields = msgspec.to_builtins(head)
    sealed = {"schema": SCHEMA, "head": fields, "checksum": checksum(fields, parts)}
    first = np.frombuffer(json.dumps(sealed).encode(), np.uint8)
    archive = io.BytesIO()
    np.savez_compressed(archive, allow_pickle=False, **{_HEAD: first, **parts})
    return archive.getvalue()


def unpack(data: bytes, file: str, limits: Limits) -> Content:
    """Take a digest apart and check it; raises `TraceError` for anything but a whole one."""
    head, sealed = _open_head(data, file)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            _check_size(sum(member.file_size for member in members), len(data), file, limits)
            parts = {
                member.filename.removesuffix(".npy"): _read_array(archive.read(member))
                for member in members[1:]
            }
        if checksum(sealed.head, parts) != sealed.checksum:
            raise damaged(file, "its checksum differs")
        description = parts.pop(_DESCRIPTION).tobytes()
    except _DAMAGE as error:
        raise damaged(file, str(error)) from error
    return Content(head=head, description=description, tables=parts)


def recognise(file: str, prefix: bytes) -> TraceFile | None:
    """Tell a digest by its head, which also says whose trace it is of."""
    if not SIGN.match(prefix):
        return None
    head = peek_head(prefix, file)
    known = TraceFile(file=file, format=NAME, world_size=head.world_size, head=head)
    rank = rank_from_name(known.named) if head.rank is None else head.rank
    return known if head.table else replace(known, rank=rank)


def peek_head(prefix: bytes, file: str) -> Head:
    """Return the head out of the first bytes of a digest."""
    return _open_head(prefix, file)[0]


def damaged(file: str, why: str) -> TraceError:
    """Say that a digest cannot be used."""
    return TraceError(
        f"is a damaged digest: {why}", hint="make it again from its trace, with --digest", file=file
    )


def _open_head(data: bytes, file: str) -> tuple[Head, _SealedHead]:
    if not SIGN.match(data):
        raise TraceError("is no digest", hint="make one with --digest", file=file)
    try:
        *_, crc, _, _, name, extra = _LOCAL_HEADER.unpack_from(data)
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        first = inflater.decompress(data[_LOCAL_HEADER.size + name + extra :], len(data))
        if not inflater.eof or zlib.crc32(first) != crc:
            raise ValueError("its head is cut off or changed")
        fields = json.loads(_read_array(first).tobytes())
        _check_version(fields, file)
        sealed = msgspec.convert(fields, _SealedHead)
        head = msgspec.convert(sealed.head, Head)
    except _DAMAGE as error:
        raise damaged(file, str(error)) from error
    counts = (head.rank, head.world_size)
    if any(count is not None and not 0 <= count < MOST_RANKS for count in counts):
        raise damaged(file, "it has an absurd number of ranks")
    if not 0 <= head.part < head.parts:
        raise damaged(file, "it is of no part of its trace")
    return head, sealed


def _check_version(fields: object, file: str) -> None:
    schema = fields.get("schema") if isinstance(fields, dict) else None
    family, _, version = str(schema).partition("/")
    if family != _FAMILY or not version.isdigit():
        raise damaged(file, f"its schema is {schema!r}")
    if version != _VERSION:
        raise TraceError(
            f"is a digest of version {version}; this debubble reads version {_VERSION}",
            hint="make it again from its trace, or read it with the debubble that wrote it",
            file=file,
        )


def _check_size(inflated: int, packed: int, file: str, limits: Limits) -> None:
    if inflated > limits.inflated_bytes:
        raise TraceTooLarge(
            f"inflates to more than {show_bytes(limits.inflated_bytes)}",
            hint="if the file is what you think it is, raise --max-inflated",
            file=file,
        )
    if inflated > max(RATIO_APPLIES_FROM_BYTES, limits.ratio * packed):
        raise TraceTooLarge(
            f"inflates more than {limits.ratio:.0f} times: a zip bomb, not a digest",
            hint="if the file is what you think it is, say how large with --max-inflated",
            file=file,
        )


def _read_array(member: bytes) -> NDArray[np.uint8]:
    """Read an array of bytes; unlike numpy's reader, never believe how many there should be."""
    stream = io.BytesIO(member)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("a part of it is no array")
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype != np.uint8:
        raise ValueError("a part of it does not hold bytes")
    return np.frombuffer(member, np.uint8, offset=stream.tell()).reshape(shape)


def checksum(head: Mapping[str, Any], parts: Mapping[str, NDArray[np.uint8]]) -> str:
    """Return the hash of a head, and of the names, shapes and bytes of all parts."""
    whole = hashlib.blake2b(json.dumps(head).encode(), digest_size=16)
    for name, values in parts.items():
        whole.update(f"{name} {values.shape}".encode("utf-8", "replace"))
        whole.update(values.tobytes())
    return whole.hexdigest()


def pack_table(table: object, columns: Mapping[str, object]) -> NDArray[np.uint8]:
    """Return the columns of a table as bytes: by column, significance and row."""
    values = np.stack([getattr(table, column).astype("<i8") for column in columns])
    steps = np.diff(values, axis=1, prepend=0)
    by_row = steps.view(np.uint8).reshape(*steps.shape, 8)
    return np.ascontiguousarray(by_row.transpose(0, 2, 1))


def unpack_tables(
    content: Content, columns: Mapping[str, tuple[str, ...]], wanted: Wanted, file: str
) -> dict[str, dict[str, Any]]:
    """Return the wanted columns in their types; what a digest lacks is left out, and so not known.

    Columns that a later debubble added are passed over.
    """
    tables: dict[str, dict[str, Any]] = {}
    for name, kinds in wanted.items():
        stored, names = content.tables.get(name), columns.get(name, ())
        if stored is None or stored.shape[:-1] != (len(names), 8):
            raise damaged(file, f"its {name} are not what it says they are")
        by_row = np.ascontiguousarray(stored.transpose(0, 2, 1))
        values = by_row.view("<i8").reshape(len(names), -1).cumsum(axis=1)
        tables[name] = {}
        for column, row in zip(names, values, strict=True):
            if column in kinds:
                bounds = np.iinfo(kinds[column])
                check_range(row, bounds.min, bounds.max, file, f"{name}.{column}")
                tables[name][column] = row.astype(kinds[column], copy=False)
    return tables


def check_range(values: NDArray[Any], low: int, high: int, file: str, what: str) -> None:
    """Refuse a column that points outside of what it points into."""
    if len(values) and (int(values.min()) < low or int(values.max()) > high):
        raise damaged(file, f"{what} is out of range")


def as_json(description: object) -> bytes:
    """Write what is no column; numbers of any size and text of any kind come back as they were."""
    return json.dumps(msgspec.to_builtins(description), separators=(",", ":")).encode()


def from_json(content: Content, kind: type[_Kind], file: str) -> _Kind:
    """Read it again, every field of the type it should have."""
    try:
        return msgspec.convert(json.loads(content.description), kind)
    except (ValueError, RecursionError) as error:
        raise damaged(file, str(error)) from error
