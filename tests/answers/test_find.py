"""`find --json`: what it says adds up, and what is null has a reason."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.traces.read_once import analyse_recording, read_recording
from support.traces.recordings import H200

from debubble.analysis import Analysis
from debubble.measure.worth import Tariff, count_rates
from debubble.report.answers.find import answer_find
from debubble.report.find import find_page
from debubble.timeline.fleet.survey import Question, measure_run
from debubble.units import show_price


@pytest.fixture(scope="module", params=["1f1b_p3_m7", "fwd_closed_m4"])
def data(request):
    return answer_of(request.param).to_dict()


def answer_of(name, **asked):
    return answer_find(Analysis(measure_run(read_recording(H200 / name), Question(**asked))))


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
    of_hops = ("times", "times_expected", "expected_bytes_per_s", "cost_per_batch_s")
    unjudged = {f"hops[].{name}" for name in of_hops}
    assert set(data["unknown"]) - unjudged == {
        "run.framework.name",
        "numbers.tokens_per_s",
        "numbers.unprofiled_batch_latency_s",
        "bottleneck",
    }
    known = all(hop["verdict"] != "unknown" for hop in data["hops"])
    assert bool(unjudged & set(data["unknown"])) is not known


def test_one_step_alone_has_no_step_time_and_says_why():
    data = answer_find(analyse_recording(H200.parent / "frameworks" / "mg_nosync")).to_dict()
    assert data["numbers"]["step_time_s"] is None
    assert data["unknown"]["numbers.step_time_s"] == "needs two steps"


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


def test_headline_and_table_are_of_the_same_steps(data):
    shares = data["ledger"]["shares"]
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-9)
    assert shares["compute"] == pytest.approx(1 - data["numbers"]["bubble_fraction"], abs=0.003)
    for rank in data["ledger"]["ranks"]:
        assert sum(rank["shares"].values()) == pytest.approx(1.0, abs=1e-9)


def test_a_saving_is_worth_its_share_of_a_day_on_all_gpus():
    analysis = analyse_recording(H200 / "1f1b_p3_m7")
    answer = answer_find(analysis, Tariff(price=2.5, currency="$"))
    # Three ranks that share one device.
    assert (answer.rates.gpus, answer.rates.watts_measured) == (1, False)
    saving = next(one for one in answer.savings if one.cause == "imbalance")
    hours = 24 * saving.saved_s / answer.numbers.step_time_s
    assert saving.worth.gpu_hours_per_day == pytest.approx(hours)
    assert saving.worth.money_per_day == pytest.approx(2.5 * hours)
    page = find_page(answer)
    table = next(
        table for table in page.tables if table.title.startswith("what fixing it would save")
    )
    assert table.columns[-2:] == ("GPU-h/day", "cost/day")
    assert table.rows[0][-1] == show_price(2.5 * hours, "$")


def test_ranks_of_their_own_devices_count_each_and_those_on_a_cpu_do_not():
    analysis = analyse_recording(H200 / "1f1b_p3_m7")
    ranks = analysis.pipeline.ranks

    def counted(**device):
        told = tuple(replace(rank, **device) for rank in ranks)
        one = SimpleNamespace(ranks=told, absent=(7,))
        return count_rates([one], [SimpleNamespace(draw_w=300.0)], Tariff())

    whole = counted(multiprocessors=132)
    assert (whole.gpus, whole.watts_per_gpu) == (4, 300.0)  # with the one that has no trace
    assert whole.worth_of(0.5).kwh_per_day == pytest.approx(0.3 * 24 * 4 / 2)
    assert counted(device=("", -1)) is None
