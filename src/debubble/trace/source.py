"""Bytes of a file or URL in → inflated pieces out, whatever the file is called.

Never holds more than a piece; guards against gzip bombs; says where a damaged file ends.
"""

from __future__ import annotations

import os
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

from isal import isal_zlib

from debubble.errors import TraceError, TraceTooLarge
from debubble.trace.remote import Changed, locate, open_remote, plain_errors
from debubble.units import show_bytes

GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31

# Large enough that a call of numpy costs nothing beside its work, small enough for the cache: half
# or twice as much is slower by a tenth (benchmarks/read.py).
PIECE_BYTES = 1_500_000
_READ_BYTES = 128 * 1024
_BITE_BYTES = 64

# Each gzip member costs some 20 us, however small. Those of `bgzip` hold 64 KiB.
_MANY_MEMBERS = 10_000
_SMALL_MEMBER_BYTES = 1024

# The ratio says nothing about a small file: a few kilobytes of one repeated event are harmless.
_RATIO_APPLIES_FROM = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far a file may inflate. Traces inflate 10 to 25 times; a bomb up to 1,032 times."""

    inflated_bytes: int = 64 * 1024**3
    ratio: float = 250.0


DEFAULT_LIMITS = Limits()

# isal declares its error as an instance; it is a class.
_DAMAGED: type[Exception] = cast("type[Exception]", isal_zlib.error)


class Source:
    """One file, opened as often as asked; remembers how much came out and why it stopped."""

    def __init__(self, file: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self.file = file
        self.limits = limits
        self.compressed_bytes = 0
        self.inflated_bytes = 0
        self.damage = ""

    def pieces(self, least: int = PIECE_BYTES) -> Iterator[bytes]:
        """Yield the inflated content; afterwards `damage` says why it ended early, if it did.

        What is packed comes in pieces of at least so many bytes, but for the last.
        """
        self.compressed_bytes = self.inflated_bytes = 0
        self.damage = ""
        with closing(open_binary(self.file)) as stream:
            first = self._read(stream, len(GZIP_MAGIC))
            packed = first.startswith(GZIP_MAGIC)
            plain = self._plain(stream, first)
            yield from self._inflate(stream, first, least) if packed else plain

    def prefix(self, size: int) -> bytes:
        """Return the first inflated bytes, at least `size` of them if there are so many."""
        taken, length = [], 0
        for piece in self.pieces(size):
            taken.append(piece)
            length += len(piece)
            if length >= size:
                break
        return b"".join(taken)

    def _plain(self, stream: BinaryIO, first: bytes) -> Iterator[bytes]:
        piece = first + self._read(stream, PIECE_BYTES)
        while piece:
            self.inflated_bytes += len(piece)
            self._check_limits()
            yield piece
            piece = self._read(stream, PIECE_BYTES)

    def _inflate(self, stream: BinaryIO, first: bytes, least: int) -> Iterator[bytes]:
        """Inflate member after member; small ones are joined, so that pieces are never tiny."""
        waiting: list[bytes] = []
        size = 0
        for part in self._inflate_members(stream, first):
            waiting.append(part)
            size += len(part)
            if size >= least:
                yield b"".join(waiting)
                waiting, size = [], 0
        if waiting:
            yield b"".join(waiting)

    def _inflate_members(self, stream: BinaryIO, first: bytes) -> Iterator[bytes]:
        inflater = isal_zlib.decompressobj(wbits=_GZIP_WINDOW)
        packed = first + self._read(stream, _READ_BYTES)
        members = 1
        while packed:
            try:
                piece = inflater.decompress(packed, PIECE_BYTES)
            except _DAMAGED as error:
                yield from self._salvage()
                self.damage = f"damaged gzip data ({error})"
                return
            self.inflated_bytes += len(piece)
            self._check_limits()
            if piece:
                yield piece
            packed = inflater.unconsumed_tail
            if inflater.eof:  # a further gzip member may follow
                packed = inflater.unused_data
                if len(packed) < len(GZIP_MAGIC):
                    packed += self._read(stream, _READ_BYTES)
                if not packed.startswith(GZIP_MAGIC):
                    return
                members += 1
                if members > _MANY_MEMBERS and self.inflated_bytes < members * _SMALL_MEMBER_BYTES:
                    self.damage = "gzip data in too many too small members"
                    return
                inflater = isal_zlib.decompressobj(wbits=_GZIP_WINDOW)
            packed = packed or self._read(stream, _READ_BYTES)
        self.damage = "truncated gzip data"

    def _salvage(self) -> Iterator[bytes]:
        """Yield what lies between the last piece and the damage.

        A failing call of isal returns nothing of its input. zlib, fed in small bites, comes closer.
        """
        known = self.inflated_bytes
        reached = 0
        inflater = zlib.decompressobj(wbits=_GZIP_WINDOW)
        with closing(open_binary(self.file)) as stream:
            while bite := inflater.unconsumed_tail or self._read(stream, _BITE_BYTES):
                try:
                    piece = inflater.decompress(bite, PIECE_BYTES)
                except zlib.error:
                    return
                fresh = piece[max(0, known - reached) :]
                reached += len(piece)
                self.inflated_bytes = max(known, reached)
                self._check_limits()
                if fresh:
                    yield fresh
                if inflater.eof:
                    return

    def _read(self, stream: BinaryIO, size: int) -> bytes:
        try:
            data = stream.read(size)
        except OSError as error:
            raise _unreadable(self.file, error) from error
        self.compressed_bytes += len(data)
        return data

    def _check_limits(self) -> None:
        if self.inflated_bytes > self.limits.inflated_bytes:
            raise TraceTooLarge(
                f"inflates to more than {show_bytes(self.limits.inflated_bytes)}",
                hint="if the file is what you think it is, raise --max-inflated",
                file=self.file,
            )
        grown = self.inflated_bytes > self.limits.ratio * self.compressed_bytes
        if grown and self.inflated_bytes > _RATIO_APPLIES_FROM:
            raise TraceTooLarge(
                f"inflates more than {self.limits.ratio:.0f} times: a gzip bomb, not a trace",
                hint="if the file is what you think it is, raise --max-ratio",
                file=self.file,
            )


def is_url(file: str) -> bool:
    """Tell `s3://bucket/key` from a path on this machine."""
    scheme, separator, _ = file.partition("://")
    return bool(separator) and scheme.replace("+", "").replace("-", "").isalnum()


def size_of(file: str) -> int:
    """Return how large a file is, as far as that can be told: 0 where not."""
    try:
        if not is_url(file):
            return os.path.getsize(file)  # noqa: PTH202
        system, path = locate(file)
        with plain_errors():
            return int(system.size(path) or 0)
    except (OSError, ImportError, ValueError):
        return 0


def open_binary(file: str) -> BinaryIO:
    """Open a path or an fsspec URL for reading; say clearly when that is not possible."""
    try:
        path = locate(file)[1] if file.startswith("file://") else file
        if is_url(path):
            return open_remote(path)
        _check_is_file(path)
        return open(path, "rb")  # noqa: PTH123 (the caller closes it)
    except (OSError, ImportError, ValueError) as error:
        raise _unreadable(file, error) from error


def _check_is_file(file: str) -> None:
    """Refuse pipes and devices: opening one may wait for ever, and reading it never end."""
    mode = os.stat(file).st_mode  # noqa: PTH116 (plain strings serve paths and URLs alike)
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise TraceError(
            "cannot be read: a pipe or a device, not a file",
            hint="write it to a file first",
            file=file,
        )


@contextmanager
def local_copy(file: str) -> Iterator[str]:
    """Lend a path on this machine: the file itself, or a copy of a URL or of a gzipped file."""
    with closing(open_binary(file)) as stream:
        packed = stream.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    if not packed and not is_url(file):
        yield file
        return
    with tempfile.NamedTemporaryFile(prefix="debubble-") as copy:
        for piece in Source(file).pieces():
            copy.write(piece)
        copy.flush()
        yield copy.name


def _unreadable(file: str, error: Exception) -> TraceError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    hint = "check the path and its permissions"
    if isinstance(error, ImportError):
        hint = "pip install what opens such URLs: s3fs, gcsfs, adlfs, …"
    elif isinstance(error, Changed):
        hint = "read it again when it is written to no more"
    elif is_url(file):
        hint = "check the URL, the credentials of your environment, and the network"
    return TraceError(f"cannot be read: {reason}", hint=hint, file=file)
