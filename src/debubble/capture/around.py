"""A command in → the captures or tables that it made of itself out; its own code is not touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from debubble.capture.files import list_captures, prepare_out
from debubble.capture.settings import JobSettings, environment_for
from debubble.errors import CaptureError, UsageError


def run_around(
    command: Sequence[str], settings: JobSettings, *, needs: str, output_to_stderr: bool = False
) -> tuple[Path, ...]:
    """Run a command whose processes do to themselves what is asked; return the folders they made.

    `needs` is said where nothing came of it.
    """
    environment, out = environment_for(settings, os.environ), settings.out
    made_here = not out.exists()
    prepare_out(out)
    earlier = set(list_captures(out, settings.traces))
    try:
        code = _run(command, environment, output_to_stderr=output_to_stderr)
    finally:
        made = [folder for folder in list_captures(out, settings.traces) if folder not in earlier]
        if made_here and not made:
            with suppress(OSError):  # something else may be in it
                out.rmdir()
    if code:
        end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise CaptureError(
            f"the command ended with {end}",
            hint=f"what was {settings.done} before is in {out}"
            if made
            else f"its own output says why; nothing was {settings.done}",
        )
    if not made:
        raise CaptureError(
            f"the command ran to its end and nothing was {settings.done}", hint=needs
        )
    return tuple(made)


def _run(command: Sequence[str], environment: dict[str, str], *, output_to_stderr: bool) -> int:
    """Run a command to its end, as it would run without us; return its exit code."""
    try:
        process = subprocess.Popen(  # noqa: S603 (the user's own command, no shell)
            list(command), env=environment, stdout=sys.stderr if output_to_stderr else None
        )
    except OSError as error:
        raise UsageError(
            f"{command[0]} cannot be started: {error.strerror}",
            hint="write the command as you would without debubble",
        ) from error
    with process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()  # it was interrupted by the same key
            raise
