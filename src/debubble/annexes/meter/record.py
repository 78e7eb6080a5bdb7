"""Moments of passes and messages in → finished steps out, read late and never waited for.

```
host      step 7 │ F0 ··· send ··· F1 │ step 8 │ F0 ···        marks go into the open step
device           │      F0 ··· send ··· F1 │                    and are passed later
read                                            step 7 ▲        once its end is behind
```

On a CPU a mark is the host's clock. On CUDA it is an event in the device's queue, taken from a pool
and given back once read; nobody ever waits for one. What does not fit into the buffers is dropped,
and its step is left out whole: half a step would be a wrong one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from debubble.capture.sidecar import uses_cuda
from debubble.units import NS_PER_MS

# A pass or a message: a step of 256 microbatches has some two thousand.
MOST_ROWS = 20_000
# Steps that the host may be ahead of what was read; then steps are left out until that is less.
MOST_STEPS = 256
# Clocks of devices and hosts drift apart by some millionths: what a device was seen to be ahead of
# its host is forgotten at this pace.
_DRIFT = 2e-5

OP, STAGE, MICROBATCH, START, END, BYTES, PEER, QUEUE = range(8)
"""The places of a row. Start and end are marks until the step is read, then ns since the epoch."""
PASSES = frozenset("FBIW")
Row = list[Any]


class Clock(Protocol):
    """Something that marks moments, and later tells when they were."""

    def mark(self) -> Any:
        """Mark this moment; None if it cannot be now."""

    def mark_again(self, used: Any) -> Any:
        """Mark this moment by a mark that is not needed any more."""

    def mark_arrival(self, work: Any, wait: Callable[[Any], Any]) -> Any:
        """Mark when a message will be there, before the job waits for it; None: mark it after."""

    def read(self, step: Step) -> bool:
        """Turn the marks of a step into times; False while they are not all behind the device."""


@dataclass(slots=True)
class Step:
    """What one rank did from one beat to the next."""

    number: int
    began: Any
    """The mark of its beginning."""
    rows: list[Row] = field(default_factory=list)
    ended: Any = None
    """The mark of its end, the next one's beginning."""
    whole: bool = True
    start_ns: int = 0
    end_ns: int = 0


def _epoch_of_host_clock() -> int:
    """Return what to add to marks of the host: the tightest of three looks at both its clocks.

    A process that is held up between the two looks would lay a whole step beside the others'.
    """
    looks = []
    for _ in range(3):
        before, epoch, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        looks.append((after - before, epoch - (before + after) // 2))
    return min(looks)[1]


class HostClock:
    """Marks of a CPU: the host does the work itself, so its own time is when it was done."""

    mark = staticmethod(time.perf_counter_ns)
    """Between passes caches are cold: a call of Python's own takes a tenth of one of ours."""

    def mark_again(self, used: Any) -> int:  # noqa: ARG002 (as of a device)
        """Read the clock."""
        return self.mark()

    def mark_arrival(self, work: Any, wait: Callable[[Any], Any]) -> None:
        """Leave it to the moment after the wait."""

    def read(self, step: Step) -> bool:
        """Lay the host's times on the clock that all processes of a host share."""
        since = _epoch_of_host_clock()
        for row in step.rows:
            row[START] += since
            row[END] = row[START] if row[END] is None else row[END] + since
        step.start_ns, step.end_ns = step.began + since, step.ended + since
        return True


class DeviceClock:
    """Marks of a CUDA device: events in its queues, each with the host's time of asking for it.

    A device passes a mark no sooner than it is asked to. Whenever its queue is empty it does so at
    once: the largest of these differences lays its clock on the host's, to some ten microseconds.
    """

    def __init__(self) -> None:
        self._free: list[Any] = []
        self._queues: dict[int, Any] = {}
        """The job's queues by address: to ask for the current one anew takes microseconds."""
        self._device = torch.cuda.current_device()
        self._beside: Any = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        """Waits for messages and marks them, so that compute before the wait hides no end. Streams
        of one priority may share a queue of the device, and be held up by its compute."""
        self._origin: tuple[Any, float] | None = None
        """The last end of a step that was read, and its time on the device's clock."""
        self._ahead: tuple[float, float] | None = None
        """By how much the host's clock is ahead of the device's, and when that was seen."""

    def mark(self, used: Any = None) -> Any:
        """Put an event into the current queue; None while a CUDA graph is captured."""
        if torch.cuda.is_current_stream_capturing():
            return None
        if used is not None:
            event = used[1]
        else:
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        address = torch._C._cuda_getCurrentRawStream(self._device)  # noqa: SLF001 (as compilers do)
        queue = self._queues.get(address)
        if queue is None:
            queue = self._queues[address] = torch.cuda.current_stream(self._device)
        asked = time.perf_counter_ns()
        event.record(queue)
        return asked, event

    mark_again = mark

    def mark_arrival(self, work: Any, wait: Callable[[Any], Any]) -> Any:
        """Let a queue of our own wait for the message, as the job's does next, and mark it there.

        The job's wait follows at once: what it frees then is free in its own queue, as ever.
        """
        if torch.cuda.is_current_stream_capturing():
            return None
        with torch.cuda.stream(self._beside):
            wait(work)
            return self.mark()

    def read(self, step: Step) -> bool:
        """Read the events, if the device is past the step's end."""
        if not step.ended[1].query():
            return False
        marks = {id(step.began): step.began, id(step.ended): step.ended}
        for row in step.rows:
            marks[id(row[START])] = row[START]
            if row[END] is not None:
                marks[id(row[END])] = row[END]
        begun, base = step.began[1], 0.0
        if self._origin is not None:
            base = self._origin[1]
            if self._origin[0] is not begun:
                base += self._origin[0].elapsed_time(begun) * NS_PER_MS
        try:
            passed = {
                name: base + begun.elapsed_time(event) * NS_PER_MS
                for name, (_, event) in marks.items()
            }
        except RuntimeError:  # a mark of our own queue that is not passed yet
            return False
        at = passed[id(step.ended)]
        ahead = max(asked - passed[name] for name, (asked, _) in marks.items())
        if self._ahead is not None:
            ahead = max(ahead, self._ahead[0] - _DRIFT * (at - self._ahead[1]))
        self._ahead = ahead, at
        since = _epoch_of_host_clock() + int(ahead)  # no float holds an epoch's ns
        through: dict[Any, tuple[int, int, int]] = {}
        ends = self._ends(step.rows, passed)
        for row, ended_at in zip(step.rows, ends, strict=True):
            together = id(row[END])
            start, end = int(passed[id(row[START])]) + since, int(ended_at) + since
            if row[QUEUE] is not None:
                # It begins once the one before it in its queue is through; or is one with it.
                mark, began, ended = through.get(row[QUEUE], (0, start, start))
                is_one = mark == together and row[END] is not None
                start = began if is_one else min(max(start, ended), end)
                through[row[QUEUE]] = together, start, end
            row[START], row[END] = start, end
        step.start_ns, step.end_ns = int(passed[id(step.began)]) + since, int(at) + since
        self._origin = step.ended[1], at
        self._free += [mark[1] for mark in marks.values() if mark is not step.ended]
        return True

    def _ends(self, rows: list[Row], passed: dict[int, float]) -> list[float]:
        """Return when each row ended, on the device's clock.

        Messages of a queue end one after the other. Devices with few queues may pass the mark of a
        wait late: a message that seems to end after the next did was through, at the latest, when
        that was asked for.
        """
        ends = []
        following: dict[Any, tuple[int, float, float]] = {}
        for row in reversed(rows):
            began = passed[id(row[START])]
            ended = began if row[END] is None else passed[id(row[END])]
            if row[QUEUE] is not None:
                mark, asked, done = following.get(row[QUEUE], (id(row[END]), began, ended))
                if mark != id(row[END]) and ended > done:
                    ended = max(began, min(asked, done))
                following[row[QUEUE]] = id(row[END]), began, ended
            ends.append(ended)
        return ends[::-1]


class Recorder:
    """Takes rows into the open step, and hands out steps once they can be read."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock | None
        self.mark: Callable[[], Any]
        self.mark_again: Callable[[Any], Any]
        """The clock's own, at one call."""
        self.on_host: bool
        """Whether the host's own time is when things were done."""
        self._set(clock)
        self.number = 0
        """Of the open step."""
        self.left_out = 0
        """Steps that were not recorded whole."""
        self.inside: Row | None = None
        """The pass under way: what it sends goes to no other stage."""
        self.telling: Row | None = None
        """The same, if its work tells when it begins and ends."""
        self.last: Row | None = None
        """The newest row of the open step."""
        self._open: Step | None = None
        self._ended: deque[Step] = deque()

    def _set(self, clock: Clock | None) -> None:
        self.clock = clock
        self.mark = _mark_nothing if clock is None else clock.mark
        self.mark_again = _mark_nothing if clock is None else clock.mark_again
        self.on_host = isinstance(clock, HostClock)

    def beat(self) -> None:
        """End the open step, and begin the next."""
        if self.clock is None:
            self._set(_choose_clock())
        now = self.mark()
        step, self._open = self._open, None
        self.inside = self.telling = self.last = None
        if step is not None:
            self.number += 1
            if now is not None and step.whole:
                step.ended = now
                self._ended.append(step)
            else:
                self.left_out += 1
        if now is not None and len(self._ended) < MOST_STEPS:
            self._open = Step(self.number, now)
        else:
            self._open = Step(self.number, now, whole=False)

    def finished(self) -> list[Step]:
        """Return the steps that ended and can be read, the oldest first."""
        read = []
        while self._ended and self.clock is not None and self.clock.read(self._ended[0]):
            read.append(self._ended.popleft())
        return read

    def begin(self, op: str, stage: int, microbatch: int, *, tells: bool = False) -> Row | None:
        """Begin a pass, or something outside of passes; None where it is not recorded.

        `tells`: its work will tell when it begins and ends. Of a pass that computes around autograd
        as well, as DeepSpeed's do, it must not. Nor of the begin of input gradients on a CPU: torch
        first looks at all weights, which are operators there, and nothing to a device.
        """
        step = self._open
        if step is None or not step.whole:
            return None
        if len(step.rows) >= MOST_ROWS:
            step.whole, step.rows, self.last = False, [], None
            return None
        mark = None
        if not tells or (op == "I" and self.on_host):
            mark = self.mark()
            if mark is None:
                return None
        self.last = row = [op, stage, microbatch, mark, None, -1, -1, None]
        step.rows.append(row)
        if op in PASSES:
            self.inside = row
            self.telling = row if tells else None
        return row

    def end(self, row: Row) -> None:
        """End what was begun, unless its work has told its end."""
        self.inside = self.telling = None
        if row[END] is None:
            row[END] = self.mark()
        if row[START] is None:
            row[START] = row[END]  # it did nothing

    def stop(self) -> None:
        """Record nothing from here on."""
        self._open = self.last = None
        self._set(None)
        self._ended.clear()

    def mark_arrival(self, work: Any, wait: Callable[[Any], Any]) -> Any:
        """Mark when a message will be there; None where that is known after the wait alone."""
        return None if self.clock is None else self.clock.mark_arrival(work, wait)

    @property
    def pending(self) -> int:
        """Steps that have ended and are not read yet."""
        return len(self._ended)


def _mark_nothing(_used: Any = None) -> None:
    """Stand in for a clock before the first step, and after the last."""


def _choose_clock() -> Clock:
    """Take the device's clock where this process uses one."""
    return DeviceClock() if uses_cuda() else HostClock()
