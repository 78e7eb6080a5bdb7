"""A path or URL in → its bytes, inflated piece by piece, within limits.

Never holds more than a piece; guards against gzip bombs; says where a damaged file ends. Whatever a
stranger's file system raises comes out as an `OSError` with a reason in it. What the user typed
(a file, a folder, a glob, a URL) is turned into files by `expand`.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, TypeVar, cast

from isal import isal_zlib

from debubble.errors import RunNotFound, TraceError, TraceTooLarge
from debubble.units import show_bytes

GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31

# Large enough that a call of numpy costs nothing beside its work, small enough for the cache: half
# or twice as much is slower by a tenth (benchmarks/read.py).
PIECE_BYTES = 1_500_000
# Of a damaged file so much is lost with what is damaged: a failing call returns none of its input.
_READ_BYTES = 16 * 1024

# Each gzip member costs some 20 us, however small. Those of `bgzip` hold 64 KiB.
_MANY_MEMBERS = 10_000
_SMALL_MEMBER_BYTES = 1024

# The ratio says nothing about a small file: a few kilobytes of one repeated event are harmless.
# What is kept of events takes up to seven times their text.
RATIO_APPLIES_FROM_BYTES = 16 * 1024 * 1024

# Enough for what a file is and whose; then twice as much each time, up to what costs no memory
# and hides the tens of milliseconds that each request takes.
_FIRST_BYTES = 128 * 1024
_MOST_BYTES = 8 * 1024 * 1024

# Requests at once, where each takes tens of milliseconds and next to no work.
_REQUESTS = 16

# What is held whole, once as it lies there and once as it is read; tables take more, and less fits.
HELD_BYTES = 2 * 1024**3

_GLOB_SIGNS = frozenset("*?[")
_EXTENSIONS = re.compile(
    r"(?:\.pt)?(?:\.trace)?(?:\.(?:json|gz|sqlite|csv|jsonl|parquet))*(?:\.debubble\.npz)?$"
)

# isal declares its error as an instance; it is a class.
_DAMAGED: type[Exception] = cast("type[Exception]", isal_zlib.error)

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far a file may inflate. Traces inflate 10 to 25 times; a bomb up to 1,032 times."""

    inflated_bytes: int = 64 * 1024**3
    ratio: float = 250.0

    def check(self, inflated: int, packed: int, file: str) -> None:
        """Refuse what inflates beyond them."""
        if inflated > self.inflated_bytes:
            raise TraceTooLarge(
                f"inflates to more than {show_bytes(self.inflated_bytes)}",
                hint="if the file is what you think it is, unpack it",
                file=file,
            )
        if inflated > max(RATIO_APPLIES_FROM_BYTES, self.ratio * packed):
            raise TraceTooLarge(
                f"inflates more than {self.ratio:.0f} times: a bomb, not a trace",
                hint="if the file is what you think it is, unpack it",
                file=file,
            )


DEFAULT_LIMITS = Limits()


class Source:
    """One file, opened as often as asked; remembers how much came out and why it stopped.

    `text` is what to read in place of the file: it was made of it, and is as it is.
    """

    def __init__(
        self, file: str, limits: Limits = DEFAULT_LIMITS, text: bytes | None = None
    ) -> None:
        self.file = file
        self.limits = limits
        self.text = text
        self.compressed_bytes = 0
        self.inflated_bytes = 0
        self.damage = ""

    def pieces(self, least: int = PIECE_BYTES) -> Iterator[bytes]:
        """Yield the inflated content; afterwards `damage` says why it ended early, if it did.

        What is packed comes in pieces of at least so many bytes, but for the last.
        """
        self.compressed_bytes = self.inflated_bytes = 0
        self.damage = ""
        if self.text is not None:
            self.inflated_bytes = len(self.text)
            for start in range(0, len(self.text), PIECE_BYTES):
                yield self.text[start : start + PIECE_BYTES]
            return
        with closing(open_binary(self.file)) as stream:
            first = self._read(stream, len(GZIP_MAGIC))
            if first.startswith(GZIP_MAGIC):
                yield from self._inflate(stream, first, least)
                return
            piece = first + self._read(stream, PIECE_BYTES)
            while piece:
                self.inflated_bytes += len(piece)
                self.limits.check(self.inflated_bytes, self.compressed_bytes, self.file)
                yield piece
                piece = self._read(stream, PIECE_BYTES)

    def prefix(self, size: int) -> bytes:
        """Return the first inflated bytes, `size` of them if there are so many."""
        taken, length = [], 0
        for piece in self.pieces(size):
            taken.append(piece)
            length += len(piece)
            if length >= size:
                break
        return b"".join(taken)[:size]

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
                self.damage = f"damaged gzip data ({error})"
                return
            self.inflated_bytes += len(piece)
            self.limits.check(self.inflated_bytes, self.compressed_bytes, self.file)
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

    def _read(self, stream: BinaryIO, size: int) -> bytes:
        try:
            data = stream.read(size)
        except OSError as error:
            raise _unreadable(self.file, error) from error
        self.compressed_bytes += len(data)
        return data


def inflate(file: str, limits: Limits, at_most: int | None = None) -> bytes:
    """Return a whole file, inflated, of a format that is held whole."""
    if at_most is not None:
        limits = replace(limits, inflated_bytes=min(limits.inflated_bytes, at_most))
    return b"".join(Source(file, limits).pieces())


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


def file_time_s(file: str) -> float:
    """Return when a file of this machine was written, in seconds since 1970: 0 of any other."""
    try:
        return 0.0 if is_url(file) else os.path.getmtime(file)  # noqa: PTH204
    except OSError:
        return 0.0


def open_binary(file: str) -> BinaryIO:
    """Open a path or an fsspec URL for reading; say clearly when that is not possible."""
    try:
        path = locate(file)[1] if file.startswith("file://") else file
        if is_url(path):
            return cast("BinaryIO", RemoteStream(path))
        mode = os.stat(path).st_mode  # noqa: PTH116 (plain strings serve paths and URLs alike)
        # Opening a pipe or a device may wait for ever, and reading it never end.
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return open(path, "rb")  # noqa: PTH123 (the caller closes it)
    except (OSError, ImportError, ValueError) as error:
        raise _unreadable(file, error) from error
    raise TraceError(
        "cannot be read: a pipe or a device, not a file",
        hint="write it to a file first",
        file=path,
    )


@contextmanager
def local_copy(file: str, limits: Limits = DEFAULT_LIMITS) -> Iterator[str]:
    """Lend a path on this machine: the file itself, or a copy of a URL or of a gzipped file."""
    with closing(open_binary(file)) as stream:
        packed = stream.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    if not packed and not is_url(file):
        yield file
        return
    with tempfile.NamedTemporaryFile(prefix="debubble-") as copy:
        for piece in Source(file, limits).pieces():
            copy.write(piece)
        copy.flush()
        yield copy.name


def _unreadable(file: str, error: Exception) -> TraceError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    hint = "check the path and its permissions"
    if isinstance(error, ImportError) or is_url(file):
        hint = _what_to_do(error)
    return TraceError(f"cannot be read: {reason}", hint=hint, file=file)


def _what_to_do(error: Exception) -> str:
    """Say what helps where a URL cannot be opened."""
    if isinstance(error, ImportError):
        return "pip install what opens such URLs: s3fs, gcsfs, adlfs, …"
    return "check the URL, the credentials of your environment, and the network"


class RemoteStream:
    """An object, fetched in ranges that grow; one that breaks is asked for again by fsspec.

    `read` hands out at most what was asked for, and less where a range ends.
    """

    def __init__(self, url: str) -> None:
        system, path = locate(url)
        with plain_errors():
            system.invalidate_cache(path)  # it may have been written to since it was listed
            self._stream = system.open(path, "rb", cache_type="none")
        self._ready = memoryview(b"")
        self._asks_bytes = _FIRST_BYTES

    def read(self, size: int) -> bytes:
        """Return the next bytes; none at the end."""
        if not self._ready:
            with plain_errors():
                self._ready = memoryview(self._stream.read(self._asks_bytes))
            self._asks_bytes = min(2 * self._asks_bytes, _MOST_BYTES)
        piece = self._ready[:size]
        self._ready = self._ready[size:]
        return bytes(piece)

    def close(self) -> None:
        """Let go of the connection."""
        with suppress(Exception):
            self._stream.close()


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn what a stranger's file system raises into errors that everybody knows."""
    try:
        yield
    except (OSError, ImportError, ValueError, MemoryError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def locate(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    import fsspec  # noqa: PLC0415 (a tenth of a second that local files need not pay)

    with plain_errors():
        system, path = fsspec.core.url_to_fs(url)
    return system, path


def read_whole(url: str) -> bytes:
    """Read a small object."""
    system, path = locate(url)
    with plain_errors():
        content: bytes = system.cat_file(path)
    return content


def read_tail(url: str, most: int) -> tuple[int, bytes]:
    """Return how large an object is, and its last bytes."""
    system, path = locate(url)
    with plain_errors():
        size = int(system.info(path)["size"])
        tail: bytes = system.cat_file(path, start=max(0, size - most), end=size)
    return size, tail


def each(
    function: Callable[[_Item], _Answer], items: Sequence[_Item], *, far: bool
) -> Iterator[_Answer]:
    """Answer for each item in order; several at once where what they stand for is far away."""
    if not far:
        yield from map(function, items)
        return
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 (slow to load)

    with ThreadPoolExecutor(_REQUESTS) as threads:
        yield from threads.map(function, items)


def strip_extensions(name: str) -> str:
    """Return a trace's name without what only says how it is written."""
    return _EXTENSIONS.sub("", name)


def expand(places: Iterable[str]) -> tuple[tuple[str, ...], bool]:
    """Return the files meant, in order and once each, and whether the user named each of them."""
    files: dict[str, None] = {}
    named = True
    for place in places:
        found, is_file = _expand_url(place) if is_url(place) else _expand_path(place)
        if found == [place] and not is_url(place) and not os.path.lexists(place):
            raise RunNotFound(
                f"{place}: no such file or folder", hint="check the path, and the options before it"
            )
        if not found:
            raise RunNotFound(
                f"{place}: no files there", hint="give a trace, a folder of traces, or a glob"
            )
        named &= is_file
        files.update(dict.fromkeys(found))
    return tuple(files), named


def _expand_path(place: str) -> tuple[list[str], bool]:
    if os.path.isdir(place):  # noqa: PTH112 (plain strings serve paths and URLs alike)
        return sorted(_walk(place)), False
    if os.path.lexists(place) or not _GLOB_SIGNS & set(place):
        return [place], True
    found = []
    for path in sorted(glob.glob(place, recursive=True)):  # noqa: PTH207
        found += sorted(_walk(path)) if os.path.isdir(path) else [path]  # noqa: PTH112
    return found, False


def _walk(folder: str) -> list[str]:
    """List all files below a folder; hidden ones are nobody's traces.

    A folder that cannot be listed stands for its files, so that reading it says why.
    """
    found: list[str] = []
    closed: list[OSError] = []
    for path, folders, names in os.walk(folder, onerror=closed.append):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.join(path, name) for name in names if not name.startswith(".")]  # noqa: PTH118
    return found + [str(error.filename) for error in closed]


def _expand_url(place: str) -> tuple[list[str], bool]:
    """List a prefix or a glob. A `?` in an address that is there is no sign of a glob."""
    try:
        system, path = locate(place)
        with plain_errors():
            if _GLOB_SIGNS & set(path) and not system.exists(path):
                return _list(system, system.glob(path)), False
            if system.isdir(path):
                return _list(system, [path]), False
    except (OSError, ImportError, ValueError) as error:
        raise RunNotFound(f"{place}: {error}", hint=_what_to_do(error)) from error
    return [place], True


def _list(system: Any, paths: Iterable[str]) -> list[str]:
    """Return the URLs of objects, and of all below prefixes; hidden ones are nobody's traces."""
    found: dict[str, None] = {}
    for path in sorted(paths):
        below = system.find(path) if system.isdir(path) else [path]
        skipped = len(path.rstrip("/")) if below != [path] else 0
        found.update(dict.fromkeys(name for name in below if "/." not in name[skipped:]))
    return [system.unstrip_protocol(name) for name in sorted(found)]
