"""Recorded GPU runs, predicted from each other: the bars of `benchmarks/predict.py` that hold."""

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
    return [predict.predict_pair(predict.RUNS, pair) for pair in predict.PAIRS]


@pytest.mark.slow
def test_half_of_the_runs_are_predicted_within_three_and_a_half_percent_and_all_within_eight(
    results,
):
    assert median(abs(result.error) for result in results) < 0.035
    assert all(abs(result.error) < max(0.08, 2 * result.noise) for result in results)
    assert all(abs(result.error) < 0.05 for result in results if result.trains)


def test_intervals_are_honest_and_narrow(results):
    assert sum(result.covered for result in results) >= 0.8 * len(results)
    assert median(result.width for result in results) < 0.15


def test_peak_memory_is_predicted(results):
    for result in results:
        allowed = (
            0.06
            if result.pair.change.microbatches or result.pair.change.schedule == "zbv"
            else 0.03
        )
        assert abs(result.memory_error) < allowed


def test_the_same_source_predicts_the_same(results):
    again = predict.predict_pair(predict.RUNS, predict.PAIRS[0])
    assert again.predicted_s == results[0].predicted_s
