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
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from debubble.errors import TraceError
from debubble.trace.columns import MOST_RANKS
from debubble.trace.format import Head, TraceFile, rank_from_name
from debubble.trace.source import Limits

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

# By name: JSON as bytes, and tables as bytes of (columns, 8, rows).
Parts = dict[str, NDArray[np.uint8]]


class Content(NamedTuple):
    """A digest, taken apart and whole by its checksum."""

    head: Head
    description: bytes
    tables: Parts


def pack(head: Head, description: bytes, tables: Parts) -> bytes:
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
            limits.check(sum(member.file_size for member in members), len(data), file)
            parts = {
                member.filename.removesuffix(".npy"): _read_array(archive.read(member))
                for member in members[1:]
            }
        if checksum(sealed["head"], parts) != sealed["checksum"]:
            raise damaged(file, "its checksum differs")
        return Content(head, parts.pop(_DESCRIPTION).tobytes(), parts)
    except _DAMAGE as error:
        raise damaged(file, str(error)) from error


def recognise(file: str, prefix: bytes) -> TraceFile | None:
    """Tell a digest by its head, which also says whose trace it is of."""
    if not SIGN.match(prefix):
        return None
    head = peek_head(prefix, file)
    known = TraceFile(file=file, format=NAME, world_size=head.world_size, head=head)
    rank = rank_from_name(known.named) if head.rank is None else head.rank
    return known if head.table else replace(known, rank=rank)


def damaged(file: str, why: str) -> TraceError:
    """Say that a digest cannot be used."""
    return TraceError(
        f"is a damaged digest: {why}", hint="make it again from its trace, with --digest", file=file
    )


def peek_head(prefix: bytes, file: str) -> Head:
    """Return the head out of the first bytes of a digest."""
    return _open_head(prefix, file)[0]


def _open_head(prefix: bytes, file: str) -> tuple[Head, dict[str, Any]]:
    """Return the head, and what it lies in, with fields that a later version may have added."""
    if not SIGN.match(prefix):
        raise TraceError("is no digest", hint="make one with --digest", file=file)
    try:
        *_, crc, _, _, name, extra = _LOCAL_HEADER.unpack_from(prefix)
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        first = inflater.decompress(prefix[_LOCAL_HEADER.size + name + extra :], len(prefix))
        if not inflater.eof or zlib.crc32(first) != crc:
            raise ValueError("its head is cut off or changed")
        sealed = msgspec.convert(json.loads(_read_array(first).tobytes()), dict[str, Any])
        family, _, version = str(sealed.get("schema")).partition("/")
        if family != _FAMILY or not version.isdigit():
            raise ValueError(f"its schema is {sealed.get('schema')!r}")
        if version != _VERSION:
            raise TraceError(
                f"is a digest of version {version}; this debubble reads version {_VERSION}",
                hint="make it again from its trace, or read it with the debubble that wrote it",
                file=file,
            )
        head = msgspec.convert(sealed["head"], Head)
    except _DAMAGE as error:
        raise damaged(file, str(error)) from error
    counts = (head.rank, head.world_size)
    if any(count is not None and not 0 <= count < MOST_RANKS for count in counts):
        raise damaged(file, "it has an absurd number of ranks")
    if not 0 <= head.part < head.parts:
        raise damaged(file, "it is of no part of its trace")
    return head, sealed


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
