"""A level that moves and stays is found soon; what jobs do by themselves raises no alarm."""

from __future__ import annotations

import json
from statistics import median

import numpy as np
import pytest
from support.services.console import REPOSITORY

from debubble.annexes.drift import (
    REFERENCE,
    STAYS,
    Chart,
    Track,
    advance,
    first_alarm,
    is_alarm,
    score,
)

SERIES = REPOSITORY.parent / "shared" / "recordings" / "series"
# What is known to have moved by itself: a start that goes up by a tenth and back, and, from step
# 5985 of the long one, 145 values that take 1.4 times as long.
STARTS, MOVED = 150, 5985


def noise(count=340, *, spread=0.01, seed=7):
    return np.exp(np.random.default_rng(seed).normal(0, spread, count))


def windows(name, size):
    """Windows of a series in which nothing moved, each capture the median of so many steps."""
    file = SERIES / f"{name}.json"
    if not file.exists():
        pytest.skip("the series are not here")
    steps = json.loads(file.read_text("utf-8"))["step_time"][STARTS:]
    values = [median(steps[at : at + size]) for at in range(0, len(steps) - size + 1, size)]
    for at in range(0, len(values) - 339, 340):
        if not at * size <= MOVED - STARTS < (at + 340) * size or len(steps) < MOVED:
            yield np.array(values[at : at + 340])


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize(
    "name", ["deepseekv3_pp4_h100", "deepseekv3_pp4_h100_short", "mixtral_tp2_pp4_h100"]
)
def test_step_times_of_real_jobs_raise_no_alarm_and_a_tenth_more_is_found(name, size):
    delays = []
    for window in windows(name, size):
        assert first_alarm(window.tolist()) is None
        window[100:] *= 1.1
        delays.append(first_alarm(window.tolist()) - 99)
    assert not delays or median(delays) <= 6


@pytest.mark.parametrize(("change", "within"), [(1.05, 20), (1.10, 6)])
def test_a_change_that_stays_is_found_soon(change, within):
    for seed in range(20):
        values = noise(seed=seed)
        values[100:] *= change
        assert STAYS <= first_alarm(values.tolist()) - 99 <= within


def test_slow_captures_and_a_level_that_wanders_raise_hardly_any_alarm():
    raised = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        slow = rng.random(340) < 0.06
        wander = np.convolve(rng.normal(0, 0.015, 360), np.ones(6) / 6**0.5)[10:350]
        raised += first_alarm(((1 + wander) * (1 + 0.4 * slow)).tolist()) is not None
    assert raised <= 5


def test_a_change_that_nobody_is_woken_for_is_none_however_steady_the_captures_are():
    assert first_alarm([0.2] * REFERENCE + [0.205] * 300) is None
    assert first_alarm([0.2] * REFERENCE + [0.214] * STAYS) == REFERENCE + STAYS - 1


def test_one_wild_capture_is_no_alarm_and_spoils_no_reference():
    values = noise()
    values[5] = values[REFERENCE + 3] = 50.0
    assert first_alarm(values.tolist()) is None
    track = followed(values[: REFERENCE + 4], Chart(worse="up"))
    assert track.recent == track.level == pytest.approx(1.0, abs=0.01)
    values[60:] *= 1.1
    assert first_alarm(values.tolist()) <= 60 + STAYS


def followed(values, chart):
    track = Track()
    for at, value in enumerate(values):
        track = advance(track, value, chart, at)
    return track


def test_only_what_gets_worse_is_an_alarm():
    up, down = Chart(worse="up"), Chart(worse="down")
    track = followed([*noise(60), *noise(20) * 1.2], up)
    assert is_alarm(track, up)
    assert not is_alarm(track, down)
    assert score(track, up) > 1 > score(track, down)


def test_an_alarm_says_since_when_and_to_what_and_ends_soon_after_its_cause():
    chart = Chart(worse="up")
    moved = [*noise(60), *noise(200) * 1.2]
    track = followed(moved, chart)
    assert track.moving.since == 60
    assert track.recent == pytest.approx(1.2, abs=0.01)
    assert not is_alarm(followed([*moved, *noise(2 * STAYS)], chart), chart)


def test_shares_change_by_differences():
    chart = Chart(worse="up", is_share=True)
    for level in (0.05, 0.5):
        assert not is_alarm(followed([level] * 60 + [level + 0.025] * 60, chart), chart)
        assert is_alarm(followed([level] * 60 + [level + 0.06] * STAYS, chart), chart)
