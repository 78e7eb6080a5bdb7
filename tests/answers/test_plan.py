"""`plan`: one answer that text and JSON show alike, and nothing written that is not asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.traces.read_once import analyse_recording
from support.traces.recordings import H200

from debubble import api
from debubble.errors import UsageError
from debubble.report.plan import plan_page
from debubble.units import show_seconds

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run():
    return analyse_recording(H200 / "1f1b_p3_m7")


@pytest.fixture(scope="module")
def found(run):
    return api.plan(run, planned_for="any", emit="megatron")


def test_text_and_data_carry_the_same_numbers(found):
    (options, larger, *_), data = plan_page(found).tables, found.to_dict()
    rows = options.rows[1:] + larger.rows
    assert len(rows) == len(data["options"])
    for row, option in zip(rows, data["options"], strict=True):
        assert row[1] == show_seconds(option["numbers"]["batch_latency_s"])
        assert row[4] == f"{100 * option['throughput_gain_fraction']:+.1f} %"
        assert (row[6] == "yes") is option["recommended"]
    best = next(one for one in data["options"] if one["recommended"])
    assert show_seconds(best["numbers"]["batch_latency_s"]) in data["verdict"]
    assert f"{100 * best['throughput_gain_fraction']:+.0f} %" in data["verdict"]


def test_no_framework_of_that_name_is_refused_and_not_left_out(run):
    with pytest.raises(UsageError, match="no framework is called 'jax'"):
        api.plan(run, frameworks=("torch", "jax"))


@pytest.mark.slow
def test_the_verbs_are_called_by_their_names_though_packages_have_them_too():
    words = "import debubble; debubble.find; print(*map(callable, (debubble.links, debubble.plan, "
    words += "debubble.simulate))); from debubble.plan.change import Change; debubble.plan.__name__"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3
