"""`simulate`: one answer for a measured run and for costs by hand, as text and as data."""

from __future__ import annotations

import json

import msgspec
import pytest
from support.services.console import type_command
from support.traces.read_once import analyse_recording
from support.traces.recordings import H200

from debubble import api
from debubble.errors import UsageError
from debubble.report.answers.simulate import SimulateAnswer
from debubble.report.simulate import simulate_page
from debubble.units import show_seconds, show_share


@pytest.fixture(scope="module")
def run():
    return analyse_recording(H200 / "1f1b_p3_m7")


@pytest.fixture(scope="module")
def found(run):
    return api.simulate(run, microbatches=14, split=(4, 4, 4))


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    words = "debubble simulate --stages 4 --microbatches 8 --forward 5ms --transfer 1ms --json"
    return json.loads(type_command(words, tmp_path_factory.mktemp("hand")).text)


def test_text_and_data_carry_the_same_numbers(found):
    data, (numbers, ranks) = found.to_dict(), simulate_page(found).tables
    rows = {name.strip(): (was, would) for name, was, would in numbers.rows}
    measured, simulated = data["measured"], data["numbers"]
    for name, show in (("batch_latency_s", show_seconds), ("bubble_fraction", show_share)):
        row = "batch latency" if name == "batch_latency_s" else "bubble"
        assert rows[row] == (show(measured[name]), show(simulated[name]))
    assert [row[3] for row in ranks.rows] == [
        show_share(rank["bubble_fraction"]) for rank in data["ranks"]
    ]
    assert [row[2] for row in ranks.rows] == ["4", "4", "4"]
    assert show_seconds(simulated["batch_latency_s"]) in data["verdict"]


def test_what_was_computed_by_hand_has_no_measured_run(by_hand):
    answer = msgspec.convert(by_hand, SimulateAnswer)
    page = simulate_page(answer)
    (table,) = page.tables
    latency = show_seconds(answer.numbers.batch_latency_s)
    assert f"batch latency {latency}" in page.notes[0]
    assert [row[4] for row in table.rows] == [
        show_share(rank.bubble_fraction) for rank in answer.ranks
    ]
    assert answer.measured is answer.interval is answer.given.change is None


def test_python_and_the_command_line_say_the_same(found, tmp_path):
    words = "--microbatches 14 --split 4,4,4 --json"
    answer = type_command(f"debubble simulate tests/data/h200/1f1b_p3_m7 {words}", tmp_path)
    assert json.loads(answer.text) == found.to_dict()


def test_nothing_asked_is_the_run_as_it_is(run):
    found = api.simulate(run)
    assert found.given.changes_nothing
    assert found.to_dict()["given"]["change"] == {}
    assert found.findings == []
    again = api.simulate(run, schedule="1f1b", overlap=False, recompute=False)
    assert again == found


def test_what_cannot_be_is_refused_as_on_the_command_line(run):
    with pytest.raises(UsageError, match="the split 4,4,5 has 13 layers, the model has 12"):
        api.simulate(run, split=[4, 4, 5])
    with pytest.raises(UsageError, match="'fast' is no hop"):
        api.simulate(run, hops=["fast"])
    with pytest.raises(TypeError, match="asked already: step"):
        api.simulate(run, step=1)
