"""The files of captures: a folder each, a trace and a sidecar a rank, never half a file."""

from __future__ import annotations

import gzip
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from debubble.errors import CaptureError
from debubble.units import replacing

# The job's start in UTC and the step: sorted by name is sorted by age.
_CAPTURE_NAME = re.compile(r"^\d{8}-\d{6}-step\d+$")
# What a rank writes into it, whole or, by a job that was killed, in part. A digest stays.
_OWN_FILE = re.compile(
    r"^\.?rank(\d+)\.(json\.gz|csv|(csv\.)?debubble\.json)((\.\d+)?\.partial(\.json)?)?$"
)
# Traces shrink 10 to 25 times at any level; the job stands still meanwhile.
_GZIP_LEVEL = 3
_CLOSING_BRACKETS = (b"}", b"]")


def capture_name(started: str, step: int) -> str:
    """Name a capture by the job's start and the first profiled step."""
    return f"{started}-step{step:09}"


def prepare_out(out: Path) -> None:
    """Make the folder; refuse one that cannot be written while the job has not begun."""
    probe = out / f".debubble-{os.getpid()}.partial"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CaptureError(
            f"captures cannot be written there: {error.strerror}",
            file=str(out),
            hint="give out= a folder that this process may write to",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureFiles:
    """What one rank writes of one capture."""

    out: Path
    name: str
    rank: int

    @property
    def folder(self) -> Path:
        """The capture's own folder, shared by its ranks."""
        return self.out / self.name

    @property
    def trace(self) -> Path:
        """What the profiler saw."""
        return self.folder / f"rank{self.rank}.json.gz"

    @property
    def sidecar(self) -> Path:
        """What the profiler cannot see."""
        return self.folder / f"rank{self.rank}.debubble.json"

    @contextmanager
    def replacing(self, file: Path) -> Iterator[Path]:
        """Give a name to write to; leave neither a part of a file nor an empty folder."""
        try:
            with replacing(file) as partial:
                yield partial
        finally:
            with suppress(OSError):
                self.folder.rmdir()

    def export(self, write: Callable[[Path], None]) -> None:
        """Have a plain trace written, and put it into place packed; refuse one without an end."""
        if self.trace.exists():
            raise CaptureError(
                "another job captures the same step into the same folder",
                file=str(self.trace),
                hint="give every job an out= of its own",
            )
        with self.replacing(self.trace) as partial:
            plain = partial.with_name(f"{partial.name}.json")
            write(plain)
            if not _ends(plain):
                raise CaptureError(
                    "the profiler could not write the whole trace",
                    file=str(self.trace),
                    hint="look whether the disk is full",
                )
            with plain.open("rb") as source, gzip.open(partial, "wb", _GZIP_LEVEL) as packed:
                shutil.copyfileobj(source, packed, length=1 << 20)


def list_captures(out: Path, traces: str = "rank*.json.gz") -> list[Path]:
    """Return the folders of captures that hold a trace, oldest first; a job may remove them all.

    A meter's segments are folders of such names, and their traces are `rank*.csv`.
    """
    if not out.is_dir():
        return []
    return sorted(
        folder
        for folder in out.iterdir()
        if _CAPTURE_NAME.match(folder.name) and any(folder.glob(traces))
    )


def keep_newest(out: Path, trace: str, keep: int, *, spared: Collection[str]) -> None:
    """Remove a rank's files from all captures but the newest, and what a killed job left.

    `trace` is the rank's file in each. Those that are `spared` stay, however old they seem: after a
    clock was set back the one just written may bear the oldest name.
    """
    captures = _capture_folders(out)
    complete = [folder for folder in captures if (folder / trace).exists()]
    rank = _OWN_FILE.match(trace)
    for folder in captures:
        if folder not in complete[-keep:] and folder.name not in spared:
            _remove_own(folder, None if rank is None else int(rank[1]))


def remove_captures(out: Path) -> None:
    """Remove all captures of a folder by the names that captures have; others' files stay."""
    for folder in _capture_folders(out):
        _remove_own(folder, None)


def _capture_folders(out: Path) -> list[Path]:
    """Return the folders that captures made, oldest first; a link leads to somebody else's."""
    return sorted(
        folder
        for folder in out.iterdir()
        if _CAPTURE_NAME.match(folder.name) and folder.is_dir() and not folder.is_symlink()
    )


def _remove_own(folder: Path, rank: int | None) -> None:
    """Remove what one rank, or each, wrote of a capture, and the folder once it is empty."""
    for file in list(folder.iterdir()):
        own = _OWN_FILE.match(file.name)
        if own and rank in (None, int(own[1])):
            file.unlink(missing_ok=True)
    with suppress(OSError):  # other ranks' files are still there, or somebody else's
        folder.rmdir()


def _ends(plain: Path) -> bool:
    """Tell whether a JSON file has its last bracket: the profiler tells of no failed write."""
    try:
        with plain.open("rb") as trace:
            trace.seek(-min(64, plain.stat().st_size), os.SEEK_END)
            return trace.read().rstrip().endswith(_CLOSING_BRACKETS)
    except OSError:
        return False
