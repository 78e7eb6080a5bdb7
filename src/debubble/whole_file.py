"""Bytes in → a file that is there whole, or as it was before."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from uuid import uuid4

from debubble.errors import UsageError


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
        unfinished = target.with_name(f".{uuid4().hex}.partial")
        try:
            with unfinished.open("xb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            if target.exists():
                shutil.copymode(target, unfinished)
            unfinished.replace(target)
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
