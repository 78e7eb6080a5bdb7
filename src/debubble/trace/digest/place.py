"""Where digests are kept in → their names, and the files, written whole or not at all."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from uuid import uuid4

from isal import isal_zlib

from debubble.errors import TraceError
from debubble.trace.digest.archive import looks_like_digest, peek_head
from debubble.trace.format import Head, Stamp
from debubble.trace.source import (
    GZIP_MAGIC,
    PIECE_BYTES,
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
    if not looks_like_digest(there):
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
