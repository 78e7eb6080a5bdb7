"""A finished file in → on disk out, never over another one unless told so."""

from __future__ import annotations

from pathlib import Path

from debubble.errors import UsageError


def write_file(path: Path, data: bytes, *, force: bool) -> None:
    """Write a file; where there is one already, only by force."""
    try:
        with path.open("wb" if force else "xb") as out:
            out.write(data)
    except FileExistsError as error:
        raise UsageError(
            f"{path} is there already", hint="give another name, or --force to replace it"
        ) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
