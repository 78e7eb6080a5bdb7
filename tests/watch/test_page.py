"""The status page and the metrics: everything is there, nothing is obeyed, all is bounded."""

from __future__ import annotations

import subprocess

import pytest
from msgspec.structs import replace
from support.processes import PATIENCE_S
from support.requirements import need_program
from support.services.watch_service import finding, made_up

from debubble.annexes.watch.analyse import Hop, PlannedChange
from debubble.annexes.watch.board import Board, Health, Pipeline
from debubble.annexes.watch.judge import Alert, CauseShift, Standing
from debubble.annexes.watch.metrics import MOST_STAGES, write_metrics
from debubble.annexes.watch.page import capture_page, status_page

EVIL = "<script>alert(1)</script>'\">"
SLOW = Hop(source="1", destination="2", wire_s=0.006, bytes_per_s=1.4e9,
           slow=True, efficiency=0.2, cost_s=0.027)  # fmt: skip
HEALTHY = Hop(source="0", destination="1", wire_s=0.001, bytes_per_s=7e9,
              slow=False, efficiency=1.0, cost_s=0.0)  # fmt: skip
UNKNOWN = Hop(source="2", destination="3", wire_s=None, bytes_per_s=None)


def standing(state, **given):
    return Standing(
        **{
            "metric": "batch_latency_s",
            "context_bucket": 512,
            "state": state,
            "reference_captures": 40,
            "reference": 0.1,
            "recent": 0.1,
            "score": None if state == "learning" else 0.0,
            "since_s": None,
            "causes": (),
        }
        | given
    )


def board(*captures, standings=(), alerts=(), **health):
    captures = captures or (made_up(),)
    counts = {"stored": 1, "failed": 2}
    pipeline = Pipeline(name="train", counts=counts, captures=captures, standings=standings,
                        health=Health(**health), reference=40)  # fmt: skip
    return Board(pipelines=(pipeline,), alerts=alerts)


def test_strangers_words_are_shown_and_never_obeyed():
    alert = Alert(id=3, pipeline=EVIL, kind="bucket_slower", subject=EVIL, message=EVIL,
                  raised_s=1.5, capture_id=7, data={})  # fmt: skip
    evil = made_up(
        key=f"{EVIL} 1 2",
        problem=EVIL,
        state="failed",
        finding=finding(plan=PlannedChange(change=EVIL, gain=0.2)),
    )
    unplanned = replace(evil, finding=finding(plan=None, no_plan=EVIL))
    for capture in (evil, unplanned):
        page = status_page(board(capture, alerts=(alert,), troubles={EVIL: EVIL}))
        for text in (page, capture_page(capture, EVIL)):
            assert EVIL not in text
            assert "&lt;script&gt;" in text
    assert "<form method='post' action='/captures/7/retry'>" in page
    assert "<form method='post' action='/alerts/3/acknowledge'>" in page


def test_an_alert_that_was_acknowledged_stands_below_and_is_asked_about_no_more():
    moved = {"batch_latency_s": {"traffic_moved": 0.03, "buckets_slower": -0.002}}
    alert = Alert(pipeline="train", kind="traffic_moved", subject="context_length", message="m",
                  raised_s=1.5, capture_id=7, acknowledged_s=9.0, data=moved)  # fmt: skip
    page = status_page(board(alerts=(alert,)))
    assert "<p>No alerts.</p>" in page
    past = page.partition("<h2>Acknowledged</h2>")[2]
    assert "Of the change in batch latency 30.0 ms are traffic, -2.00 ms are speed." in past
    assert "Acknowledge</button>" not in page


def test_the_page_answers_whoever_is_on_call():
    grown = CauseShift(cause="imbalance", before_s=0.01, after_s=0.03)
    worse = standing("worse", recent=0.12, since_s=86400.0, causes=(grown,))
    learning = standing("learning", context_bucket=2048, reference_captures=4, reference=None)
    for standings, words in (
        ([standing("steady")], ["No: as in the first 40 captures (batch latency)."]),
        (
            [worse, learning],
            [
                "Yes: batch latency at up to 512 tokens 100 ms → 120 ms (+20.0 %); learning: 4 of",
                "Since when?</dt><dd>1970-01-02 00:00:00 UTC<",
                "imbalance went from 10.0 ms to 30.0 ms of a batch",
                "What would plan do now?</dt><dd>By this capture no option is certain to gain.",
            ],
        ),
        ([learning], ["Not known yet: learning: 4 of 40 captures", "none is possible"]),
    ):
        page = status_page(board(standings=tuple(standings)))
        assert [said for said in words if said not in page] == []


def test_trends_are_drawn_by_context_length_with_theory_and_alerts():
    at = [made_up(number, finding=finding(theory=0.1)) for number in (1, 2)]
    other = made_up(3, finding=finding(bucket=2048))
    alert = Alert(pipeline="train", kind="bucket_slower", subject="bubble_fraction/512",
                  message="m", raised_s=1.5, capture_id=2, data={})  # fmt: skip
    page = status_page(board(other, *at[::-1], alerts=(alert,)))
    assert page.count("<figure>") == 3 * 2
    assert page.count("class='alerted'") == 1
    assert "theory 10.0 % (dotted)" in page
    assert ">10.0 %</text>" in page  # the axis reaches down to it


def test_a_slow_hop_shows_what_it_carries_of_what_it_should_and_what_it_costs():
    text = write_metrics(board(made_up(finding=finding(hops=(HEALTHY, SLOW, UNKNOWN))))).decode()
    labels = '{dst_stage="2",pipeline="train",src_stage="1"}'
    assert f"debubble_link_slow{labels} 1.0" in text
    assert f"debubble_link_efficiency_ratio{labels} 0.2" in text
    assert f"debubble_link_attributed_bubble_seconds{labels} 0.027" in text
    assert 'debubble_link_slow{dst_stage="1",pipeline="train",src_stage="0"} 0.0' in text
    assert 'dst_stage="3"' not in text  # of which nothing is known


@pytest.mark.parametrize(("hops", "shown"), [(2 * MOST_STAGES, True), (2 * MOST_STAGES + 1, False)])
def test_a_pipeline_of_very_many_hops_shows_none_of_them(hops, shown):
    text = write_metrics(board(made_up(finding=finding(hops=(SLOW,) * hops)))).decode()
    assert ("debubble_link_slow{" in text) is shown


def test_metrics_say_what_is_still_learning_and_what_is_the_matter():
    learning = standing("learning", reference_captures=4)
    text = write_metrics(board(standings=(learning,), troubles={"folder": "x"})).decode()
    labels = '{context_bucket="512",metric="batch_latency_s",pipeline="train"}'
    assert f"debubble_reference_captures{labels} 4.0" in text
    assert 'debubble_reference_captures_needed{pipeline="train"} 40.0' in text
    assert f"debubble_drift_score{labels}" not in text
    assert 'debubble_source_up{pipeline="train"} 0.0' in text
    assert 'debubble_captures_total{outcome="failed",pipeline="train"} 2.0' in text


@pytest.mark.service
def test_the_page_works_in_a_browser(tmp_path):
    browser = need_program("chromium", "chromium-browser")
    from support.services.watch_service import Watching, place_capture, write_config  # noqa: PLC0415

    config = write_config(tmp_path)
    place_capture(tmp_path, "first")
    with Watching(config) as watch:
        watch.wait_for("analysed")
        watch.ask_until(lambda data: data["pipelines"][0]["standings"])
        shown = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
             f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", watch.url],
            capture_output=True, text=True, check=True, timeout=PATIENCE_S,
        )  # fmt: skip
    assert "Not known yet: learning: 1 of 40 captures." in shown.stdout
    assert shown.stdout.count("<svg") >= 3
    assert "Latest report" in shown.stdout
    assert "Content Security Policy" not in shown.stderr
