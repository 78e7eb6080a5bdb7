"""The streams that a shell hands over in → streams that any answer can be printed on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path


class Unheard(Exception):
    """Whoever read the answer has gone."""


@contextmanager
def telling_unheard() -> Iterator[None]:
    """Raise when the reader has gone: left alone, click and rich end with 1, the code of gates."""
    try:
        yield
    except BrokenPipeError as gone:
        raise Unheard from gone
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            raise Unheard from end
        raise


def prepare_streams() -> None:
    """Let print whatever there is to say: closed streams lead nowhere, strange letters become `?`.

    A closed stream has no file, and the next file to be opened would be taken for it.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def abandon_stdout() -> None:
    """Drop what could not be written, so that Python does not try again when it ends."""
    with suppress(OSError, ValueError):  # a stream without a file has nothing to write again
        file, nowhere = sys.stdout.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file)
        os.close(nowhere)
