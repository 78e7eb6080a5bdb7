"""Recorded runs: the account is exact, the replay lands on the run, the right one is blamed."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from support.traces.read_once import build_recording
from support.traces.recordings import H200, SHARED

from debubble.ledger.causes import Cause
from debubble.ledger.hop_health import account_for
from debubble.ledger.verdict import find_bottleneck, name_causes
from debubble.timeline.figures import measure_pipeline

ISSUED_IN_ORDER = (
    "1f1b_m8",
    "1f1b_m8_split3337",
    "1f1b_m8_slow23",
    "1f1b_p2_m4",
    "gpipe_m8",
    "fwd_closed_m4",
    "fwd_closed_m8",
    "fwd_closed_m8_slow12",
    "fwd_closed_m8_t512",
)
MISSING = f"{SHARED} is not there: not all recordings are shipped"
here = pytest.mark.skipif(not SHARED.is_dir(), reason=MISSING)


@cache
def ledger_of(folder):
    timeline = build_recording(folder)
    figures = measure_pipeline(timeline, 0)
    return account_for(timeline, figures), figures


def shared_ledger(name):
    return ledger_of(SHARED / name)[0]


def median_window(name):
    return ledger_of(SHARED / name)[1].batch_latency_ns


def assert_every_nanosecond_is_accounted_for(folder):
    ledger, figures = ledger_of(folder)
    windows = {window.step: window for window in figures.windows}
    for step, account in zip(ledger.steps, ledger.accounts, strict=True):
        window = windows[step.number]
        assert account.length_ns.sum() == len(ledger.ranks) * window.length_ns
        for place, rank in enumerate(ledger.ranks):
            mine = account.where(account.place == place)
            assert mine.start_ns[0] == 0
            assert mine.end_ns[-1] == window.length_ns
            assert (mine.start_ns[1:] == mine.end_ns[:-1]).all()
            assert (mine.length_ns > 0).all()
            # What is no wait is counted a second time, from the busy intervals themselves.
            occupied = rank.occupied.inside(window.start_ns, window.end_ns)
            computed = mine.total_of(Cause.COMPUTE) + mine.total_of(Cause.COLLECTIVE)
            waited_for = mine.root_kind != 3
            others = int(mine.length_ns[waited_for & (mine.cause == 1)].sum())
            assert computed - others == occupied


@pytest.mark.parametrize("folder", sorted(H200.iterdir()), ids=lambda path: path.name)
def test_own_recordings_are_accounted_for(folder):
    if folder.is_dir():
        assert_every_nanosecond_is_accounted_for(folder)


@pytest.mark.slow
@here
@pytest.mark.parametrize("name", [*ISSUED_IN_ORDER, "zbv_m8"])
def test_shared_recordings_are_accounted_for(name):
    assert_every_nanosecond_is_accounted_for(SHARED / "h200" / name)


@here
@pytest.mark.parametrize("name", ISSUED_IN_ORDER)
def test_a_replay_of_the_unchanged_step_lands_on_it(name):
    ledger = shared_ledger(f"h200/{name}")
    assert abs(ledger.replay_error) < 0.005
    assert ledger.causes()[Cause.UNEXPLAINED] < 0.03 * ledger.total_ns


@here
def test_a_replay_of_a_runtime_schedule_lands_on_it():
    ledger = shared_ledger("h200/zbv_m8")
    assert abs(ledger.replay_error) < 0.02
    assert ledger.causes()[Cause.UNEXPLAINED] < 0.03 * ledger.total_ns


def test_gaps_are_modelled_and_not_copied():
    """As many different gaps as classes, not as passes: no residue is carried over."""
    ledger, _ = ledger_of(H200 / "1f1b_p3_m7")
    for step in ledger.steps:
        classes = len(ledger.ranks) * len(np.unique(step.program.passes.kind))
        assert len(np.unique(step.lengths.pass_gaps)) <= classes < len(step.program.passes)
        assert len(np.unique(step.lengths.batch_gaps)) <= len(ledger.ranks)


@here
def test_the_long_last_stage_is_blamed_and_the_even_split_predicted():
    ledger = shared_ledger("h200/1f1b_m8_split3337")
    first = name_causes(ledger)[0]
    assert (first.cause, first.stage, first.rank) == (Cause.IMBALANCE, 3, 3)
    even = median_window("h200/1f1b_m8")
    # Ranks slow each other as much as this run shows: two thirds of what the even one does.
    assert first.saving.batch_latency_ns == pytest.approx(even, rel=0.04)


@here
def test_a_slow_hop_that_slack_hides_is_named_and_said_to_buy_little():
    ledger = shared_ledger("h200/1f1b_m8_slow23")
    first = name_causes(ledger)[0]
    assert (first.cause, first.hop) == (Cause.SLOW_LINK, (2, 3))
    assert first.times_expected > 3
    assert 0 < first.culprit_saved_ns < 0.07 * median_window("h200/1f1b_m8_slow23")


@here
def test_a_slow_hop_that_costs_is_named_with_its_price():
    ledger = shared_ledger("h200/fwd_closed_m8_slow12")
    first = name_causes(ledger)[0]
    assert (first.cause, first.hop) == (Cause.SLOW_LINK, (1, 2))
    lost = median_window("h200/fwd_closed_m8_slow12") - median_window("h200/fwd_closed_m8")
    # The run shows no slowdown of ranks by each other; the healthy one, busier, has some.
    assert first.culprit_saved_ns == pytest.approx(lost, rel=0.3)


@here
def test_the_straggler_of_a_production_job_is_blamed_as_its_authors_did():
    ledger = shared_ledger("public/bytedance-straggler-ST")
    first = name_causes(ledger)[0]
    assert (first.cause, first.stage) == (Cause.IMBALANCE, 3)
    assert first.saving.saved_ns / 1e9 == pytest.approx(0.33, abs=0.05)


@here
def test_a_stage_with_seven_layers_of_sixteen_takes_its_share_of_them():
    named = name_causes(shared_ledger("h200_free/c_fwd_m6_7333"))
    (long,) = (one for one in named if one.saving.causes == (Cause.IMBALANCE,))
    assert long.stage == 0
    assert long.times_equal == pytest.approx(7 / 4, rel=0.05)
    assert long.slower_layers is None


@here
def test_examples_point_into_the_file_of_the_rank_that_waits():
    ledger = shared_ledger("h200/1f1b_m8")
    for culprit in ledger.culprits:
        for example in culprit.examples:
            rank = next(one for one in ledger.ranks if one.rank == example.rank)
            assert example.file == rank.file
            begin = rank.stamp_us(min(step.begin_ns for step in ledger.steps))
            assert begin <= example.ts_us
            assert example.dur_us > 0


@here
def test_a_pipeline_that_waits_has_no_other_bottleneck():
    assert find_bottleneck(shared_ledger("h200/1f1b_m8"), {"optimizer": 1_000_000}) is None
    found = find_bottleneck(shared_ledger("h200/1f1b_m8"), {"optimizer": 10**12})
    assert found.what == "optimizer"
