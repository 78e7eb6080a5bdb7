"""Recorded runs of Megatron, torchtitan and DeepSpeed, against what is known of them.

Some are shipped, cut to what is read; others lie beside the repository.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from support.traces.framework_count import count
from support.traces.read_once import build_recording
from support.traces.recordings import DATA, SHARED, existing

from debubble.ledger.causes import Cause
from debubble.ledger.ledger import build_ledger
from debubble.ledger.verdict import name_causes
from debubble.plan.baseline import measure_baseline
from debubble.plan.change import Change
from debubble.plan.option import Idea, weigh
from debubble.plan.plan import make_plan
from debubble.report.answers.ledger import say_cause
from debubble.timeline.figures import measure_pipeline

SHIPPED = DATA / "frameworks"
BESIDE = SHARED / "frameworks"
SEVERAL = ("_tp", "_dp", "_fsdp")
MS = 1_000_000
SCHEDULES = {"1F1B": "1f1b", "Interleaved1F1B": "interleaved-1f1b"}


def folders():
    found = [*sorted(SHIPPED.glob("*/")), *sorted(BESIDE.glob("*/") if BESIDE.is_dir() else ())]
    return [pytest.param(folder, id=folder.name) for folder in found]


def beside(name) -> Path:
    return existing(BESIDE / name)


@cache
def analysed(folder):
    timeline = build_recording(folder)
    figures = [measure_pipeline(timeline, pipeline) for pipeline in timeline.pipelines]
    steps = [window.step for window in figures[0].windows]
    return timeline, figures, build_ledger(timeline, 0, steps)


def truths(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("truth*.json"))]


@pytest.mark.slow
@pytest.mark.parametrize("folder", folders())
def test_what_ran_is_told_as_its_own_job_has_it(folder):
    timeline, figures, _ = analysed(folder)
    said = truths(folder)
    first = said[0]
    ranks_a_pipeline = first["pp"]
    assert len(timeline.pipelines) == first["world"] // ranks_a_pipeline
    for one in figures:
        assert one.schedule == SCHEDULES[first["schedule"]]
        assert one.microbatches == first["m"]
        assert len(one.ranks) == ranks_a_pipeline
        for rank in one.ranks:
            chunks = [chunk["layers"] for chunk in said[rank.rank]["chunks"]]
            assert [layers.layers for layers in rank.layers] == chunks
            assert rank.recomputes == bool(first.get("recompute") not in {None, "none", 0})
            known = rank.parallelism
            assert known.framework == first["framework"].split()[0].partition("-")[0]
            assert (known.microbatch_size, known.sequence) == (1, first["seq"])
            if known.framework != "deepspeed":
                assert known.tensor == first["tp"]
                assert known.data == first["world"] // ranks_a_pipeline // first["tp"]


@pytest.mark.slow
@pytest.mark.parametrize("folder", folders())
def test_bubble_and_window_are_those_of_an_independent_count(folder):
    _, figures, _ = analysed(folder)
    bubble, window_s = count(folder)
    points = 0.01 if any(mark in folder.name for mark in SEVERAL) else 0.005
    found = [one.bubble_fraction for one in figures]
    assert sum(found) / len(found) == pytest.approx(bubble, abs=points)
    assert max(one.batch_latency_ns for one in figures) / 1e9 == pytest.approx(window_s, rel=0.01)


@pytest.mark.parametrize("folder", folders())
def test_its_replay_lands_and_little_stays_unexplained(folder):
    _, _, ledger = analysed(folder)
    assert abs(ledger.replay_error) < 0.02
    assert ledger.causes()[Cause.UNEXPLAINED] < 0.03 * ledger.total_ns


def saved(folder, cause):
    _, _, ledger = analysed(folder)
    return ledger.saving_of(cause).saved_ns / MS


def test_equal_stages_would_save_what_pairs_of_real_runs_differ_by():
    """Megatron 2,3,2,1 and torchtitan 1,1,1,5 were run with 2,2,2,2 as well."""
    assert saved(SHIPPED / "mg_2321", Cause.IMBALANCE) == pytest.approx(47, abs=10)
    assert saved(SHIPPED / "tt_1115", Cause.IMBALANCE) == pytest.approx(156, abs=20)


def test_a_host_that_does_not_wait_for_its_device_would_save_what_it_did():
    """The same run without batch_p2p_sync: a window of 405 instead of 422 ms."""
    assert saved(beside("mg_1f1b_m8"), Cause.HOST_SYNC) == pytest.approx(16.6, abs=4)
    assert saved(SHIPPED / "mg_nosync", Cause.HOST_SYNC) == pytest.approx(0, abs=1)


def test_the_head_is_named_and_so_is_the_setting_that_keeps_hosts():
    _, _, ledger = analysed(beside("mg_1f1b_m8"))
    said = " ".join(say_cause(ledger, one) for one in name_causes(ledger))
    assert "stage 3 on rank 3 takes 1.2 times the average stage (head and loss: " in said
    assert "batch_p2p_sync" in said


def baseline_of(folder):
    timeline, figures, _ = analysed(folder)
    return measure_baseline(timeline, figures[0])


@pytest.mark.parametrize(
    ("folder", "way"),
    [
        (SHIPPED / "ds_m8", "blocking"),
        (SHIPPED / "mg_nosync", "batched"),
        (SHIPPED / "mg_int_batched", "grouped"),
        (BESIDE / "mg_int_m8", "overlapped"),
        (BESIDE / "tt_1f1b_m8", "fused"),
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_how_messages_travel_is_told_and_the_run_is_simulated_as_it_is(folder, way):
    baseline = baseline_of(existing(folder))
    assert baseline.communication == way
    assert baseline.correction == pytest.approx(1, abs=0.05)


def predicted(folder, **change):
    return weigh(baseline_of(folder), Idea(lever="split", change=Change(**change)))


def test_a_split_that_was_run_is_predicted():
    """torchtitan 2,3,2,1 with its head: 1,1,1,5 took 427 ms, 2,2,2,2 took 272 ms."""
    folder = beside("tt_1f1b_m8")
    assert predicted(folder, split=(1, 1, 1, 5)).window_ns / MS == pytest.approx(427, rel=0.1)
    assert predicted(folder, split=(2, 2, 2, 2)).window_ns / MS == pytest.approx(272, rel=0.05)


@pytest.mark.slow
def test_no_split_is_offered_that_is_not_of_the_models_layers():
    for folder in (beside("tt_1f1b_m8"), SHIPPED / "tt_1115", SHIPPED / "ds_m8"):
        timeline, _, _ = analysed(folder)
        plan = make_plan(baseline_of(folder), timeline)
        splits = [one.change.split for one in plan.options if one.change.split]
        assert splits
        assert all(sum(split) == 8 for split in splits)


@pytest.mark.parametrize(
    ("source", "split", "target"),
    [("mg_1f1b_m8", (2, 3, 2, 1), "mg_2321"), ("tt_1f1b_m8", (1, 1, 1, 5), "tt_1115")],
)
def test_peak_memory_after_a_split_is_that_of_the_run(source, split, target):
    peaks = baseline_of(beside(source)).peaks(Change(split=split))
    for peak, truth in zip(peaks, truths(SHIPPED / target), strict=True):
        assert peak.peak_bytes == pytest.approx(truth["peak_bytes"], rel=0.05)


def test_where_the_peak_is_the_optimizers_microbatches_do_not_move_it():
    baseline = baseline_of(SHIPPED / "ds_m8")
    now = [rank.memory.peak_bytes for rank in baseline.ranks]
    assert all(rank.memory.between_peak_bytes == rank.memory.peak_bytes for rank in baseline.ranks)
    then = [peak.peak_bytes for peak in baseline.peaks(Change(microbatches=16))]
    assert then == pytest.approx(now, rel=0.01)
