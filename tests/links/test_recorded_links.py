"""Recorded H200 runs: hop times against what was timed with nothing else running."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.traces.read_once import build_recording
from support.traces.recordings import SHARED

import debubble
from debubble import api
from debubble.ledger.hop_health import account_for, judge_links
from debubble.ledger.verdict import name_causes
from debubble.links.hop_times import Fit, Past, Verdict, find_class
from debubble.links.wiring import Wiring
from debubble.report.answers.find import answer_find
from debubble.report.answers.links import answer_links, say_links
from debubble.timeline.figures import measure_pipeline

RUNS = (
    "1f1b_m8",
    "1f1b_m8_slow23",
    "1f1b_m8_split3337",
    "1f1b_p2_m4",
    "fwd_closed_m4",
    "fwd_closed_m8",
    "fwd_closed_m8_slow12",
    "fwd_m8",
    "gpipe_m8",
    "zbv_m8",
)
PUBLIC = SHARED / "public" / "bytedance-straggler-AR"
HERE = Path(__file__).resolve().parents[1] / "data" / "paced"
# All that a middle rank receives is paced, from both its neighbours.
BOTH_INTO = {"1f1b_m8_slow12": [(1, 2), (3, 2)], "1f1b_m8_slow01": [(0, 1), (2, 1)]}
PACED = {"1f1b_m8_slow23": (2, 3), "fwd_closed_m8_slow12": (1, 2)}


@cache
def measured(folder):
    timeline = build_recording(folder)
    return timeline, measure_pipeline(timeline, 0)


@cache
def judged(folder):
    return judged_by(folder)


def judged_by(folder, *, classes=None, history=None):
    """Judge hops by what is said of them beside their own recording."""
    wiring = Wiring(stated=classes or {}, guessed={})
    return judge_links(*measured(folder), wiring, history or {})


def truth_of(folder):
    found = {}
    for path in folder.glob("truth*.json"):
        for name, seconds in json.loads(path.read_text())["links"].items():
            hop, _, size = name.partition(":")
            sender, _, receiver = hop.partition("->")
            found[int(sender), int(receiver), int(size)] = seconds
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_message_takes_what_it_took_with_nothing_else_running(name, recorded_data):
    truth = truth_of(recorded_data / name)
    found = [one.times for one in judged(recorded_data / name).hops]
    told = [one for one in found if one.alone_ns is not None]
    # Where no receiver ever waited, nothing is claimed.
    assert [one.waited for one in found if one not in told] == ([0, 0] if name == "fwd_m8" else [])
    for one in told:
        true_s = truth[*one.hop, one.figures.message_bytes]
        assert one.alone_ns / 1e9 == pytest.approx(true_s, rel=0.25), one.hop


@pytest.mark.parametrize("name", RUNS)
def test_paced_hops_are_named_with_their_direction_and_no_others(name, recorded_data):
    found = judged(recorded_data / name)
    assert [one.hop for one in found.slow] == ([PACED[name]] if name in PACED else [])


@pytest.mark.parametrize("name", PACED)
def test_links_says_how_slow_a_hop_is_as_find_and_plan_do(name, recorded_data):
    analysis = api.analyse(recorded_data / name)
    (slow,) = analysis.links.slow
    times, (here, there) = slow.judgement.times, slow.hop
    assert f"takes {times:.1f} times" in slow.judgement.why
    plan = debubble.plan(analysis)
    answers = answer_find(analysis).to_dict(), answer_links(analysis).to_dict(), plan.to_dict()
    for hops in (answer["hops"] for answer in answers):
        hop = next(one for one in hops if (one["from_rank"], one["to_rank"]) == slow.hop)
        assert (hop["verdict"], hop["times"]) == ("slow", times)
        assert hop["cost_per_batch_s"] == slow.cost_ns / 1e9
    repair = next(one for one in plan.options if one.lever == "link")
    assert repair.link.times_expected == times
    assert plan.baseline.numbers.batch_latency_s * repair.latency_gain_fraction == pytest.approx(
        slow.cost_ns / 1e9, rel=1e-6
    )
    stays = f"hop {here}:{there} stays {times:.1f} times as slow as the others"
    assert any(stays in option.assumptions for option in plan.options)


def test_what_slack_hides_is_not_called_the_wire(recorded_data):
    opening = {name: say_links(judged(recorded_data / name)) for name in PACED}
    assert opening["fwd_closed_m8_slow12"].startswith("It is the wire: hop 1 → 2")
    assert opening["1f1b_m8_slow23"].startswith("A hop is slow, but slack hides most of it: hop 2")


@pytest.mark.slow
@pytest.mark.skipif(not PUBLIC.is_dir(), reason="a public trace that is not here")
def test_slow_hops_that_cost_next_to_nothing_do_not_lead():
    found = answer_links(api.analyse(PUBLIC))
    assert found.verdict.startswith(
        "Pipeline 0 of 4: slow hops are not why ranks wait: 2 slow hops cost "
    )
    assert found.slow_cost_per_batch_s < 0.01 * found.batch_latency_s
    assert [one[:11] for one in found.findings[:2]] == ["Hop 16 → 0 ", "Hop 0 → 16 "]
    assert found.findings[2].startswith("Larger cause: the device of rank 0 is slow")


def test_several_slow_hops_have_a_price_together(recorded_data):
    every = {(rank, rank + step): find_class("nvlink4") for rank in range(4) for step in (-1, 1)}
    found = judged_by(recorded_data / "1f1b_m8", classes=every)
    assert len(found.slow) == 6
    assert found.slow_cost_ns > max(one.cost_ns for one in found.slow)
    assert "; all slow hops together cost up to" in say_links(found)


def test_hops_that_are_alike_are_not_called_healthy_by_each_other(recorded_data):
    found = judged(recorded_data / "fwd_closed_m4")
    assert found.alike.hops == 3
    said = say_links(found)
    assert said.startswith("No hop is slow beside its peers: 3 hops, median ")
    assert said.endswith("of a 400 Gb/s port; --class NAME judges it against your link.")
    assert "It is not the wire" not in said


def test_a_class_that_fits_says_that_it_is_not_the_wire(recorded_data):
    every = {(rank, rank + 1): find_class("ethernet-25") for rank in range(3)}
    found = judged_by(recorded_data / "fwd_closed_m4", classes=every)
    assert found.alike is None
    assert say_links(found) == "It is not the wire: 3 hops healthy."


def test_the_price_of_one_slow_hop_together_is_its_own(recorded_data):
    found = judged(recorded_data / "1f1b_m8_slow23")
    assert found.slow_cost_ns == found.slow[0].cost_ns
    assert judged(recorded_data / "1f1b_m8").slow_cost_ns == 0


@pytest.mark.parametrize("name", BOTH_INTO)
def test_a_rank_that_receives_slowly_has_both_its_hops_named(name):
    found = judged(HERE / name)
    assert sorted(one.hop for one in found.slow) == BOTH_INTO[name]
    assert found.slow_cost_ns > max(one.cost_ns for one in found.slow)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH_INTO)
def test_a_rank_that_receives_slowly_is_simulated_and_its_repair_has_one_price(name):
    analysis = api.analyse(HERE / name)
    plan = debubble.plan(analysis)
    prices = {
        tuple(map(tuple, option.change.repaired_hops)): option.latency_gain_fraction
        * analysis.links.batch_latency_ns
        for option in plan.options
        if option.lever == "link"
    }
    assert len(prices) == 3
    for hops, saved_ns in prices.items():
        assert saved_ns == pytest.approx(analysis.links.cost_of(hops), abs=2)


@pytest.mark.parametrize("name", PACED)
def test_the_price_is_the_one_that_find_names(name, recorded_data):
    timeline, figures = measured(recorded_data / name)
    first = name_causes(account_for(timeline, figures))[0]
    slow = judged(recorded_data / name).slow[0]
    assert (first.hop, first.culprit_saved_ns) == (slow.hop, slow.cost_ns)
    assert first.times_expected == slow.judgement.times


def test_a_hop_that_costs_has_the_price_that_the_recorded_steps_show(recorded_data):
    slow = judged(recorded_data / "fwd_closed_m8_slow12").slow[0]
    windows = [
        measured(recorded_data / name)[1].batch_latency_ns
        for name in ("fwd_closed_m8_slow12", "fwd_closed_m8")
    ]
    # The run shows no slowdown of ranks by each other; the healthy one, busier, has some.
    assert slow.cost_ns == pytest.approx(windows[0] - windows[1], rel=0.3)


def test_slack_hides_most_of_a_slow_hop(recorded_data):
    """Five times slower, eight messages a step; a twentieth of the batch or so can come back."""
    slow = judged(recorded_data / "1f1b_m8_slow23").slow[0]
    assert 0 < slow.cost_ns < 0.07 * measured(recorded_data / "1f1b_m8_slow23")[1].batch_latency_ns


def test_a_buffered_message_tells_no_bandwidth(recorded_data):
    """In the free-running pass two hops are always ahead of their receivers."""
    found = {one.hop: one.times for one in judged(recorded_data / "fwd_m8").hops}
    assert found[0, 1].figures.buffered_fraction == 1
    assert found[0, 1].bytes_per_s is None
    assert found[2, 3].bytes_per_s is not None


def test_wait_is_not_wire(recorded_data):
    found = {one.hop: one.times for one in judged(recorded_data / "1f1b_m8").hops}
    back = found[1, 0]
    assert back.figures.wait_ns > 5 * back.alone_ns
    assert back.one_way.p95_ns < back.figures.wait_ns


def test_history_tells_a_slow_hop_that_peers_do_not(recorded_data):
    """All hops twice as slow as they were: no peer shows it."""
    now = judged(recorded_data / "gpipe_m8")
    past = {
        one.hop: Past(times_ns={one.times.figures.message_bytes: one.times.alone_ns / 2}, fit=None)
        for one in now.hops
    }
    found = judged_by(recorded_data / "gpipe_m8", history=past)
    assert not now.slow
    assert len(found.slow) == len(found.hops)
    assert {one.judgement.against for one in found.slow} == {"history"}
    assert {one.cost_ns for one in now.hops} == {0}
    assert max(one.cost_ns for one in found.slow) > 1_000_000


def test_a_past_of_other_sizes_tells_by_its_line():
    past = Past(times_ns={}, fit=Fit(latency_ns=1000, bytes_per_s=1e9, worst_error=0))
    assert past.time_ns(9000) == 10_000


def test_a_stated_class_judges_and_a_guess_does_not(recorded_data):
    hops = [one.hop for one in judged(recorded_data / "gpipe_m8").hops]
    stated = judged_by(
        recorded_data / "gpipe_m8", classes=dict.fromkeys(hops, find_class("nvlink4"))
    )
    assert len(stated.slow) == len(hops)
    assert {one.judgement.against for one in stated.slow} == {"class"}
    slower = judged_by(
        recorded_data / "gpipe_m8", classes=dict.fromkeys(hops, find_class("ethernet-25"))
    )
    assert not slower.slow


def verdicts_with_unknown_ends(unknown):
    """Judge a run with a slow hop 1 → 2 as a meter that does not know when some sends left."""
    timeline, figures = measured(HERE / "1f1b_m8_slow12")
    sent = timeline.transfers
    ends = np.where(unknown(sent), sent.send_start_ns, sent.send_end_ns)
    unsure = replace(timeline, transfers=replace(sent, send_end_ns=ends))
    found = judge_links(unsure, figures, Wiring(stated={}, guessed={}), {})
    return {hop.hop: hop.judgement.verdict for hop in found.hops}


def test_where_nobody_knows_when_messages_left_no_hop_is_called_slow():
    """A meter of a job that waits for its sends late: it knows when they were asked for."""
    verdicts = verdicts_with_unknown_ends(lambda sent: sent.source == 3)
    assert verdicts[3, 2] == Verdict.UNKNOWN
    assert verdicts[2, 3] != Verdict.SLOW
    assert verdicts[1, 2] == Verdict.SLOW
    assert verdicts[0, 1] == Verdict.HEALTHY


def test_sends_of_the_warm_up_that_are_waited_for_late_leave_the_exchanges_to_judge_by():
    known = verdicts_with_unknown_ends(lambda sent: sent.source < 0)
    assert set(known.values()) == {Verdict.SLOW, Verdict.HEALTHY}
    assert verdicts_with_unknown_ends(lambda sent: ~sent.fused) == known
