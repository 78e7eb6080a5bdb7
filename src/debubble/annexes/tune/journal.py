"""Runs in → what was run, written down and found again, here and in the history.

The first line says whose it is. A run is two lines: that it began, before it does, and what came of
it. A line is there whole or not at all.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

import msgspec

from debubble.annexes.tune.setting import Setting
from debubble.annexes.tune.trial import MARKER, Outcome, clear_trial
from debubble.errors import TuneError
from debubble.measure.prediction import Prediction

if TYPE_CHECKING:
    from debubble.measure.store import Store

NAME = "journal.jsonl"
_ANY_SCHEMA = "debubble.tune-journal/"
SCHEMA = f"{_ANY_SCHEMA}1"
_TAG = "tune"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """Whose journal it is: what must be the same for a run to count."""

    schema: str
    words: tuple[str, ...]
    now: Setting
    steps: int
    wait: int
    server: str = ""
    """Of a server: its address, and the load that it is put under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What had been predicted of a run, against the best one before it."""

    gain: float
    """Of throughput, against the setting as it was first."""
    low: float
    high: float
    batch_latency_s: float
    peak_memory_bytes: tuple[int, ...] | None
    prediction: Prediction | None = None
    """The same of its batch, with what it starts from; None of a server."""
    changes_training: bool = False
    """It trains with a larger global batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """A run that was started."""

    number: int
    token: str
    setting: Setting
    why: str
    began_s: float
    """Seconds since 1970."""
    expected: Expectation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunStart):
    """A run that is over."""

    outcome: Outcome


class _RunEnd(msgspec.Struct):
    number: int
    outcome: Outcome


class _Line(msgspec.Struct, omit_defaults=True):
    heading: Heading | None = None
    began: RunStart | None = None
    came: _RunEnd | None = None


class Journal:
    """The record of one tuning; nobody else writes to it meanwhile."""

    def __init__(self, folder: Path, heading: Heading) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self._file: IO[bytes] = self.path.open("ab+")
        try:
            _lock(self._file, folder)
            self._load(folder, heading)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs that are over, in their order."""
        return tuple(self._runs)

    @property
    def unfinished(self) -> tuple[RunStart, ...]:
        """Runs that were started and never ended: whoever ran them was killed."""
        return tuple(self._begun.values())

    @property
    def next_number(self) -> int:
        """The number of the next run."""
        return self._last + 1

    def begin(self, start: RunStart) -> None:
        """Note that a run is about to start."""
        self._append(_Line(began=start))
        self._begun[start.number] = start
        self._last = start.number

    def end(self, number: int, outcome: Outcome) -> Run:
        """Note what came of it."""
        self._append(_Line(came=_RunEnd(number=number, outcome=outcome)))
        return self._close(number, outcome)

    def drop(self, number: int) -> None:
        """Forget a run that never ended; its number is not given again."""
        del self._begun[number]

    def _load(self, folder: Path, heading: Heading) -> None:
        self._runs: list[Run] = []
        self._begun: dict[int, RunStart] = {}
        self._last = 0
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind(b"\n") + 1]
        try:
            lines = [msgspec.json.decode(line, type=_Line) for line in whole.splitlines()]
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TuneError(
                f"this is no journal of debubble tune: {error}",
                file=str(self.path),
                hint="give another --out; where it is one, --force begins anew",
            ) from error
        if not lines:
            first = _Line(heading=heading)
            if not msgspec.json.encode(first).startswith(text):
                raise TuneError(
                    "this is no journal of debubble tune",
                    file=str(self.path),
                    hint="give another --out",
                )
            self._file.truncate(0)
            self._append(first)
            return
        if lines[0].heading != heading:
            raise TuneError(
                "this folder holds the tuning of another command or setting",
                file=str(folder),
                hint="give another --out, or --force to begin anew",
            )
        if len(whole) < len(text):  # half a line: the writer was killed in it
            self._file.truncate(len(whole))
        for line in lines[1:]:
            if line.began is not None:
                self._begun[line.began.number] = line.began
                self._last = line.began.number
            if line.came is not None:
                self._close(line.came.number, line.came.outcome)

    def _close(self, number: int, outcome: Outcome) -> Run:
        start = self._begun.pop(number)
        known = {field.name: getattr(start, field.name) for field in fields(start)}
        run = Run(**known, outcome=outcome)
        self._runs.append(run)
        return run

    def _append(self, line: _Line) -> None:
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
        if not path.stat().st_size:
            return
        try:
            heading = msgspec.json.decode(file.readline(), type=_Line).heading
        except (msgspec.MsgspecError, RecursionError):
            heading = None
        if heading is None or not heading.schema.startswith(_ANY_SCHEMA):
            raise TuneError(
                "this is no journal of debubble tune, and is left as it is",
                file=str(path),
                hint="give another --out",
            )
        for run in sorted(folder.glob("run[0-9]*")):
            if (run / MARKER).is_file():
                clear_trial(run)
        path.unlink()


def _lock(file: IO[bytes], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise TuneError(
            "another tune writes here", file=str(folder), hint="wait for it, or give --out"
        ) from error


def remember(store: Store, name: str, run: Run) -> None:
    """Keep the measurement of a run under the tuning's name and its setting."""
    if run.outcome.measurement is None:
        return
    called = record_name(name, run.setting)
    known, _ = store.readable_records(called)
    if any(record.tags.get(_TAG) == run.token for record in known):
        return
    tags = {_TAG: run.token, "outcome": run.outcome.kind.value, "run": str(run.number)}
    store.add(called, run.outcome.measurement, now_s=run.began_s, tags=tags)


def record_name(name: str, setting: Setting) -> str:
    """Name the records of a setting; commas would join names in `compare`."""
    parts = [f"{knob}={setting.written(knob).replace(',', '.')}" for knob in setting.knobs()]
    return "/".join([name, *parts])
