"""One rank's order, written the way the papers on V schedules write theirs: `F0 I0 W0 F1`."""

from __future__ import annotations

from collections import Counter
from typing import cast

from debubble.schedules.model import Action, Kind


class Script:
    """Turns words such as `F0` into actions, and counts the microbatches by itself.

    The number names a chunk of the rank; F, B and I take the next microbatch of their chunk. `W1`
    takes chunk 1's oldest input gradient without a weight gradient, `W` the oldest of any chunk.
    `F0&B1` is a pair that overlaps.
    """

    def __init__(self, *stages: int) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._next: Counter[tuple[bool, int]] = Counter()
        self._unweighted: list[Action] = []

    def run(self, words: str, times: int = 1) -> None:
        """Append the words, over and over."""
        cells = [word.partition("&") for word in words.split()]
        for _ in range(times):
            for first, _, second in cells:
                self._append(first, overlap=bool(second))
                if second:
                    self._append(second)

    def _append(self, word: str, *, overlap: bool = False) -> None:
        kind, chunk = cast("Kind", word[0]), word[1:]
        if kind == "W":
            self.actions.append(self._weigh(chunk))
            return
        stage = self._stages[int(chunk)]
        forward = kind == "F"
        action = Action(stage, kind, self._next[forward, stage], overlap)
        self._next[forward, stage] += 1
        self.actions.append(action)
        if kind == "I":
            self._unweighted.append(action)

    def _weigh(self, chunk: str) -> Action:
        """Return the weight gradient that is longest due."""
        wanted = {self._stages[int(chunk)]} if chunk else set(self._stages)
        due = next(n for n, action in enumerate(self._unweighted) if action.stage in wanted)
        action = self._unweighted.pop(due)
        return Action(action.stage, "W", action.microbatch)
