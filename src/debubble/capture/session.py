"""`debubble.capture` and `debubble.step`: what a training loop calls.

torch is imported when a capture begins, and not before: the command line imports this package, and
a job that is captured from outside must be hooked before it loads torch itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from debubble.capture.settings import DEFAULT_OUT, PROFILED_STEPS, WAIT_STEPS, Settings
from debubble.errors import CaptureError, MissingExtra

if TYPE_CHECKING:
    from debubble.capture.recording import Session

_running: Session | None = None


def capture(  # noqa: PLR0913 (one argument a setting)
    pipeline: Any = None,
    *,
    every: int | None = None,
    steps: int = PROFILED_STEPS,
    wait: int = WAIT_STEPS,
    out: str | os.PathLike[str] = DEFAULT_OUT,
    keep: int | None = None,
    tokens: int | None = None,
    context_lengths: Sequence[int] | None = None,
    split: Sequence[int] | None = None,
) -> Session:
    """Capture a few steps of the loop inside; call `debubble.step()` after each of them.

    `pipeline` is a schedule of torch.distributed.pipelining: its passes are then named in the
    trace. After `wait` steps, `steps` are timed, `steps` profiled and
    `steps` timed again; that every `every` steps, or once. All ranks must call it alike.
    """
    settings = Settings(
        steps=steps,
        every=every,
        wait=wait,
        out=Path(out),
        keep=keep,
        tokens=tokens,
        context_lengths=None if context_lengths is None else tuple(context_lengths),
        split=None if split is None else tuple(split),
    )
    return begin(settings, pipeline)


def begin(settings: Settings, pipeline: Any, *, done: int = 0) -> Session:
    """Return a capture that is to be entered; here torch is needed for the first time.

    `done` is how many steps the job has behind it: captures are named by their steps.
    """
    try:
        from debubble.capture.recording import Session  # noqa: PLC0415 (imports torch)
    except ImportError as error:
        raise MissingExtra(
            f"a capture needs torch with its profiler: {error}",
            hint="pip install 'debubble[torch]'",
        ) from error
    return Session(settings, pipeline, done=done)


def step() -> None:
    """Say that a step of the loop has ended. Outside a capture it does nothing; it never fails."""
    try:
        if _running is not None:
            _running.step()
    except Exception as error:  # noqa: BLE001 (a capture must never cost anybody a job)
        say(f"a step was not counted: {describe(error)}")


def describe(error: Exception) -> str:
    """Return an error in words; one that fails when it is asked for them has its name alone."""
    with suppress(Exception):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__


def say(problem: str) -> None:
    """Say on stderr what went wrong, as well as that can be said: it must not fail itself."""
    with suppress(Exception):
        sys.stderr.write(f"debubble: {problem}\n")


def enter(session: Session) -> None:
    """Let steps be told to a session from here on."""
    global _running  # noqa: PLW0603 (the profiler is one a process, so is this)
    if _running is not None:
        raise CaptureError(
            "this process is inside a capture already",
            hint="a process has one profiler: leave the first `with` before the second",
        )
    _running = session


def leave() -> None:
    """Let steps be told to nobody."""
    global _running  # noqa: PLW0603
    _running = None
