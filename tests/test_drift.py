"""A level that moves is found soon; quiet figures stay quiet, at the stated rate."""

from __future__ import annotations

import numpy as np
import pytest

from debubble.drift import QUIET_CAPTURES, Chart, Track, advance, alarm, score
from debubble.errors import UsageError

UP = Chart(sides="up")


def values(count, captures, *, shift=0.0, seed=7):
    """Quiet series around 0.2; after the reference they lie so many sigma higher."""
    drawn = np.random.default_rng(seed).normal(0.2, 0.02, (count, UP.reference + captures))
    drawn[:, UP.reference :] += 0.02 * shift
    return drawn.tolist()


def first_alarm(series, chart):
    track = Track()
    for place, value in enumerate(series):
        track = advance(track, value, chart)
        if alarm(track, chart):
            return place - chart.reference + 1
    return None


@pytest.mark.slow
@pytest.mark.parametrize("sides", ["up", "down", "both"])
def test_quiet_series_raise_alarms_at_the_stated_rate(sides):
    chart = Chart(sides=sides)
    raised = [first_alarm(one, chart) is not None for one in values(500, QUIET_CAPTURES)]
    # 5 % are allowed; three standard errors of 500 series are 2.9 %.
    assert np.mean(raised) <= chart.rate + 0.029


@pytest.mark.parametrize("seed", [1, 2])
def test_a_shift_of_two_sigma_is_found_within_fifteen_captures(seed):
    delays = [first_alarm(one, UP) for one in values(500, 15, shift=2.0, seed=seed)]
    assert np.mean([delay is not None for delay in delays]) >= 0.95


def test_the_threshold_is_no_higher_than_the_rate_needs():
    rng = np.random.default_rng(3)
    heavy = 0.2 + 0.02 * rng.standard_t(5, (500, UP.reference + QUIET_CAPTURES))
    raised = [first_alarm(one, UP) is not None for one in heavy.tolist()]
    assert 0.015 <= np.mean(raised) <= UP.rate + 0.029


def test_each_side_sees_its_own_direction_alone():
    (series,) = values(1, 30, shift=5.0)
    track = Track()
    for value in series:
        track = advance(track, value, UP)
    assert alarm(track, UP) == "up"
    assert alarm(track, Chart(sides="down")) is None
    assert alarm(track, Chart(sides="both")) == "up"
    assert score(track, UP) > 1 > score(track, Chart(sides="down"))


def test_one_wild_capture_is_no_alarm_and_spoils_no_reference():
    (series,) = values(1, 20)
    series[5], series[UP.reference + 3] = 50.0, 50.0
    assert first_alarm(series, UP) is None
    assert first_alarm([*series, *[0.26] * 8], UP) is not None


def test_scale_and_unit_change_nothing():
    (series,) = values(1, 60, shift=1.5)
    assert first_alarm(series, UP) == first_alarm([1e9 * one for one in series], UP)


def test_factors_are_seen_alike_at_any_level():
    chart = Chart(sides="up", by_factors=True)
    (series,) = values(1, 60, shift=1.5)
    assert first_alarm(series, chart) == first_alarm([1e-6 * one for one in series], chart)


def test_a_level_that_never_varied_is_not_alarmed_by_a_thousandth():
    assert first_alarm([0.2] * 40 + [0.2002] * 300, UP) is None
    assert first_alarm([0.2] * 40 + [0.21] * 10, UP) is not None


def test_a_reference_without_a_simulated_threshold_is_refused():
    with pytest.raises(UsageError, match="reference of 33"):
        Chart(sides="up", reference=33)
