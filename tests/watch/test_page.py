"""The status page in a real browser: everything is there, and nothing comes from elsewhere."""

from __future__ import annotations

import subprocess

import pytest
from support.processes import PATIENCE_S
from support.requirements import need_program
from support.services.watch_service import shown_pipeline

from debubble.annexes.watch.page import capture_page, status_page

EVIL = "<script>alert(1)</script>'\">"


def view(name="train", message="it got slower", points=((1.0, 0.2), (2.0, 0.3))):
    alert = {
        "id": 3,
        "pipeline": name,
        "kind": "bucket_slower",
        "metric": "bubble_fraction",
        "context_bucket": 512,
        "raised_s": 1.5,
        "acknowledged_s": None,
        "message": message,
    }
    trend = {
        "metric": "bubble_fraction",
        "context_bucket": 512,
        "points": [list(one) for one in points],
    }
    pipeline = shown_pipeline(name, report=message) | {"trends": [trend]}
    return {"alerts": [alert], "open_alerts": [alert], "pipelines": [pipeline]}


def test_strangers_words_are_shown_and_never_obeyed():
    page = status_page(view(message=EVIL))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "<script" not in capture_page(EVIL, view(message=EVIL)["pipelines"][0]["latest"])


def test_an_alert_that_was_acknowledged_stands_below_and_is_asked_about_no_more():
    shown = view()
    alert = shown["alerts"][0] | {
        "acknowledged_s": 9.0,
        "batch_latency_s": {"traffic_moved": 0.03, "buckets_slower": -0.002},
    }
    page = status_page(shown | {"alerts": [alert], "open_alerts": []})
    assert "<p>No alerts.</p>" in page
    past = page.partition("<h2>Acknowledged</h2>")[2]
    assert "Of the change in batch latency 30.0 ms are traffic, -2.00 ms are speed." in past
    assert "<div class='alert done'>" in past
    assert "Acknowledge</button>" not in page


def test_a_capture_that_was_given_up_can_be_tried_again_and_says_what_is_wrong():
    shown = view()
    pipeline = shown["pipelines"][0]
    given_up = pipeline["recent"][0] | {"state": "unreadable", "problem": f"cut {EVIL}"}
    pipeline["recent"], pipeline["given_up"] = [given_up], [given_up]
    page = status_page(shown)
    assert "<form method='post' action='/pipelines/train/captures/7/retry'>" in page
    assert "<td>unreadable</td>" in page
    for each in (page, capture_page("train", given_up)):
        assert "cut &lt;script&gt;" in each
        assert EVIL not in each


@pytest.mark.service
def test_the_page_works_in_a_browser(tmp_path):
    browser = need_program("chromium", "chromium-browser")
    from support.services.watch_service import Watching, place_capture, write_config  # noqa: PLC0415

    config = write_config(tmp_path)
    place_capture(tmp_path, "first")
    with Watching(config) as watch:
        watch.wait_for("analysed")
        watch.ask_until("/api/pipelines", lambda data: data["pipelines"][0]["latest"])
        shown = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
             f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", watch.url],
            capture_output=True, text=True, check=True, timeout=PATIENCE_S,
        )  # fmt: skip
    assert "Not known yet: learning: 1 of 40 captures." in shown.stdout
    assert shown.stdout.count("<svg") >= 3
    assert "Latest report" in shown.stdout
    assert "Content Security Policy" not in shown.stderr


def test_a_pipeline_says_its_plan_or_why_it_has_none():
    shown = view()
    assert "No plan is watched" not in status_page(shown)
    latest = shown["pipelines"][0]["latest"]
    for change, said in (
        (f"layers {EVIL}", "By this capture layers &lt;script&gt;"),
        ("", "By this capture no option is certain to gain."),
    ):
        planned = latest | {"plan": {"change": change, "gain": 0.25}}
        shown["pipelines"][0]["latest"] = planned
        for page in (status_page(shown), capture_page("train", planned)):
            assert said in page
            assert EVIL not in page
            assert ("would gain 25.0 % of throughput" in page) == bool(change)
    latest |= {"plan": None, "no_plan": f"batches {EVIL}"}
    shown["pipelines"][0]["latest"] = latest
    for page in (status_page(shown), capture_page("train", latest)):
        assert "No plan is watched: batches &lt;script&gt;" in page
        assert EVIL not in page


def figure(state, **given):
    return {
        "metric": "batch_latency_s",
        "context_bucket": 512,
        "state": state,
        "reference_captures": 40,
        "reference": 0.1,
        "recent": 0.1,
        "score": 0.0,
        "since_s": None,
        "causes": [],
    } | given


def test_the_page_answers_whoever_is_on_call():
    shown = view()
    grown = {"cause": "imbalance", "before_s": 0.01, "after_s": 0.03}
    worse = figure("worse", recent=0.12, since_s=86400.0, causes=[grown])
    learning = figure("learning", context_bucket=2048, reference_captures=4, reference=None)
    for figures, said in (
        ([figure("steady")], ["No: as in the first 40 captures (batch latency)."]),
        (
            [worse, learning],
            [
                "Yes: batch latency at up to 512 tokens 100 ms → 120 ms (+20.0 %); learning: 4 of",
                "Since when?</dt><dd>1970-01-02 00:00:00 UTC<",
                "imbalance went from 10.0 ms to 30.0 ms of a batch",
                "What would plan do now?",
            ],
        ),
        ([learning], ["Not known yet: learning: 4 of 40 captures"]),
    ):
        shown["pipelines"][0]["drift"] = figures
        page = status_page(shown)
        for words in said:
            assert words in page
    assert "none is possible" in status_page(shown | {"open_alerts": []})


def test_theory_and_causes_are_drawn():
    shown = view()
    trend = shown["pipelines"][0]["trends"][0]
    trend["theory"] = [[1.0, 0.1], [2.0, 0.1]]
    trend["causes"] = {"compute": [[1.0, 0.08], [2.0, 0.08]], "imbalance": [[2.0, 0.04]]}
    page = status_page(shown)
    assert "</svg> theory 10.0 %" in page
    assert ">10.0 %</text>" in page  # the axis reaches down to it
    assert page.count("url(#h-imbalance)") == page.count("<pattern") == 2
    assert "</svg> imbalance" in page
