"""`find --json`: every field is there, documented, and adds up."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.services.console import REPOSITORY
from support.traces.recordings import H200

from debubble.ledger.ledger import build_ledger
from debubble.report.find_json import find_json
from debubble.timeline.build import build_run
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.job import JobFacts
from debubble.trace.run import find_run, read_run

FIELDS = {
    "run": "capture captures kind pipelines ranks stages chunks microbatches schedule framework "
    "stated steps "
    "devices clock_uncertainty_s missing_ranks partial one_run steps_inferred steps_left_out",
    "ledger": "total_s steps causes ranks",
    "replay": "batch_latency_s error_fraction",
    "numbers": "bubble_fraction batch_latency_s step_time_s peak_memory_bytes microbatches_per_s "
    "tokens_per_s unprofiled_batch_latency_s",
    "theory": "bubble_fraction schedule_bubble_fraction",
    "utilisation": "apparent_fraction useful_fraction ranks",
    "shape": "jagged_fraction where median_wait_s waits",
}
ROWS = {
    "stages": "stage rank layers layer_s passes",
    "memory": "rank static_bytes per_microbatch_bytes transient_bytes peak_bytes "
    "passes_peak_bytes between_peak_bytes peak_reserved_bytes most_in_flight limit_bytes "
    "job_peak_bytes free_bytes other_bytes",
    "savings": "cause batch_latency_s saved_s saved_fraction",
    "named": "cause rank stage hop saved_s culprit_saved_s sentence",
    "hops": "from_rank to_rank from_stage to_stage stages bytes wire_s wait_s n buffered_fraction "
    "bytes_per_s expected_bytes_per_s times_expected verdict times cost_per_batch_s",
}


@pytest.fixture(scope="module", params=["1f1b_p3_m7", "fwd_closed_m4"])
def data(request):
    run = read_run(find_run([str(H200 / request.param)]))
    timeline = build_run(run)
    figures = measure_pipeline(timeline, 0)
    ledger = build_ledger(timeline, 0, [window.step for window in figures.windows])
    return find_json(run, timeline, [figures], ledger, timeline.gaps, job=JobFacts())


def test_every_field_of_the_design_is_there(data):
    for name, fields in FIELDS.items():
        assert set(data[name]) == set(fields.split())
    for name, fields in ROWS.items():
        assert data[name]
        assert all(set(row) == set(fields.split()) for row in data[name])
    assert set(data["hops"][0]["wire_s"]) == {"median", "p95", "n"}
    assert set(data["hops"][0]["wait_s"]) == {"median", "p95"}


def test_every_field_is_documented(data):
    page = (REPOSITORY / "docs" / "reference" / "json.md").read_text("utf-8")
    known = set(re.findall(r"\w+", page.partition("## debubble.find/1")[2]))
    nested = [field for part in (FIELDS | ROWS).values() for field in part.split()]
    assert {*data, *nested} - {"schema"} <= known


def test_the_shares_of_the_ranks_make_those_of_the_pipeline(data):
    ranks = data["utilisation"]["ranks"]
    for name, whole in (
        ("useful_fraction", data["utilisation"]["useful_fraction"]),
        ("apparent_fraction", data["utilisation"]["apparent_fraction"]),
        ("bubble_fraction", data["numbers"]["bubble_fraction"]),
    ):
        # A mean of medians is not the median of means, but near it.
        assert sum(rank[name] for rank in ranks) / len(ranks) == pytest.approx(whole, abs=0.01)
    assert all(0 < rank["busy_fraction"] < 1 for rank in ranks)


def test_what_is_null_has_a_reason_and_what_is_known_has_none(data):
    assert data["numbers"]["tokens_per_s"] is None
    assert set(data["unknown"]) == {
        "numbers.tokens_per_s",
        "numbers.unprofiled_batch_latency_s",
        "hops[].expected_bytes_per_s",
    }


def test_one_step_alone_has_no_step_time_and_says_why():
    run = read_run(find_run([str(H200 / "1f1b_p2_m4")]))
    timeline = replace(build_run(run), steps=(2,))
    data = find_json(run, timeline, [measure_pipeline(timeline, 0)], None, (), job=JobFacts())
    assert data["numbers"]["step_time_s"] is None
    assert data["unknown"]["numbers.step_time_s"] == "it takes two steps to tell"


def test_the_ledger_adds_up_in_seconds_too(data):
    ledger = data["ledger"]
    assert sum(ledger["causes"].values()) == pytest.approx(ledger["total_s"], abs=1e-9)
    for cause, seconds in ledger["causes"].items():
        parts = sum(rank["causes"][cause] for rank in ledger["ranks"])
        assert parts == pytest.approx(seconds, abs=1e-9)
    for rank in ledger["ranks"]:
        for culprit in rank["culprits"]:
            assert {"cause", "rank", "stage", "pass", "hop", "wait_s", "examples"} == set(culprit)
            assert culprit["examples"]
            for example in culprit["examples"]:
                assert example["file"].endswith(f"rank{rank['rank']}.pt.trace.json.gz") or (
                    f"rank{rank['rank']}" in example["file"]
                )
                assert example["dur_us"] > 0
