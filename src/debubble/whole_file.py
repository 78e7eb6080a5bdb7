"""Bytes in → a file that is there whole, or as it was before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOENT
from glob import escape
from pathlib import Path

from debubble.errors import UsageError


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Give a hidden name beside a file to write to, and put that in its place once it is whole.

    `sync` waits for the disk, for files that must outlive the machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield unfinished
        if sync:
            with unfinished.open("rb") as written:
                os.fsync(written.fileno())
        unfinished.replace(path)
    finally:
        with suppress(OSError):
            for rest in path.parent.glob(f"{escape(unfinished.name)}*"):
                rest.unlink()


def write_file(path: Path, data: bytes, *, force: bool = True) -> None:
    """Write a file beside its place and move it there; where there is one, only by force.

    A full disk leaves neither half of it nor nothing in place of an earlier one. What is no plain
    file, such as /dev/stdout, is written to as it is.
    """
    if path.exists() and not force:
        raise UsageError(
            f"{path} is there already", hint="give another name, or --force to replace it"
        )
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        target = path.resolve()
        if not target.parent.is_dir():
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
        with replacing(target) as unfinished:
            unfinished.write_bytes(data)
            if target.exists():
                shutil.copymode(target, unfinished)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
