"""Tables in → one archive of columns, and back.

    debubble_digest.npy   the head, not deflated: a look at the beginning tells rank and trace
    description.npy       JSON: all that is no column, and how each column lies in the next
    columns.npy           column after column, byte plane after byte plane

All that numpy reads of it are arrays of bytes; nothing is ever unpickled. Times grow by little from
row to row, so differences are often smaller than the values themselves; bytes of one significance
lie together, because they resemble each other.
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
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from debubble.errors import TraceError, TraceTooLarge
from debubble.trace.columns import I64, MOST_RANKS
from debubble.trace.format import Head, TraceFile, rank_from_name
from debubble.trace.source import Limits
from debubble.units import show_bytes

NAME = "digest"
SCHEMA = "debubble.digest/1"
_FAMILY, _, _VERSION = SCHEMA.partition("/")

_LOCAL = struct.Struct("<4s5H3I2H")
_HEAD_NAME = "debubble_digest.npy"
SIGN = re.compile(
    rb"\APK\x03\x04.{%d}%b" % (_LOCAL.size - 4, re.escape(_HEAD_NAME.encode())), re.DOTALL
)
_MEMBERS = (_HEAD_NAME, "description.npy", "columns.npy")
_NPY_MAGIC = b"\x93NUMPY\x01\x00"
_NPY_LENGTH = slice(8, 10)
# Level 9 saves a hundredth and takes twice as long.
_LEVEL = 6
# The ratio says nothing about a small file; a megabyte of constant columns is harmless.
_RATIO_APPLIES_FROM = 16 * 1024 * 1024
_EPOCH = (1980, 1, 1, 0, 0, 0)
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    NotImplementedError,
    RuntimeError,
    EOFError,
    OSError,
    ValueError,
    KeyError,
)

_WRAP = 2**64
_WIDEST = 8
# The quickest level is enough to tell which of two codings is the smaller.
_TRIAL_LEVEL = 0

Columns = dict[str, NDArray[Any]]
# By table and column, the type of its values.
Wanted = Mapping[str, Mapping[str, type[np.integer[Any]]]]
_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A digest, taken apart."""

    head: Head
    description: bytes
    columns: memoryview


class _SealedHead(msgspec.Struct, frozen=True, kw_only=True):
    """The head as it lies in the file, with fields that a later version may have added."""

    schema: str
    head: dict[str, Any]
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """How one column lies in the bytes: each value is `low` more than what is stored of it."""

    how: Literal["plain", "steps"]
    """The values themselves, or how far each is from the one before; the first counts from base."""
    width: int
    """Bytes a value, 1 to 8; never 0, so that no few bytes stand for many rows."""
    low: int = 0
    base: int = 0


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A table in the bytes: its columns lie one after the other, in this order."""

    rows: int
    columns: dict[str, Plane]


def pack(head: Head, description: bytes, columns: bytes) -> bytes:
    """Return the file's bytes: the same content gives the same bytes."""
    said = msgspec.to_builtins(head)
    sealed = _SealedHead(schema=SCHEMA, head=said, checksum=_checksum(said, description, columns))
    first = json.dumps(msgspec.to_builtins(sealed)).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive:
        for name, data in zip(_MEMBERS, (first, description, columns), strict=True):
            member = zipfile.ZipInfo(name, _EPOCH)
            stored = name == _HEAD_NAME
            member.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
            archive.writestr(member, _npy_header(len(data)) + data)
    return out.getvalue()


def unpack(data: bytes, file: str, limits: Limits) -> Content:
    """Take a digest apart and check it; raises `TraceError` for anything but a whole one."""
    head, sealed = _open_head(data, file)
    try:
        description, columns = _inflate(data, file, limits)
    except _DAMAGE as error:
        raise damaged(file, str(error)) from error
    if _checksum(sealed.head, description, columns) != sealed.checksum:
        raise damaged(file, "its checksum differs")
    return Content(head=head, description=bytes(description), columns=columns)


def looks_like_digest(prefix: bytes) -> bool:
    """Tell a digest of any version by its first bytes."""
    return SIGN.match(prefix) is not None


def recognise(file: str, prefix: bytes) -> TraceFile | None:
    """Tell a digest by its head, which also says whose trace it is of."""
    if not looks_like_digest(prefix):
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
    if not looks_like_digest(data):
        raise TraceError("is no digest", hint="make one with --digest", file=file)
    try:
        _, _, flags, method, _, _, crc, size, whole, name, extra = _LOCAL.unpack_from(data)
        first = data[_LOCAL.size + name + extra :][:size]
        if flags or method != zipfile.ZIP_STORED or size != whole or zlib.crc32(first) != crc:
            raise ValueError("its head is cut off or changed")
        fields = json.loads(bytes(_strip_npy(memoryview(first))))
        _check_version(fields, file)
        sealed = msgspec.convert(fields, _SealedHead)
        head = msgspec.convert(sealed.head, Head)
    except (*_DAMAGE, RecursionError, msgspec.ValidationError) as error:
        raise damaged(file, str(error)) from error
    counts = (head.rank, head.world_size)
    if any(count is not None and not 0 <= count < MOST_RANKS for count in counts):
        raise damaged(file, "it has an absurd number of ranks")
    if not 0 <= head.part < head.parts:
        raise damaged(file, "it is of no part of its trace")
    return head, sealed


def _check_version(fields: object, file: str) -> None:
    schema = fields.get("schema") if isinstance(fields, dict) else None
    if schema == SCHEMA:
        return
    family, _, version = str(schema).partition("/")
    if family == _FAMILY and version.isdigit():
        raise TraceError(
            f"is a digest of version {version}; this debubble reads version {_VERSION}",
            hint="read it with the debubble that wrote it, or install a newer one",
            file=file,
        )
    raise damaged(file, f"its schema is {schema!r}")


def _inflate(data: bytes, file: str, limits: Limits) -> tuple[memoryview, memoryview]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [archive.getinfo(name) for name in _MEMBERS[1:]]
        size = sum(member.file_size for member in members)
        if size > limits.inflated_bytes:
            raise TraceTooLarge(
                f"inflates to more than {show_bytes(limits.inflated_bytes)}",
                hint="if the file is what you think it is, raise --max-inflated",
                file=file,
            )
        if size > max(_RATIO_APPLIES_FROM, limits.ratio * len(data)):
            raise TraceTooLarge(
                f"inflates more than {limits.ratio:.0f} times: a zip bomb, not a digest",
                hint="if the file is what you think it is, raise --max-ratio",
                file=file,
            )
        description, columns = (_strip_npy(memoryview(archive.read(part))) for part in members)
    return description, columns


def _checksum(
    head: Mapping[str, Any], description: bytes | memoryview, columns: bytes | memoryview
) -> str:
    whole = hashlib.blake2b(json.dumps(head).encode(), digest_size=16)
    whole.update(len(description).to_bytes(8, "little"))
    whole.update(description)
    whole.update(columns)
    return whole.hexdigest()


def _npy_header(size: int) -> bytes:
    header = io.BytesIO()
    fields = {"descr": "|u1", "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(header, fields)
    return header.getvalue()


def _strip_npy(data: memoryview) -> memoryview:
    """Return what follows numpy's header, which says no more than the length."""
    if data[: len(_NPY_MAGIC)] != _NPY_MAGIC:
        raise ValueError("a part of it is no array")
    length = int.from_bytes(data[_NPY_LENGTH], "little")
    return data[_NPY_LENGTH.stop + length :]


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
    layouts: Mapping[str, Layout], data: memoryview, wanted: Wanted, file: str
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
                if kind is not np.int64:
                    bounds = np.iinfo(kind)
                    check_range(values, bounds.min, bounds.max, file, f"{name}.{column}")
                tables[name][column] = values.astype(kind, copy=False)
            at += size
    if at != len(data):
        raise damaged(file, "more columns than it names")
    return tables


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


def pack_column(values: NDArray[np.integer]) -> tuple[Plane, bytes]:
    """Return how a column is coded, and its bytes: whichever coding deflates better."""
    wide = values.astype(np.int64)
    if not len(wide):
        return Plane(how="plain", width=1), b""
    plain = _pack("plain", wide, 0)
    if int(wide.min()) == int(wide.max()):
        return plain
    steps = np.diff(wide, prepend=wide[:1])
    choices = (plain, _pack("steps", steps, int(wide[0])))
    return min(choices, key=lambda packed: len(isal_zlib.compress(packed[1], _TRIAL_LEVEL)))


def _pack(how: Literal["plain", "steps"], wide: I64, base: int) -> tuple[Plane, bytes]:
    low = int(wide.min())
    width = max(1, ((int(wide.max()) - low).bit_length() + 7) // 8)
    above = wide.view(np.uint64) - np.uint64(low % _WRAP)
    planes = above.astype("<u8").view(np.uint8).reshape(-1, _WIDEST)[:, :width]
    return Plane(how=how, width=width, low=low, base=base), planes.T.tobytes()


def unpack_column(plane: Plane, data: memoryview, rows: int) -> I64:
    """Return the column; `data` has `width` bytes a row."""
    planes = np.frombuffer(data, np.uint8).reshape(plane.width, rows)
    whole = 1 << (plane.width - 1).bit_length()
    values = planes[0]
    if whole > 1:
        padded = np.zeros((rows, whole), np.uint8)
        padded[:, : plane.width] = planes.T
        values = padded.view(f"<u{whole}").reshape(rows)
    above = values.astype(np.uint64)
    above += np.uint64(plane.low % _WRAP)
    if plane.how == "steps":
        np.cumsum(above, out=above)
        above += np.uint64(plane.base % _WRAP)
    column: I64 = above.view(np.int64)
    return column
