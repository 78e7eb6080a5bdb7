"""A command in → the captures it made of itself out; its own code is not touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from debubble.capture.files import list_captures, prepare_out
from debubble.capture.settings import Settings, environment_for
from debubble.errors import CaptureError, UsageError


def capture_command(
    command: Sequence[str], settings: Settings, *, output_to_stderr: bool = False
) -> tuple[Path, ...]:
    """Run a command whose processes capture themselves; return the folders they made."""
    environment = environment_for(settings, os.environ)
    made_here = not settings.out.exists()
    prepare_out(settings.out)
    earlier = set(list_captures(settings.out))
    try:
        code = run_command(command, environment, output_to_stderr=output_to_stderr)
    finally:
        captures = tuple(found for found in list_captures(settings.out) if found not in earlier)
        if made_here and not captures:
            with suppress(OSError):  # something else may be in it
                settings.out.rmdir()
    if code:
        raise CaptureError(
            f"the command ended with {say_end(code)}",
            hint=f"{len(captures)} captures are complete in {settings.out}"
            if captures
            else "its own output says why; nothing was captured",
        )
    if not captures:
        raise CaptureError(
            "the command ran to its end and nothing was captured",
            hint=f"it takes {settings.wait + settings.length + 1} steps of a pipeline schedule or "
            "an optimizer: run longer, or lower --wait and --steps; other loops call "
            "debubble.step() themselves",
        )
    return captures


def say_end(code: int) -> str:
    """Say how a command that failed ended."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def run_command(
    command: Sequence[str], environment: dict[str, str], *, output_to_stderr: bool
) -> int:
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
