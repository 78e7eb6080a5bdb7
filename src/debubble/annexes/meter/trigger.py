"""A rank that wants a capture in → the step at which all ranks begin one.

Whoever asks first names a step that is far enough ahead for every rank to hear of it in time; all
take that step. The ranks' own store of torch.distributed carries it, off the job's thread: no rank
ever waits for another, and a rank that hears of it too late says so and takes no part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from debubble.capture.session import begin
from debubble.capture.settings import Settings as CaptureSettings

# In the meter's folder; whoever may write there may ask.
REQUEST_FILE = "capture-now"
_KEY = "debubble/meter/capture"
# Ranks look every so often for what was agreed; a thousand of them less often.
POLL_S = 0.25
_POLL_S_PER_RANK = 0.001
# Polls that may pass until all have looked, and steps on top: hosts run ahead of each other. On a
# machine with four times as much to do as it can, a thread was held up for more than four polls.
_POLLS_AHEAD, _STEPS_AHEAD = 8, 4


class Agreement:
    """Which step all ranks begin the next capture at."""

    def __init__(self, store: Any, world_size: int, every_s: float) -> None:
        self.store = store
        """None in a job of one process."""
        self.poll_s = max(POLL_S, world_size * _POLL_S_PER_RANK)
        self.step: int | None = None
        """Agreed, and not yet begun."""
        self.count = 0
        """Captures that were agreed on before."""
        self._every_s = every_s
        self._last_s = -math.inf

    def ask(self, now: int, step_s: float, *, clock: Callable[[], float] = time.monotonic) -> bool:
        """Name a step to the others, unless one is named or a capture was taken lately."""
        if self.step is not None or clock() - self._last_s < self._every_s:
            return False
        ahead = _STEPS_AHEAD + math.ceil(_POLLS_AHEAD * self.poll_s / max(step_s, 1e-4))
        self._settle(now + ahead, clock)
        return True

    def _settle(self, step: int, clock: Callable[[], float]) -> None:
        if self.store is not None:
            step = int(self.store.compare_set(f"{_KEY}/{self.count}", "", str(step)))
        self.step, self._last_s = step, clock()

    def listen(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Look whether another rank has named a step."""
        if self.step is None and self.store is not None:
            key = f"{_KEY}/{self.count}"
            if self.store.check([key]):
                self.step, self._last_s = int(self.store.get(key)), clock()

    def take(self) -> None:
        """Note that the capture was begun, or missed."""
        self.step = None
        self.count += 1


class TriggeredCapture:
    """A capture in a job that has run for a while; told each step until it is done."""

    def __init__(self, out: Path, steps: int, keep: int, pipeline: Any, done: int) -> None:
        settings = CaptureSettings(
            steps=steps, wait=done, out=out, keep=keep, tags={"by": "debubble meter"}
        )
        self._session = begin(settings, pipeline, done=done)
        self._session.__enter__()
        self._left = settings.length + 1

    def step(self) -> bool:
        """Pass a step on; False once the capture is done."""
        self._session.step()
        self._left -= 1
        if self._left > 0:
            return True
        self.close()
        return False

    def close(self) -> None:
        """End it, done or not."""
        self._session.close()

    @property
    def problems(self) -> list[str]:
        """What went wrong in it."""
        return self._session.problems


def asked_by_file(out: Path) -> bool:
    """Tell whether somebody put the file there, and take it away: it asks once."""
    file = out / REQUEST_FILE
    if not file.exists():
        return False
    with suppress(OSError):  # another rank was quicker, and asks as well
        file.unlink()
    return True
