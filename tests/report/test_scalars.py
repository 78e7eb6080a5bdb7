"""Figures of a run as named numbers, as trackers take them."""

from __future__ import annotations

import re

import pytest
from support.traces.read_once import analyse_recording
from support.traces.recordings import DATA, H200

import debubble
from debubble.report.scalars import scalars

# What MLflow allows in the name of a metric; TensorBoard and Weights & Biases allow more.
NAME = re.compile(r"[\w\-. /]{1,250}")


@pytest.fixture(scope="module")
def found():
    return debubble.find(analyse_recording(H200 / "1f1b_p3_m7"))


def test_every_figure_has_a_name_that_all_trackers_take_and_is_a_float(found):
    values = debubble.scalars(found)
    assert all(NAME.fullmatch(name) for name in values)
    assert {type(value) for value in values.values()} == {float}
    assert values["debubble/bubble_fraction"] == found.numbers.bubble_fraction
    assert values["debubble/cause/imbalance_fraction"] == found.ledger.shares["imbalance"]
    assert values["debubble/saving/imbalance_s"] == pytest.approx(0.0178, abs=1e-4)
    peaks = [values[f"debubble/peak_memory_bytes/rank{rank}"] for rank in range(3)]
    assert peaks == [*found.numbers.peak_memory_bytes]


def test_what_is_not_known_has_no_line(found):
    assert found.numbers.tokens_per_s is None
    assert "x/tokens_per_s" not in scalars(found, prefix="x")


def test_a_stream_has_its_figures_too():
    values = debubble.scalars(debubble.find(analyse_recording(DATA / "serving" / "k4")))
    assert values["debubble/bubble_fraction"] > 0
    assert values["debubble/cause/uneven_fraction"] > 0
