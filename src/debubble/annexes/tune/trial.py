"""A command in → one run of it: its process, its capture, what was measured, whether it counts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from debubble.analysis import Analysis, analyse_found
from debubble.annexes.tune.guard import SIGNALLED
from debubble.annexes.tune.setting import Setting, Template
from debubble.capture.files import list_captures, prepare_out, remove_captures
from debubble.capture.settings import Settings, environment_for
from debubble.errors import DebubbleError, TuneError
from debubble.measure.compare import compare
from debubble.measure.measurement import Measurement
from debubble.measure.prediction import NEARLY, Came, Prediction, check_prediction, growth_of
from debubble.plan.change import Hold
from debubble.trace.run import find_run
from debubble.units import show_bytes, show_percent, show_times

GUARD = Path(__file__).with_name("guard.py")
MARK = "DEBUBBLE_TUNE_RUN"
"""In the environment of every process of a run: whose it is."""
_PROC = Path("/proc")
LOG = "output.log"
MARKER = ".debubble-run"
"""In the folder of a run that found it empty: what has a run's names in there is a run's."""
# The end of a traceback, with the line that failed.
_TAIL_LINES = 3
_TAIL_BYTES = 1 << 16
_OUT_OF_MEMORY = re.compile(
    rb"out of memory|OutOfMemoryError|MemoryError|Cannot allocate memory|can't allocate memory",
    re.IGNORECASE,
)
# Passes of a quiet machine take up to 1.4 % more than usual on the mean, by 34 captures of 2 cores;
# those of a disturbed one 2.5 % and more, by 6.
STEADY = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How a command ended."""

    code: int | None
    """As a shell says it, 128 + N for signal N; None where it was stopped for its time."""
    seconds: float
    out_of_memory: bool = False
    """Whether the kernel killed a process of this machine for memory meanwhile."""


@contextlib.contextmanager
def guarded(
    words: Sequence[str], environment: Mapping[str, str], *, token: str, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command under its guard; all that came of it ends with the `with`."""
    with log.open("wb") as output:
        guard = subprocess.Popen(  # noqa: S603 (our own file, and the user's command after it)
            [sys.executable, "-I", "-S", str(GUARD), *words],
            env={**environment, MARK: token},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield guard
    finally:
        if guard.stdin is not None:
            guard.stdin.close()  # the guard's word to end whatever still runs
        guard.wait()
        end_marked(token)


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
    code: int | None
    with guarded(words, environment, token=token, log=log) as guard:
        try:
            code = guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
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
    marks = (mark, mark + b".load")
    ended = 0
    for folder in _PROC.glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            if not any(known in environment for known in marks):
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
    OTHER_BATCH = "other_batch"
    """It trained with a larger batch, which nobody asked for."""
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
    disturbed: bool = False
    """Whether it came slower than predicted on a busy machine: it tells little of the setting."""


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
    is_new = not out.exists() or not any(out.iterdir())
    prepare_out(out)
    if is_new:
        (out / MARKER).touch()
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
        return came_of(*say_failure(ended, out / LOG))
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


def clear_trial(out: Path) -> None:
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


def say_failure(ended: ProcessEnd, log: Path) -> tuple[Kind, str]:
    """Say by its output, its exit code and the kernel's count why a command failed."""
    with log.open("rb") as output:
        output.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        tail = output.read()
    lines = [line.strip() for line in tail.decode("utf-8", "replace").splitlines()]
    words = " / ".join([line for line in lines if line][-_TAIL_LINES:])
    if _OUT_OF_MEMORY.search(tail):
        return Kind.OUT_OF_MEMORY, words
    code = ended.code or 0
    how = f"signal {code - SIGNALLED}" if code > SIGNALLED else f"exit code {code}"
    if code == SIGNALLED + signal.SIGKILL:
        how = f"killed (signal {signal.SIGKILL:d}); out of memory is one cause"
    said = f"{how}: {words}" if words else how
    if ended.out_of_memory:
        return Kind.OUT_OF_MEMORY, f"the kernel ended a process for memory; {said}"
    return Kind.CRASHED, said


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """The first run, that others are held against."""

    setting: Setting
    reading: Analysis


def judge(  # noqa: PLR0913 (a run, and what it was to be)
    outcome: Outcome,
    setting: Setting,
    reading: Analysis | None,
    *,
    first: First | None,
    limit_bytes: int | None,
    hold: Hold | None = None,
    prediction: Prediction | None = None,
) -> Outcome:
    """Turn away a run that is not what was asked for; say of others if they came as predicted.

    It ignored its setting, took more memory than there is, or trained with a larger batch where
    that was to be held.
    """
    measured = outcome.measurement
    if measured is None or reading is None:
        return outcome
    ignored = [] if first is None else what_was_ignored(setting, reading, first)
    if ignored:
        said = [_say_ignored(knob, setting, measured) for knob in ignored]
        return replace(outcome, kind=Kind.IGNORED, message="; ".join(said), ignored=tuple(ignored))
    before = None if first is None else first.reading.measurement
    over = over_memory(measured, before, limit_bytes)
    if over:
        return replace(outcome, kind=Kind.OVER_MEMORY, message=over)
    grown = None if before is None else growth_of(before, measured)
    if hold == "batch" and grown is not None and grown > 1 + NEARLY:
        message = f"its batch is {show_times(grown)} as large, which changes training"
        return replace(outcome, kind=Kind.OTHER_BATCH, message=message)
    if prediction is None:
        return outcome
    busy, why = excess(reading), ""
    if busy > STEADY:
        why = f"the machine was busy, passes took {show_percent(busy)} longer than usual"
    check = check_prediction(prediction, before, measured, why_slower=why)
    disturbed = bool(why) and check.verdict is Came.SLOWER
    return replace(outcome, message=check.sentence, disturbed=disturbed)


def excess(reading: Analysis) -> float:
    """Return how much longer passes took, on the mean, than those of their stage usually do."""
    passes = reading.timeline.passes
    kept = [window.step for window in reading.pipeline.windows]
    passes = passes.where(np.isin(passes.step, kept))
    took = (passes.end_ns - passes.start_ns).astype(np.float64)
    usual = np.zeros(len(took))
    for alike in np.unique(np.stack((passes.stage, passes.kind)), axis=1).T:
        mine = (passes.stage == alike[0]) & (passes.kind == alike[1])
        usual[mine] = np.median(took[mine])
    return float(took.sum() / usual.sum() - 1) if usual.sum() > 0 else 0.0


def what_was_ignored(setting: Setting, reading: Analysis, first: First) -> list[str]:
    """Return which of the things that were to change did not, as far as traces tell."""
    found = []
    for knob in setting.differing(first.setting):
        before = getattr(first.reading.measurement, knob, None)
        after = getattr(reading.measurement, knob, None)
        as_before = before is not None and before == after
        if as_before or contradicts(setting, knob, reading.measurement):
            found.append(knob)
    return found


def contradicts(setting: Setting, knob: str, measured: Measurement) -> bool:
    """Tell whether another number of microbatches or another split ran than was said.

    A split with another sum is none: there layers were counted otherwise.
    """
    told, came = getattr(setting, knob), getattr(measured, knob, None)
    if knob not in ("microbatches", "split") or told is None or came is None:
        return False
    if isinstance(told, tuple) and isinstance(came, tuple):
        return sum(told) == sum(came) and told != came
    return bool(told != came)


def _say_ignored(knob: str, setting: Setting, measured: Measurement) -> str:
    asked = f"{knob} {setting.written(knob)} was asked for, and"
    if contradicts(setting, knob, measured):
        return f"{asked} {Setting(**{knob: getattr(measured, knob)}).written(knob)} ran"
    return f"{asked} the measured {knob} did not change"


def over_memory(measured: Measurement, first: Measurement | None, limit_bytes: int | None) -> str:
    """Say which rank took more than is safe, by the rule of `compare`; nothing where all fit."""
    compared = compare(first or measured, measured, limit_bytes=limit_bytes)
    for rank in compared.memory:
        left = rank.headroom_bytes
        if rank.unsafe and left is not None and rank.after_bytes is not None:
            how = f"{show_bytes(-left)} more than its limit"
            if left >= 0:
                how = f"which leaves {show_bytes(left)}: too little to be safe"
            return f"rank {rank.rank} took {show_bytes(rank.after_bytes)}, {how}"
    return ""
