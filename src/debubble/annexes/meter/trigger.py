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

# In the meter's folder; whoever may write there may ask.
REQUEST_FILE = "capture-now"
_KEY = "debubble/meter/capture"
# The least time between two captures, whatever drifts, or whoever asks: a profiler that comes back
# more often is part of the problem.
EVERY_S = 600.0
# Ranks look every so often for what was agreed; a thousand of them less often.
POLL_S = 0.25
_POLL_S_PER_RANK = 0.001
# Polls that may pass until all have looked, and steps on top: hosts run ahead of each other. On a
# machine with four times as much to do as it can, a thread was held up for more than four polls.
_POLLS_AHEAD, _STEPS_AHEAD = 8, 4


class Agreement:
    """Which step all ranks begin the next capture at."""

    def __init__(
        self, store: Any, world_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.store = store
        """None in a job of one process."""
        self.poll_s = max(POLL_S, world_size * _POLL_S_PER_RANK)
        self.step: int | None = None
        """Agreed, and not yet begun."""
        self.count = 0
        """Captures that were agreed on before."""
        self._clock = clock
        self._last_s = -math.inf

    def ask(self, now: int, step_s: float) -> None:
        """Name a step to the others, unless one is named or a capture was taken lately."""
        if self.step is not None or self._clock() - self._last_s < EVERY_S:
            return
        step = now + _STEPS_AHEAD + math.ceil(_POLLS_AHEAD * self.poll_s / max(step_s, 1e-4))
        if self.store is not None:
            step = int(self.store.compare_set(f"{_KEY}/{self.count}", "", str(step)))
        self.step, self._last_s = step, self._clock()

    def listen(self) -> None:
        """Look whether another rank has named a step."""
        key = f"{_KEY}/{self.count}"
        if self.step is None and self.store is not None and self.store.check([key]):
            self.step, self._last_s = int(self.store.get(key)), self._clock()

    def take(self) -> None:
        """Note that the capture was begun, or missed."""
        self.step = None
        self.count += 1


def asked_by_file(out: Path) -> bool:
    """Tell whether somebody put the file there, and take it away: it asks once."""
    file = out / REQUEST_FILE
    if not file.exists():
        return False
    with suppress(OSError):  # another rank was quicker, and asks as well
        file.unlink()
    return True
