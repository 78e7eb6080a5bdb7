"""Digests of ranks in → one temporary file that workers of this machine read them from again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from debubble.errors import EngineError
from debubble.trace.columns import RankTrace
from debubble.trace.digest import read_digest, unpack_digest
from debubble.trace.source import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the digest of a rank lies."""

    file: str
    rank: int
    """As the run has settled it, whatever the digest says."""
    at: int = 0
    size: int | None = None
    """None: the file is that digest and nothing else."""

    def read(self, limits: Limits) -> RankTrace:
        """Read the rank again."""
        if self.size is None:
            trace, _ = read_digest(self.file, limits)
        else:
            with Path(self.file).open("rb") as spool:
                spool.seek(self.at)
                trace, _ = unpack_digest(spool.read(self.size), self.file, limits)
        return replace(trace, rank=self.rank)


class Spool:
    """A file of digests, one behind the other."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        self._name = name
        self._end = 0

    def put(self, digest: bytes, rank: int) -> Place:
        """Add one, at once there for others to read."""
        left = memoryview(digest)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise _no_room(error) from error
        place = Place(file=self._name, rank=rank, at=self._end, size=len(digest))
        self._end += len(digest)
        return place


@contextmanager
def spooling() -> Iterator[Spool]:
    """Lend a spool; it is gone afterwards."""
    try:
        file = tempfile.NamedTemporaryFile(prefix="debubble-ranks-", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise _no_room(error) from error
    with file:
        yield Spool(file, file.name)


def _no_room(error: OSError) -> EngineError:
    return EngineError(
        f"the ranks cannot be kept in {tempfile.gettempdir()} meanwhile: {error.strerror}",
        hint="make room there, or set TMPDIR to another folder",
    )
