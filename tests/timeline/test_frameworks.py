"""Recorded runs of Megatron, torchtitan and DeepSpeed, against what is known of them.

Some are shipped, cut to what is read; others lie beside the repository.
"""

from __future__ import annotations

import json
from functools import cache
from math import exp
from pathlib import Path

import pytest
from support.traces.framework_count import count
from support.traces.read_once import build_recording
from support.traces.recordings import DATA, SHARED, existing

from debubble.ledger.causes import Cause
from debubble.ledger.ledger import build_ledger
from debubble.plan.baseline import measure_baseline
from debubble.plan.change import Change
from debubble.plan.option import Idea, weigh
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.model import PassKind

SHIPPED = DATA / "frameworks"
BESIDE = SHARED / "frameworks"
# Experts, context parallel, variable lengths, a slow device.
NEWER = SHARED.parent / "recordings" / "frameworks"
SEVERAL = ("_tp", "_dp", "_fsdp", "_cp", "_ep")
MS = 1_000_000
GIB = 2**30
SCHEDULES = {"1F1B": "1f1b", "Interleaved1F1B": "interleaved-1f1b", "DualPipeV": "dualpipe-v"}


def folders():
    found = [path for folder in (SHIPPED, BESIDE, NEWER) for path in sorted(folder.glob("*/"))]
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


def kinds_of(said):
    """Of torchtitan's deepseek_v3 the first layer is dense, the others have experts."""
    if said.get("model") != "deepseek_v3":
        return []
    (chunk,) = said["chunks"]
    if not chunk["embedding"]:
        return [("experts", chunk["layers"])]
    return [("dense", 1), ("experts", chunk["layers"] - 1)]


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
            kinds = [(kind.name, kind.layers) for one in rank.layers for kind in one.kinds]
            assert kinds == kinds_of(said[rank.rank])
            known = rank.parallelism
            assert known.framework == first["framework"].split()[0].partition("-")[0]
            lengths = first.get("varlen") or [first["seq"]]
            assert (known.microbatch_size, known.sequence) == (1, sum(lengths) / len(lengths))
            if known.framework != "deepspeed":
                sizes = first["tp"], first.get("cp", 1)
                assert (known.tensor, known.context) == sizes
                assert known.expert == first.get("ep", 1)
                assert known.data == first["world"] // ranks_a_pipeline // sizes[0] // sizes[1]


@pytest.mark.slow
@pytest.mark.parametrize("folder", folders())
def test_bubble_and_window_are_those_of_an_independent_count(folder):
    _, figures, _ = analysed(folder)
    bubble, window_s = count(folder)
    points = 0.01 if any(mark in folder.name for mark in SEVERAL) else 0.005
    found = [one.bubble_fraction for one in figures]
    assert sum(found) / len(found) == pytest.approx(bubble, abs=points)
    assert max(one.batch_latency_ns for one in figures) / 1e9 == pytest.approx(window_s, rel=0.01)


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


def test_a_slow_device_is_relieved_as_the_run_that_did_so():
    """Rank 2 has half the multiprocessors: 2,3,1,2 took 449 ms, and rank 1 held 12.52 GiB."""
    folder = existing(NEWER / "mg_throttled")
    split = 2, 3, 1, 2
    found = predicted(folder, split=split)
    assert found.low_ns / MS < 449 < found.high_ns / MS
    peaks = baseline_of(folder).peaks(Change(split=split))
    assert peaks[1].peak_bytes / GIB == pytest.approx(12.52, rel=0.05)


def test_a_layer_that_moves_takes_what_its_kind_does():
    """A dense layer and three with experts, then four with experts: 5,3 moves one with experts."""
    passes = baseline_of(existing(NEWER / "tt_moe_ep2_pp2")).source.passes
    each = [exp(passes.log_ns(PassKind.F, first=False, place=place)) / MS for place in (0, 1)]
    four, five, one = (passes.priced(split) * each for split in ((4, 4), (5, 3), (1, 7)))
    # The two stages as measured are two equations for two kinds of layers.
    experts = four[1] / 4
    assert five[0] - four[0] == pytest.approx(experts, rel=0.1)
    assert four[1] - five[1] == pytest.approx(experts, rel=0.001)
    assert one[0] == pytest.approx(four[0] - 3 * experts, abs=2.5)
