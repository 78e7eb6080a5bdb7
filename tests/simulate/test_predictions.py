"""Recorded GPU runs, foretold from each other: the bars of `benchmarks/predict.py` that hold."""

from __future__ import annotations

import importlib.util
import sys
from statistics import median

import pytest
from support.services.console import REPOSITORY
from support.traces.recordings import existing

pytestmark = pytest.mark.slow

_spec = importlib.util.spec_from_file_location("predict", REPOSITORY / "benchmarks" / "predict.py")
predict = importlib.util.module_from_spec(_spec)


@pytest.fixture(scope="module")
def results():
    sys.modules["predict"] = predict
    _spec.loader.exec_module(predict)
    existing(predict.RUNS)
    return [predict.foretell(predict.RUNS, pair) for pair in predict.PAIRS]


@pytest.mark.slow
def test_half_of_the_runs_are_foretold_within_three_and_a_half_percent_and_all_within_eight(
    results,
):
    assert median(abs(one.error) for one in results) < 0.035
    assert all(abs(one.error) < max(0.08, 2 * one.noise) for one in results)
    assert all(abs(one.error) < 0.05 for one in results if one.trains)


def test_intervals_are_honest_and_narrow(results):
    assert sum(one.covered for one in results) >= 0.8 * len(results)
    assert median(one.width for one in results) < 0.15


def test_peak_memory_is_foretold(results):
    for one in results:
        allowed = (
            0.06 if one.pair.change.microbatches or one.pair.change.schedule == "zbv" else 0.03
        )
        assert abs(one.memory_error) < allowed


def test_the_same_source_foretells_the_same(results):
    again = predict.foretell(predict.RUNS, predict.PAIRS[0])
    assert again.predicted_s == results[0].predicted_s
