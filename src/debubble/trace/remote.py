"""URLs in → objects listed, and read in ranges that go on where a connection broke.

Whatever a file system raises comes out as an `OSError` with a reason in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, TypeVar, cast

# Enough for what a file is and whose; then twice as much each time, up to what costs no memory
# and hides the tens of milliseconds that each request takes.
_FIRST_BYTES = 128 * 1024
_MOST_BYTES = 8 * 1024 * 1024

# Before it is asked for again. File systems try several times by themselves, each time.
_PAUSES_S = (0.5, 2.0, 5.0)

# Requests at once, where each takes tens of milliseconds and next to no work.
_REQUESTS = 16

# What is another word whenever an object is another one, as far as its store tells.
_SIGNS = ("size", "ETag", "etag", "generation", "LastModified", "mtime", "created")

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


class Changed(OSError):
    """The object is another one than it was when reading began."""


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
    with ThreadPoolExecutor(_REQUESTS) as threads:
        yield from threads.map(function, items)


def open_remote(url: str) -> BinaryIO:
    """Open an object to be read from its first byte to its last."""
    return cast("BinaryIO", RemoteStream(url))


class RemoteStream:
    """An object, fetched in ranges; a range that breaks is asked for again.

    `read` hands out at most what was asked for, and less where a range ends.
    """

    def __init__(self, url: str) -> None:
        self._system, self._path = locate(url)
        self._at = 0
        self._ready = memoryview(b"")
        self._asks_bytes = _FIRST_BYTES
        with plain_errors():
            self._open()

    def read(self, size: int) -> bytes:
        """Return the next bytes; none at the end."""
        if not self._ready:
            self._ready = memoryview(self._fetch())
        piece = self._ready[:size]
        self._ready = self._ready[size:]
        return bytes(piece)

    def close(self) -> None:
        """Let go of the connection."""
        with suppress(Exception):
            self._stream.close()

    def _open(self) -> None:
        self._stream = self._system.open(self._path, "rb", cache_type="none")
        details = getattr(self._stream, "details", None) or self._system.info(self._path)
        self._identity = tuple(str(details.get(sign)) for sign in _SIGNS)
        self._size = details.get("size")

    def _fetch(self) -> bytes:
        failure: Exception | None = None
        for pause_s in (0.0, *_PAUSES_S):
            try:
                with plain_errors():
                    if failure is not None:
                        time.sleep(pause_s)
                        self._reopen()
                    return self._fetch_once()
            except (FileNotFoundError, PermissionError, Changed):
                raise
            except (OSError, ValueError) as error:
                failure = error
        raise OSError(f"broke off after {self._at} bytes, again and again ({failure})") from failure

    def _fetch_once(self) -> bytes:
        data: bytes = self._stream.read(self._asks_bytes)
        if not data and self._size is not None and self._at < self._size:
            raise OSError(f"ended after {self._at} of {self._size} bytes")
        self._at += len(data)
        self._asks_bytes = min(2 * self._asks_bytes, _MOST_BYTES)
        return data

    def _reopen(self) -> None:
        """Open the object where reading stopped, if it still is the same one."""
        self.close()
        before = self._identity
        self._system.invalidate_cache()
        self._open()
        if self._at and self._identity != before:
            raise Changed("it was written to while it was read")
        self._stream.seek(self._at)
