"""Runs in → what was run, written down and found again.

The first line says whose it is. A run is two lines: one before it starts, and one with what came of
it. A line is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO

import msgspec

from debubble.annexes.tune.setting import Setting
from debubble.annexes.tune.task import Server, Task
from debubble.capture.files import remove_captures
from debubble.errors import TuneError
from debubble.measure.measurement import Measurement
from debubble.measure.prediction import Prediction

NAME = "journal.jsonl"
LOG = "output.log"
MARKER = ".debubble-run"
"""In the folder of a run that found it empty: what has a run's names in there is a run's."""
_ANY_SCHEMA = "debubble.tune-journal/"
_SCHEMA = f"{_ANY_SCHEMA}2"


class Kind(StrEnum):
    """What can come of a run."""

    MEASURED = "measured"
    OVER_MEMORY = "over_memory"
    IGNORED = "ignored"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out_of_memory"
    HUNG = "hung"
    UNREADABLE = "unreadable"
    OTHER_BATCH = "other_batch"
    """It trained with a larger batch, which nobody asked for."""
    CUT = "cut"
    """The budget ended before the run did: it tells nothing of the setting."""
    UNFINISHED = "unfinished"
    """It never ended: whoever ran it was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run."""

    kind: Kind
    seconds: float
    message: str = ""
    measurement: Measurement | None = None
    ignored: tuple[str, ...] = ()
    """What the command was told and did not do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What had been predicted of a run."""

    gain: float
    """Of throughput, against the setting as it was first."""
    low: float
    high: float
    batch_latency_s: float
    """Of a server: what a token takes."""
    prediction: Prediction | None = None
    """The same of its batch, with what it starts from; None of a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a setting."""

    number: int
    token: str
    """In the environment of its processes."""
    setting: Setting
    why: str
    expected: Expectation | None = None
    outcome: Outcome = Outcome(kind=Kind.UNFINISHED, seconds=0.0)


class _Heading(msgspec.Struct, frozen=True):
    """Whose journal it is: what must be the same for a run to count."""

    schema: str
    words: tuple[str, ...]
    now: Setting
    steps: int
    wait: int
    server: Server | None


class Journal:
    """The record of one tuning; nobody else writes to it meanwhile."""

    def __init__(self, task: Task) -> None:
        task.folder.mkdir(parents=True, exist_ok=True)
        self.path = task.folder / NAME
        self.known: dict[int, Run] = {}
        self._file: IO[bytes] = self.path.open("ab+")
        heading = _Heading(
            schema=_SCHEMA,
            words=task.template.words,
            now=task.template.now,
            steps=task.steps,
            wait=task.wait,
            server=task.server,
        )
        try:
            _lock(self._file, task.folder)
            self._load(heading)
        except BaseException:
            self._file.close()
            raise

    @property
    def ended(self) -> tuple[Run, ...]:
        """The runs that are over, in their order."""
        known = self.known.values()
        return tuple(run for run in known if run.outcome.kind is not Kind.UNFINISHED)

    def close(self) -> None:
        """Let others write."""
        self._file.close()

    def write(self, run: Run) -> None:
        """Note that a run is about to start, or what came of it."""
        self._append(run)
        self.known[run.number] = run

    def _load(self, heading: _Heading) -> None:
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind(b"\n") + 1]
        lines = whole.splitlines()
        try:
            first = msgspec.json.decode(lines[0], type=_Heading) if lines else None
            runs = [msgspec.json.decode(line, type=Run) for line in lines[1:]]
            if first is None and not msgspec.json.encode(heading).startswith(text):
                raise msgspec.MsgspecError("no line is whole")  # noqa: TRY301 (one error)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TuneError(
                f"this is no journal of debubble tune: {error}",
                file=str(self.path),
                hint="give another --out; where it is one, --force begins anew",
            ) from error
        if first not in {None, heading}:
            raise TuneError(
                "this folder holds the tuning of another command or setting",
                file=str(self.path.parent),
                hint="give another --out, or --force to begin anew",
            )
        if len(whole) < len(text):  # half a line: the writer was killed in it
            self._file.truncate(len(whole))
        if first is None:
            self._append(heading)
        self.known = {run.number: run for run in runs}

    def _append(self, line: _Heading | Run) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def begin_anew(folder: Path) -> None:
    """Remove an earlier tuning, by the names that one writes; whatever else lies there stays."""
    path = folder / NAME
    if not path.exists():
        return
    with path.open("rb") as file:
        _lock(file, folder)
        if not file.readline().startswith(f'{{"schema":"{_ANY_SCHEMA}'.encode()):
            raise TuneError(
                "this is no journal of debubble tune, and is left as it is",
                file=str(path),
                hint="give another --out",
            )
        for run in sorted(folder.glob("run[0-9]*")):
            if (run / MARKER).is_file():
                clear_run(run)
        path.unlink()


def clear_run(out: Path) -> None:
    """Remove what a run left in its folder, by the names that runs write: nothing else goes."""
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not (out / MARKER).is_file():
        if out.is_dir() and not any(out.iterdir()):
            return
        raise TuneError(
            "debubble did not make this folder, and removes nothing from it",
            file=str(out),
            hint="give another --out, or remove it yourself",
        )
    remove_captures(out)
    for name in (LOG, MARKER):
        (out / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody else's files are in it
        out.rmdir()


def _lock(file: IO[bytes], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise TuneError(
            "another tune writes here", file=str(folder), hint="wait for it, or give --out"
        ) from error
