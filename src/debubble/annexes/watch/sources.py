"""Folders in → captures that appear in them; then raw traces go, and digests stay."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from debubble.annexes.watch.config import Source
from debubble.annexes.watch.log import log
from debubble.errors import DebubbleError, RunNotFound
from debubble.trace.captures import group_captures, recognise
from debubble.trace.digest import BESIDE, SUFFIX, DigestPlace
from debubble.trace.format import OTHER, TraceFile, rank_from_name
from debubble.trace.kineto.document import NAME as KINETO
from debubble.trace.run import named_like_a_trace
from debubble.trace.sidecar import is_sidecar, read_sidecar, sidecar_of
from debubble.trace.source import DEFAULT_LIMITS, is_url, locate, plain_errors
from debubble.units import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file as it was listed."""

    file: str
    size: int
    modified: str
    """Another word whenever the file is another one."""
    modified_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyCapture:
    """A capture that nobody writes to any more."""

    key: str
    files: tuple[str, ...]
    newest_s: float | None
    """When its last file was written, where that is known."""


class Scanner:
    """Looks into one source again and again; remembers what it saw the last time."""

    def __init__(self, source: Source, clock: Callable[[], float]) -> None:
        self.source = source
        self._clock = clock
        self._known: dict[Entry, TraceFile | None] = {}
        self._ended: dict[Entry, str] = {}
        self._since: dict[tuple[Entry, ...], float] = {}

    def scan(self, ended: Collection[str]) -> tuple[ReadyCapture, ...]:
        """Return what is complete and not among the captures that ended, the oldest first."""
        entries = {entry.file: entry for entry in list_files(self.source.folder)}
        present = set(entries.values())
        self._ended = {
            entry: key for entry, key in self._ended.items() if entry in present and key in ended
        }
        fresh = [
            entry
            for file, entry in entries.items()
            if entry not in self._ended and not is_sidecar(file) and not self._is_own(file)
        ]
        self._known = {entry: self._recognise(entry) for entry in fresh}
        traces = [
            known
            for known in self._known.values()
            if known is not None and not (known.digest_of and known.named in entries)
        ]
        now, since, ready = self._clock(), {}, []
        for capture in group_captures(traces):
            doubled = (file for _, files in capture.duplicates for file in files)
            names = sorted({*(file.file for file in capture.files), *doubled})
            members = tuple(entries[name] for name in names)
            first = members[0]
            inside = first.file.removeprefix(_root(self.source)).lstrip("/")
            key = f"{inside} {first.size} {first.modified}"
            if key in ended:
                self._ended |= dict.fromkeys(members, key)
                continue
            since[members] = self._since.get(members, now)
            settled = now - since[members] >= self.source.settle_s
            if settled or is_complete(names, entries):
                times = [entry.modified_s for entry in members if entry.modified_s is not None]
                newest_s = max(times, default=None)
                ready.append(ReadyCapture(key=key, files=tuple(names), newest_s=newest_s))
        self._since = since
        return tuple(ready)

    def _is_own(self, file: str) -> bool:
        """Tell a digest that this service keeps: it is no capture."""
        digests = self.source.digests
        if digests is None or not file.endswith(SUFFIX):
            return False
        return digests == BESIDE or file.startswith(f"{digests}/")

    def _recognise(self, entry: Entry) -> TraceFile | None:
        """Say what a file is; a damaged trace stands beside its ranks, to be recorded as such."""
        if entry in self._known:
            return self._known[entry]
        damaged = TraceFile(file=entry.file, format=KINETO, rank=rank_from_name(entry.file))
        try:
            known = recognise(entry.file, DEFAULT_LIMITS)
        except Exception as error:  # noqa: BLE001 (one file must not hide those beside it)
            if not isinstance(error, DebubbleError | OSError):
                log("bug", level="error", problem=f"{printable(entry.file)}: {error!r}")
            return damaged if named_like_a_trace(entry.file) else None
        if known.is_trace:
            return known
        is_garbage = known.format == OTHER and named_like_a_trace(entry.file)
        return damaged if is_garbage else None


def is_complete(traces: Sequence[str], listed: Collection[str]) -> bool:
    """Tell whether the sidecars of all ranks are there: each is written after its trace."""
    if not all(sidecar_of(trace) in listed for trace in traces):
        return False
    sidecars = [read_sidecar(trace)[0] for trace in traces]
    return all(sidecar and sidecar.world_size == len(traces) for sidecar in sidecars)


def list_files(root: str) -> Iterable[Entry]:
    """List all files below a folder or a prefix; hidden ones are unfinished."""
    if is_url(root):
        return _list_url(root)
    if not Path(root).is_dir():
        raise RunNotFound(f"{root}: no such folder", hint="is it mounted, and the path right?")
    return _list_folder(root)


def _list_folder(root: str) -> Iterable[Entry]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = os.path.join(folder, name)  # noqa: PTH118 (plain strings serve URLs alike)
            if name.startswith(".") or not _is_text(file):
                continue
            with contextlib.suppress(OSError):
                status = os.stat(file)  # noqa: PTH116
                if not stat.S_ISREG(status.st_mode):
                    continue  # a pipe or a device: reading it may never end
                yield Entry(
                    file=file,
                    size=status.st_size,
                    modified=str(status.st_mtime_ns),
                    modified_s=status.st_mtime,
                )


def _is_text(name: str) -> bool:
    """Tell a name that is UTF-8: Linux takes any bytes, and no store holds them."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _list_url(root: str) -> list[Entry]:
    try:
        system, path = locate(root)
        with plain_errors():
            system.invalidate_cache()
            listed: dict[str, dict[str, Any]] = system.find(path, detail=True)
    except (OSError, ImportError, ValueError) as error:
        raise RunNotFound(f"{root}: {error}", hint="check the prefix and its access") from error
    tells = ("ETag", "LastModified", "mtime", "created")
    return [
        Entry(
            file=system.unstrip_protocol(name),
            size=int(details.get("size") or 0),
            modified=str(next((details[key] for key in tells if details.get(key)), "")),
        )
        for name, details in sorted(listed.items())
        if not name.rpartition("/")[2].startswith(".")
    ]


def _root(source: Source) -> str:
    """Return the folder as listed files begin with it."""
    if not is_url(source.folder):
        return source.folder.rstrip("/")
    system, path = locate(source.folder)
    return str(system.unstrip_protocol(path)).rstrip("/")


def digest_place(source: Source) -> DigestPlace | None:
    """Return where the digests of a source go, should they be kept."""
    if source.digests is None:
        return None
    return DigestPlace(place=source.digests, root=_root(source), run=source.name)


def remove_capture(source: Source, files: Sequence[str]) -> None:
    """Remove raw traces and their sidecars, and the folder that they leave empty.

    What was moved away and left a link is somebody else's.
    """
    inside = _root(source) + "/"
    for file in (name for trace in files for name in (trace, sidecar_of(trace))):
        if not file.startswith(inside) or ".." in file.split("/"):
            continue
        if is_url(file):
            system, path = locate(file)
            with contextlib.suppress(OSError), plain_errors():
                system.rm_file(path)
            continue
        if not Path(file).parent.resolve().is_relative_to(Path(inside).resolve()):
            continue
        with contextlib.suppress(OSError):
            Path(file).unlink()
        if Path(file).parent != Path(source.folder):
            with contextlib.suppress(OSError):
                Path(file).parent.rmdir()
