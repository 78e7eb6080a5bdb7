"""The detector of drift on step times of real jobs: `python benchmarks/drift.py SERIES.json …`.

A series is cut into windows of 340 captures, each the median of 1, 3 or 5 steps: how many raise an
alarm, and after how many captures those that do not find everything 5 and 10 % slower from one
of three places on. A file holds `step_time`, a list of seconds. What moved in a series by itself
raises alarms as well, and is found out by looking: the places are printed, as indices of steps.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from debubble.annexes.drift import REFERENCE, first_alarm

WINDOW = REFERENCE + 300
PLANTED = (REFERENCE + 20, REFERENCE + 110, REFERENCE + 210)
PATIENCE = 60
BARS = ((0.05, 20), (0.10, 6))


def captures(steps: Sequence[float], size: int) -> list[float]:
    """Return the medians of so many steps each."""
    return [median(steps[at : at + size]) for at in range(0, len(steps) - size + 1, size)]


def delays(window: list[float], change: float) -> list[float]:
    """Return after how many captures a planted change raises an alarm, for each place."""
    found = []
    for at in PLANTED:
        moved = window[:at] + [value * (1 + change) for value in window[at : at + PATIENCE]]
        index = first_alarm(moved)
        found.append(float("inf") if index is None else index - at + 1)
    return found


def judge(name: str, steps: Sequence[float], size: int) -> None:
    """Print what the detector does with one series."""
    values = captures(steps, size)
    windows = [values[at : at + WINDOW] for at in range(0, len(values) - WINDOW + 1, WINDOW)]
    alarms = [first_alarm(window) for window in windows]
    quiet = [window for window, alarm in zip(windows, alarms, strict=True) if alarm is None]
    words = [f"{len(windows) - len(quiet)} of {len(windows)} windows alarm"]
    for change, bar in BARS:
        late = [delay for window in quiet for delay in delays(window, change)]
        if late:
            within = sum(delay <= bar for delay in late) / len(late)
            words.append(f"+{change:.0%} after {median(late):g}, {within:.0%} within {bar}")
    at = [(n * WINDOW + a) * size for n, a in enumerate(alarms) if a is not None]
    print(f"{name:36} {size} {'; '.join(words)}{f'; at steps {at}' if at else ''}", flush=True)


def main() -> None:
    """Judge every series."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("series", type=Path, nargs="*")
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    given = parser.parse_args()
    if given.tiny:
        rng = random.Random(0)  # noqa: S311 (noise)
        judge("noise of 1 %", [rng.lognormvariate(0, 0.01) for _ in range(WINDOW)], 1)
    for file in given.series:
        for size in (1, 3, 5):
            judge(file.stem, json.loads(file.read_text("utf-8"))["step_time"], size)


if __name__ == "__main__":
    main()
