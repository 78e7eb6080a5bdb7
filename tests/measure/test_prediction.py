"""What was predicted of a change, and how it stands against the run that made it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.measurements import sampled
from support.traces.read_once import analyse_recording
from support.traces.recordings import recorded_run

import debubble
from debubble.measure.prediction import Prediction, check_prediction, find_prediction
from debubble.measure.store import Store
from debubble.plan.change import Change
from debubble.timeline.job import Basis

BEFORE = sampled([0.4] * 6)
AFTER = sampled([0.3] * 6, split=(3, 5), bubble=0.2)


def predicted(change, latency_s=0.3, words="", basis=Basis.PROFILED):
    return Prediction.of(
        change,
        words=words or str(change),
        basis=basis,
        before_s=0.4,
        batch_latency_s=latency_s,
        low_s=0.95 * latency_s,
        high_s=1.05 * latency_s,
        bubble_fraction=0.2,
    )


SPLIT = predicted(Change(split=(3, 5)), words="split 3,5")
REPAIR = predicted(Change(split=(3, 5), repaired=((0, 1),)), words="split 3,5, repair hop 0:1")


@pytest.mark.parametrize(
    ("took", "bubble", "said"),
    [
        (0.36, 0.2, "slower than predicted: compute +20 %, waiting +20 %"),
        (0.36, 1 / 3, "slower than predicted: compute 0 %, waiting +100 %"),
        (0.24, 0.2, "faster than predicted: compute -20 %, waiting -20 %"),
    ],
)
def test_a_run_beside_the_interval_says_what_differs(took, bubble, said):
    check = check_prediction(SPLIT, BEFORE, sampled([took] * 6, split=(3, 5), bubble=bubble))
    assert check.sentence.endswith(said)


def test_a_prediction_is_laid_on_the_profiled_basis_where_the_later_run_has_no_other():
    pairs = tuple((None, 0.2) for _ in range(6))
    before = replace(BEFORE, unprofiled_s=pairs, unprofiled_batches_s=pairs)
    unprofiled = predicted(Change(split=(3, 5)), latency_s=0.15, basis=Basis.UNPROFILED)
    check = check_prediction(unprofiled, before, AFTER)
    assert (check.basis, check.verdict) == ("profiled", "as predicted")
    assert check.batch_latency_s == pytest.approx(0.3)


def test_a_change_that_no_figure_shows_is_never_guessed():
    repair = predicted(Change(repaired=((0, 1),)), words="repair hop 0:1")
    assert find_prediction((repair, SPLIT), BEFORE, BEFORE) is None
    assert find_prediction((repair, SPLIT), BEFORE, BEFORE, "repair hop 0:1") is repair


def test_other_stages_are_cut_evenly_unless_it_is_said():
    kept = (predicted(Change(schedule="zbv"), words="zbv"),)
    even = sampled([0.3] * 6, schedule="zbv", stages=4, split=(2, 2, 2, 2))
    assert find_prediction(kept, BEFORE, even) is kept[0]
    assert find_prediction(kept, BEFORE, replace(even, split=(1, 3, 2, 2))) is None


@pytest.mark.parametrize(
    ("before", "after", "change", "came"),
    [
        ("1f1b_m8_split3337", "1f1b_m8", "split 4,4,4,4", "as predicted"),
        ("1f1b_m8", "zbv_m8", "schedule zbv with 2 stages per rank", "as predicted"),
        ("gpipe_m8", "zbv_m8", "schedule zbv with 2 stages per rank", "as predicted"),
        ("zbv_m8", "1f1b_m8", "schedule 1f1b", "as predicted"),
        # Planned beside a slow hop, measured without.
        (
            "1f1b_m8_slow23",
            "zbv_m8",
            "schedule zbv with 2 stages per rank",
            "faster than predicted",
        ),
        # The one is even, the other is not; and nothing that shows was changed.
        ("zbv_m8", "1f1b_m8_split3337", None, None),
        ("fwd_closed_m8", "fwd_closed_m8_slow12", None, None),
    ],
)
@pytest.mark.slow
def test_recorded_changes_are_told_by_their_figures_and_come_as_predicted(
    before, after, change, came
):
    first, second = (analyse_recording(recorded_run(name)) for name in (before, after))
    plan = debubble.plan(first, frameworks=(), planned_for="any")
    found = debubble.compare(first, second, predicted=plan).predicted
    assert (found and (found.change, found.verdict)) == (change and (change, came))


@pytest.mark.parametrize(("message_bytes", "which"), [(1024, "grown"), (512, "cut")])
def test_a_larger_batch_is_told_from_the_same_one_cut_finer(message_bytes, which):
    kept = (
        predicted(Change(microbatches=16, hold="batch"), words="cut"),
        predicted(Change(microbatches=16, hold="microbatch"), words="grown"),
    )
    after = sampled([0.3] * 6, microbatches=16, message_bytes=message_bytes)
    assert find_prediction(kept, BEFORE, after).words == which


@pytest.mark.parametrize(
    ("hold", "message_bytes", "said"),
    [
        ("microbatch", 256, "the job holds its batch, so that its microbatches shrank"),
        ("batch", 1024, "so that its batch is 4.0 times as large"),
    ],
)
def test_a_job_that_keeps_something_else_than_was_predicted_is_said(hold, message_bytes, said):
    kept = predicted(Change(microbatches=32, hold=hold))
    after = sampled([0.3] * 6, microbatches=32, message_bytes=message_bytes)
    check = check_prediction(kept, BEFORE, after)
    assert check.verdict == "another batch than predicted"
    assert said in check.sentence
    assert check_prediction(kept, None, after).verdict == "as predicted"


def test_a_prediction_is_found_again_by_the_run_itself(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/h.db")
    store.add("plain", BEFORE, now_s=1.0, tags={})
    assert store.predicted_of(BEFORE) == ()
    store.add("planned", replace(BEFORE, predicted=(SPLIT, REPAIR)), now_s=2.0, tags={})
    later = replace(BEFORE, unprofiled_s=((None, 0.4),))  # timed after the capture was read
    assert store.predicted_of(later) == (SPLIT, REPAIR)
    assert store.predicted_of(AFTER) == ()
    store.close()
