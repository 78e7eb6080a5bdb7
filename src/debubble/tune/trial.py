"""A command in → one run of it: its process, its capture, what was measured."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from debubble.analysis import Analysis, analyse_found
from debubble.capture.files import list_captures, prepare_out
from debubble.capture.settings import Settings, environment_for
from debubble.errors import DebubbleError
from debubble.measure.measurement import Measurement
from debubble.trace.run import find_run
from debubble.tune.setting import Setting, Template

GUARD = Path(__file__).with_name("guard.py")
MARK = "DEBUBBLE_TUNE_RUN"
"""In the environment of every process of a run: whose it is."""
_PROC = Path("/proc")
LOG = "output.log"
# The end of a traceback, with the line that failed.
_TAIL_LINES = 3
_TAIL_BYTES = 1 << 16
_OUT_OF_MEMORY = re.compile(
    rb"out of memory|OutOfMemoryError|MemoryError|Cannot allocate memory|can't allocate memory",
    re.IGNORECASE,
)
# As a shell says it: ended by a signal, of which 9 is the kernel's own, and an administrator's.
_SIGNALLED, _KILL = 128, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How a command ended."""

    code: int | None
    """As a shell says it, 128 + N for signal N; None where it was stopped for its time."""
    seconds: float
    out_of_memory: bool = False
    """Whether the kernel killed a process of this machine for memory meanwhile."""


def run_guarded(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    token: str,
    log: Path,
    timeout_s: float | None,
) -> ProcessEnd:
    """Run a command under its guard, for so long at most."""
    began, killed = time.monotonic(), _killed_for_memory()
    with log.open("wb") as output:
        guard = subprocess.Popen(  # noqa: S603 (our own file, and the user's command after it)
            [sys.executable, "-I", "-S", str(GUARD), *words],
            env={**environment, MARK: token},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    code: int | None
    try:
        code = guard.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if guard.stdin is not None:
            guard.stdin.close()  # the guard's word to end whatever still runs
        guard.wait()
        end_marked(token)
    return ProcessEnd(
        code=code,
        seconds=time.monotonic() - began,
        out_of_memory=_killed_for_memory() > killed,
    )


def _killed_for_memory() -> int:
    """Count the processes that the kernel killed for memory so far; 0 where it does not tell."""
    try:
        lines = (_PROC / "vmstat").read_text("utf-8").splitlines()
    except OSError:
        return 0
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else 0


def end_marked(token: str) -> int:
    """Kill what still runs of a run, should its guard have been killed too; return how many."""
    mark = f"{MARK}={token}".encode()
    ended = 0
    for folder in _PROC.glob("[0-9]*"):
        try:
            if mark not in (folder / "environ").read_bytes().split(b"\0"):
                continue
        except OSError:
            continue
        if int(folder.name) != os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(folder.name), signal.SIGKILL)
                ended += 1
    return ended


def read_capture(folder: Path | str) -> Analysis:
    """Read the newest capture of a folder or URL; of several pipelines, the one that waits most."""
    return analyse_found(find_run([str(folder)]))


class Kind(StrEnum):
    """What can come of a run."""

    MEASURED = "measured"
    OVER_MEMORY = "over_memory"
    IGNORED = "ignored"
    NO_STEP = "no_step"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out_of_memory"
    HUNG = "hung"
    UNREADABLE = "unreadable"
    CUT = "cut"
    """The budget ended before the run did: it tells nothing of the setting."""


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
class Bench:
    """How runs are made: the command, how much of it is captured, and where that goes."""

    template: Template
    steps: int
    wait: int
    folder: Path

    def folder_of(self, number: int) -> Path:
        """Return where a run leaves its traces and its output."""
        return self.folder / f"run{number:03}"


def run_trial(  # noqa: PLR0913 (what the journal and the budget say of it)
    bench: Bench,
    setting: Setting,
    *,
    out: Path,
    token: str,
    timeout_s: float | None,
    cut_s: float | None,
) -> tuple[Outcome, Analysis | None]:
    """Run the command once and read the traces that it leaves in a folder.

    Beyond `timeout_s` it hangs; beyond `cut_s` the budget is spent, whatever it does.
    """
    prepare_out(out)
    settings = Settings(steps=bench.steps, wait=bench.wait, out=out)
    earlier = set(list_captures(out))
    known = [limit for limit in (timeout_s, cut_s) if limit is not None]
    ended = run_guarded(
        bench.template.fill(setting),
        environment_for(settings, bench.template.environment(setting, os.environ)),
        token=token,
        log=out / LOG,
        timeout_s=min(known, default=None),
    )

    def came_of(kind: Kind, message: str) -> tuple[Outcome, None]:
        return Outcome(kind=kind, seconds=ended.seconds, message=message), None

    if ended.code is None:
        took = f"after {ended.seconds:.0f} s"
        spent = cut_s is not None and ended.seconds >= cut_s
        cut, hung = f"the budget was spent {took} of it", f"stopped: not through {took}"
        return came_of(Kind.CUT, cut) if spent else came_of(Kind.HUNG, hung)
    if ended.code:
        return came_of(*_say_failure(ended, out / LOG))
    if not [capture for capture in list_captures(out) if capture not in earlier]:
        return came_of(
            Kind.NO_STEP,
            "it ran to its end and nothing was captured: that takes "
            f"{settings.wait + settings.length + 1} steps of a pipeline schedule or an optimizer",
        )
    try:
        reading = read_capture(out)
    except DebubbleError as error:
        return came_of(Kind.UNREADABLE, str(error))
    measurement = reading.measurement
    if not measurement.samples or measurement.partial:
        why = (
            "; ".join(str(gap) for gap in reading.measured_warnings) or "no step was captured whole"
        )
        return came_of(Kind.UNREADABLE, why)
    return Outcome(kind=Kind.MEASURED, seconds=ended.seconds, measurement=measurement), reading


def _say_failure(ended: ProcessEnd, log: Path) -> tuple[Kind, str]:
    """Say by its output, its exit code and the kernel's count why a command failed."""
    with log.open("rb") as output:
        output.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        tail = output.read()
    lines = [line.strip() for line in tail.decode("utf-8", "replace").splitlines()]
    words = " / ".join([line for line in lines if line][-_TAIL_LINES:])
    if _OUT_OF_MEMORY.search(tail):
        return Kind.OUT_OF_MEMORY, words
    code = ended.code or 0
    how = f"signal {code - _SIGNALLED}" if code > _SIGNALLED else f"exit code {code}"
    if code == _SIGNALLED + _KILL:
        how = f"killed (signal {_KILL}); out of memory is one cause"
    said = f"{how}: {words}" if words else how
    if ended.out_of_memory:
        return Kind.OUT_OF_MEMORY, f"the kernel ended a process for memory; {said}"
    return Kind.CRASHED, said
