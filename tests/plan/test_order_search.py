"""Orders made for a recorded run: priced as options are, and written so that torch runs them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.services.console import REPOSITORY, type_command
from support.traces.read_once import analyse_recording

from debubble.annexes.tune.prospects import _in_a_file
from debubble.annexes.tune.setting import Setting
from debubble.errors import CannotBeTold, UsageError
from debubble.plan.change import SEARCHED, Change
from debubble.plan.emit import emit
from debubble.plan.lever import Refusal
from debubble.plan.option import all_fit, headroom_after, quick_latency_s
from debubble.plan.order_search import OrderSearch, check_search, find_order, pipeline_of
from debubble.plan.orders.messages import window_of
from debubble.plan.request import Stated
from debubble.report.answers.change import describe, describe_refused
from debubble.timeline.schedules import check_order, order_of, parse_order
from debubble.units import NS_PER_S

RECORDED = REPOSITORY / "tests" / "data" / "h200" / "1f1b_p3_m7"
GIB = 2.0**30
THREE = ((0,), (1,), (2,))


def baseline_of(limit_bytes=None):
    return analyse_recording(RECORDED).baseline(Stated(limit_bytes=limit_bytes))


@pytest.fixture(scope="module")
def baseline():
    return baseline_of()


@pytest.fixture(scope="module")
def looked(baseline):
    """What two rounds find."""
    return find_order(baseline, OrderSearch(rounds=2, cuts_anew=False))


@pytest.fixture(scope="module")
def small():
    """The run with less memory than any schedule with a name needs."""
    return baseline_of(3.6 * GIB)


@pytest.fixture(scope="module")
def lighter(small):
    """What two rounds find there: stages have to recompute."""
    return find_order(small, OrderSearch(rounds=2, cuts_anew=False)).change


def test_the_quick_model_is_near_the_simulator_that_prices_options(baseline):
    base = Change(schedule=SEARCHED)
    pipeline, sent = pipeline_of(baseline, base, THREE)
    for name in ("zb-h1", "zb-h2", "gpipe"):
        order = order_of(name, 3, 7)
        priced = quick_latency_s(baseline, replace(base, order=order)) * NS_PER_S
        quick = window_of(pipeline, pipeline.rows(order), sent)
        assert quick == pytest.approx(priced / baseline.correction, rel=0.06)


def test_no_found_order_is_slower_than_the_best_with_a_name(baseline, looked):
    named = min(
        quick_latency_s(baseline, Change(schedule=SEARCHED, order=order_of(name, 3, 7)))
        for name in ("1f1b", "gpipe", "zb-h1", "zb-h2")
    )
    assert looked.found.score <= round(named * NS_PER_S)
    assert looked.found.named_score == pytest.approx(named * NS_PER_S, abs=1)
    check_order(looked.pipeline.order(looked.found.rows))


def test_a_schedule_that_a_command_does_not_know_by_name_is_an_order_for_it():
    roomy = baseline_of(4.7 * GIB)
    looks = OrderSearch(rounds=1, cuts_anew=False)
    first = find_order(roomy, looks)
    assert first.change is None  # zb-h1 or the like: say its name
    told = find_order(roomy, replace(looks, schedules=frozenset({"1f1b"})))
    assert told.found == first.found
    assert told.change.order == order_of(first.found.name, 3, 7)


def test_what_was_looked_for_and_not_found_is_called_an_order():
    refused = Refusal(lever="order", change=Change(), reason="none was found")
    assert describe_refused(refused) == "an order of its own"


def test_rounds_decide_alone_what_is_found(baseline, looked):
    assert find_order(baseline, OrderSearch(rounds=2, cuts_anew=False)).found == looked.found


def test_stages_recompute_where_nothing_fits_otherwise(small, lighter):
    base = Change(schedule=SEARCHED)
    for name in ("1f1b", "gpipe", "zb-h1", "zb-h2"):
        change = replace(base, order=order_of(name, 3, 7))
        assert all_fit(headroom_after(small, change)) is False
    assert lighter.recompute_stages
    assert all_fit(headroom_after(small, lighter)) is True
    kept = quick_latency_s(small, replace(lighter, recompute_stages=None))
    assert quick_latency_s(small, lighter) > kept
    assert "recomputed" in describe(lighter)


def test_a_stage_that_recomputes_runs_its_backward_passes_as_one(lighter):
    # Torch recomputes for I, and for every weight of W once more: `stage_backward_weight`.
    kinds = {
        action.kind
        for actions in lighter.order
        for action in actions
        if action.stage in lighter.recompute_stages
    }
    assert kinds == {"F", "B"}


def test_a_limit_that_the_run_is_over_is_kept_by_the_stages_of_ranks_that_lack_memory(tmp_path):
    answer = type_command(f"debubble plan {RECORDED} --memory-limit 3.2GiB --json -q", tmp_path)
    found = json.loads(answer.text)
    option = next(one for one in found["options"] if one["change"].get("recompute_stages"))
    every = next(one for one in found["options"] if one["change"].get("recompute"))
    # Dearer than the run, which does not fit, and cheaper than all stages.
    now = found["baseline"]["numbers"]["batch_latency_s"]
    latencies = [one["numbers"]["batch_latency_s"] for one in (option, every)]
    assert now < latencies[0] < latencies[1]
    assert option["fits_memory"]
    assert found["verdict"].startswith("A rank already takes ")
    assert "What fits: " in found["verdict"]


def test_an_order_leaves_a_little_of_the_limit_it_is_made_for():
    limit, base = 4.7 * GIB, Change(schedule=SEARCHED)
    small = baseline_of(limit)
    pipeline, _ = pipeline_of(small, base, THREE)
    order = order_of("zb-h1", 3, 7)
    held = pipeline.most_held(pipeline.rows(order))
    left = headroom_after(small, replace(base, order=order))
    for rank in range(3):
        spared = left[rank].bytes - (pipeline.limits[rank] - held[rank])
        assert spared == pytest.approx(0.005 * limit, rel=0.01)


def test_offloading_takes_the_time_of_its_copies_and_frees_memory(baseline):
    order = order_of("zb-h2", 3, 7)
    kept = Change(schedule=SEARCHED, order=order)
    slow, quick = (
        replace(kept, offload_stages=(0, 1, 2), offload_bytes_per_s=rate) for rate in (2e9, 2e14)
    )
    times = [quick_latency_s(baseline, change) for change in (kept, quick, slow)]
    assert times[1] == pytest.approx(times[0], rel=0.01)
    assert times[2] > 1.1 * times[0]
    peaks = [
        max(rank.peak_bytes for rank in headroom_after(baseline, change)) for change in (kept, slow)
    ]
    assert peaks[1] < peaks[0]


def test_forward_passes_alone_have_nothing_to_be_ordered():
    forward = REPOSITORY / "tests" / "data" / "h200" / "fwd_closed_m4"
    run = analyse_recording(forward)
    base = run.baseline()
    with pytest.raises(UsageError, match="forward passes alone have one order"):
        check_search(OrderSearch(rounds=1), base)


def test_a_framework_with_a_schedule_of_its_own_cannot_be_told(baseline):
    change = Change(schedule=SEARCHED, order=order_of("zb-h2", 3, 7))
    with pytest.raises(CannotBeTold):
        emit("megatron", change, baseline.setting)


def test_torch_is_told_of_the_file_and_of_stages_that_keep_less(baseline):
    change = Change(
        schedule=SEARCHED, order=order_of("zb-h2", 3, 7), recompute_stages=(1,), offload_stages=(2,)
    )
    text = emit("torch", change, baseline.setting)
    assert '_load_csv("order.csv")' in text
    assert "use_reentrant=False): 1." in text
    assert "save_on_cpu(pin_memory=True): 2." in text
    with pytest.raises(CannotBeTold):
        emit("torchtitan", change, baseline.setting)


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
    assert "W" in order or "above what no order can be under" in refused["reason"]


@pytest.mark.slow
def test_what_plan_finds_simulate_prices_alike_from_its_file(tmp_path):
    flags = "--memory-limit 4.7GiB --search 2 --emit torch -o order.csv --json --quiet"
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


def test_tune_tells_a_command_the_file_of_an_order(tmp_path):
    order = order_of("zb-h2", 3, 7)
    change = _in_a_file(Change(schedule=SEARCHED, order=order), tmp_path / "orders")
    (file,) = (tmp_path / "orders").iterdir()
    assert parse_order(file.read_text("utf-8")) == order
    now = Setting(schedule="1f1b", microbatches=7)
    assert now.after(change, 3).written("schedule") == str(file)
    assert _in_a_file(Change(schedule=SEARCHED, order=order), tmp_path / "orders") == change
    lighter = replace(change, recompute_stages=(0,))
    assert now.after(lighter, 3) is None
