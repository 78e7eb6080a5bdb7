"""Orders made for a recorded run: priced as options are, and written so that torch runs them."""

from __future__ import annotations

import json

import pytest
from support.services.console import REPOSITORY, type_command
from support.traces.read_once import analyse_recording

from debubble.errors import UsageError
from debubble.plan.change import Change
from debubble.plan.lever import OrderSearch, Start
from debubble.plan.levers import order
from debubble.plan.option import headroom_after, quick_latency_s
from debubble.plan.orders.search import find_order
from debubble.plan.request import Stated
from debubble.timeline.schedules import check_order, parse_order

RECORDED = REPOSITORY / "tests" / "data" / "h200" / "1f1b_p3_m7"
GIB = 2.0**30


def baseline_of(limit_bytes=None):
    return analyse_recording(RECORDED).baseline(Stated(limit_bytes=limit_bytes))


@pytest.fixture(scope="module")
def baseline():
    return baseline_of()


def test_an_order_is_no_slower_than_the_best_with_a_name_and_leaves_a_little_memory():
    limit = 4.7 * GIB
    little, question = baseline_of(limit), OrderSearch(rounds=6, cuts_anew=False)
    found = find_order(little, question)
    check_order(found.change.order)
    named = quick_latency_s(little, Change(schedule="zb-h1"))
    assert found.latency_s <= named
    assert found.latency_s == quick_latency_s(little, found.change)
    assert found.lower_bound_s < found.latency_s
    left = headroom_after(little, found.change)
    assert min(rank.bytes for rank in left) >= 0.005 * limit
    assert find_order(little, question) == found  # rounds decide alone


def test_nothing_is_found_where_no_order_fits():
    assert find_order(baseline_of(2 * GIB), OrderSearch(rounds=1, cuts_anew=False)) is None


def test_a_search_stops_when_its_time_is_up(baseline):
    times = iter(range(100))
    question = OrderSearch(seconds=3.0, clock=lambda: next(times), cuts_anew=False)
    assert find_order(baseline, question).rounds == 2


def test_forward_passes_alone_have_nothing_to_be_ordered():
    forward = REPOSITORY / "tests" / "data" / "h200" / "fwd_closed_m4"
    run = analyse_recording(forward)
    base = run.baseline()
    start = Start(baseline=base, timeline=run.timeline, search=OrderSearch(rounds=1))
    with pytest.raises(UsageError, match="forward passes have one order only"):
        next(order.ideas(start))


@pytest.mark.slow
def test_an_order_that_is_asked_for_and_cannot_be_told_is_refused_in_the_table(tmp_path):
    recorded = REPOSITORY / "tests" / "data" / "frameworks" / "mg_2321"
    flags = "--search 1 --json --quiet"
    answer = json.loads(type_command(f"debubble plan {recorded} {flags}", tmp_path).text)
    (refused,) = (one for one in answer["refused"] if one["lever"] == "order")
    assert refused["reason"] == "megatron takes no order of passes; --for any looks for one"
    asked = json.loads(type_command(f"debubble plan {recorded} {flags} --for any", tmp_path).text)
    # What it says of zb-h1 it can say of an order: torch runs weight gradients apart.
    order = asked["order"]["order"] if asked["order"] else ""
    (refused,) = [one for one in asked["refused"] if one["lever"] == "order"] or [None]
    assert "W" in order or "above the lower bound" in refused["reason"]


@pytest.mark.slow
def test_what_plan_finds_simulate_prices_alike_from_its_file(tmp_path):
    flags = "--memory-limit 4.7GiB --search 20 --emit torch -o order.csv --json --quiet"
    answer = type_command(f"debubble plan {RECORDED} {flags}", tmp_path)
    assert answer.code == 0, answer.text
    found = json.loads(answer.text)
    order = found["order"]
    option = found["options"][order["option"]]
    assert option["lever"] == "order"
    assert order["beyond_named_fraction"] > 0.01
    assert order["named_latency_s"] > option["numbers"]["batch_latency_s"]
    assert option["numbers"]["batch_latency_s"] > order["lower_bound_s"]
    assert option["fits_memory"]
    file = tmp_path / "order.csv"
    assert parse_order(file.read_text("utf-8")) == parse_order(order["order"])
    asked = type_command(
        f"debubble simulate {RECORDED} --schedule order.csv --split 4,4,4 --json", tmp_path
    )
    priced = json.loads(asked.text)["numbers"]["batch_latency_s"]
    assert priced == pytest.approx(option["numbers"]["batch_latency_s"], rel=0.01)
