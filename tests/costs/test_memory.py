"""Peaks of memory predicted from other runs: of an allocator played here, and of real ones."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support.simulator.allocator import ACTIVATION, BATCH, MESSAGE, WORK, allocator_run
from support.timelines.by_hand import a_timeline
from support.traces.read_once import build_recording
from support.traces.recordings import recorded_run

from debubble.errors import UsageError
from debubble.simulate.costs.memory import (
    MemoryRun,
    RankMemory,
    fit_memory,
    memory_run,
    predict_peaks,
)
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.model import MemoryFigures
from debubble.timeline.schedules import order_of

MIB = 1024**2


def errors_of(run, target, **changes):
    layers = [0] * (1 + max(a.stage for actions in target.order for a in actions))
    for actions, rank in zip(target.order, target.ranks, strict=True):
        for stage, count in zip(sorted({a.stage for a in actions}), rank.layers, strict=True):
            layers[stage] = count
    peaks = predict_peaks(fit_memory(run), target.order, layers=layers, **changes)
    return [
        peak.peak_bytes / rank.peak_bytes - 1
        for peak, rank in zip(peaks, target.ranks, strict=True)
    ]


@pytest.mark.parametrize("target", [4, 12, 64])
def test_one_training_run_tells_what_the_batch_itself_takes(target):
    run = allocator_run("1f1b", 4, 8, [4, 4, 4, 4])
    errors = errors_of(run, allocator_run("1f1b", 4, target, [4, 4, 4, 4]))
    assert errors == pytest.approx([0] * 4, abs=1e-9)
    assert "its share of the batch" in " ".join(fit_memory(run).assumptions)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("layers", [[4, 4, 4, 4], [3, 3, 3, 7], [7, 2, 2, 5]])
def test_splits_and_schedules_are_told_from_one_run(name, layers):
    run = allocator_run("1f1b", 4, 8, [4, 4, 4, 4])
    errors = errors_of(run, allocator_run(name, 4, 8, layers))
    assert errors == pytest.approx([0] * 4, abs=1e-9)


def test_chunks_are_told_from_a_run_without():
    run = allocator_run("1f1b", 4, 8, [4, 4, 4, 4])
    errors = errors_of(run, allocator_run("interleaved-1f1b", 4, 8, [2] * 8, 2))
    assert errors == pytest.approx([0] * 4, abs=1e-9)


def test_microbatches_between_their_backward_passes_hold_more():
    costs = fit_memory(allocator_run("1f1b", 4, 8, [4, 4, 4, 4]))
    peaks = [p.activation_bytes for p in predict_peaks(costs, order_of("zbv", 4, 8))]
    chunk = 2 * ACTIVATION
    assert peaks[0] >= 8 * chunk
    assert peaks[3] >= 7 * 1.5 * chunk
    assert peaks == sorted(peaks)


def test_smaller_microbatches_hold_less():
    run = allocator_run("1f1b", 4, 8, [4, 4, 4, 4])
    costs = fit_memory(run)
    whole, half = (predict_peaks(costs, run.order, token_scale=scale)[1] for scale in (1.0, 0.5))
    saved = 3 * 4 * ACTIVATION / 2 + 8 * (2 * MESSAGE + BATCH) / 2 + WORK / 2
    assert whole.peak_bytes - half.peak_bytes == pytest.approx(saved)


def test_another_number_of_ranks_or_stages_is_refused():
    four, two = allocator_run("1f1b", 4, 8, [4] * 4), allocator_run("1f1b", 2, 8, [4] * 2)
    with pytest.raises(UsageError, match="4 ranks were measured, not 2"):
        predict_peaks(fit_memory(four), two.order)
    with pytest.raises(UsageError, match="3 numbers of layers do not fit 4 stages"):
        predict_peaks(fit_memory(four), four.order, layers=[4, 4, 8])


def a_rank_of(peak, **more):
    """One stage of two layers, of which everything but the peak is nothing."""
    known = dict.fromkeys(
        ("static_bytes", "gradient_bytes", "per_microbatch_bytes", "halfway_bytes",
         "transient_bytes", "received_bytes"), 0.0,
    )  # fmt: skip
    return RankMemory(**({"peak_bytes": peak, "layers": (2,)} | known | more))


def a_run_of(*ranks, name="1f1b", microbatches=4, message_bytes=0.0):
    order = order_of(name, len(ranks), microbatches)
    return MemoryRun(order=order, ranks=ranks, message_bytes=message_bytes)


def test_what_an_optimizer_holds_between_steps_is_the_peak_where_it_is_more():
    run = a_run_of(*[a_rank_of(100.0, between_peak_bytes=300.0)] * 2)
    peaks = predict_peaks(fit_memory(run), run.order)
    assert [rank.peak_bytes for rank in peaks] == [300.0, 300.0]
    # 150 a layer: it goes where layers go.
    moved = predict_peaks(fit_memory(run), run.order, layers=[1, 3])
    assert [rank.peak_bytes for rank in moved] == [150.0, 450.0]
    low = a_run_of(*[a_rank_of(100.0, between_peak_bytes=50.0)] * 2)
    assert predict_peaks(fit_memory(low), low.order)[0].peak_bytes == 100.0


def test_layers_weigh_what_they_do_on_ranks_that_hold_nothing_else():
    """The first of three has an embedding, the last a head; only the middle one tells."""
    ends, middle = (
        a_rank_of(0.0, gradient_bytes=gradient, per_microbatch_bytes=held)
        for gradient, held in ((90.0, 70.0), (10.0, 20.0))
    )
    costs = fit_memory(a_run_of(ends, middle, ends))
    assert costs.layer_gradient_bytes == 5.0
    assert costs.layer_activation_bytes == 10.0
    assert fit_memory(a_run_of(ends, ends)).layer_gradient_bytes == 45.0


def test_what_the_last_stage_holds_more_for_each_microbatch_goes_with_it():
    held = (24.0, 2), (24.0, 2), (44.0, 4), (30.0, 2)
    ranks = [a_rank_of(0.0, per_microbatch_bytes=size, layers=(n,)) for size, n in held]
    costs = fit_memory(a_run_of(*ranks))
    # A layer of the two in the middle holds 11.5; ranks hold 1 beyond theirs, the last one 7.
    assert costs.layer_activation_bytes == 11.5
    assert costs.loss_activation_bytes == 6.0
    # In a V the first rank holds the last stage as well, and so its loss.
    order = order_of("zbv", 4, 8)
    without = predict_peaks(replace(costs, loss_activation_bytes=0.0), order)
    more = [
        peak.peak_bytes - bare.peak_bytes
        for peak, bare in zip(predict_peaks(costs, order), without, strict=True)
    ]
    assert more[0] >= 6.0
    assert more[1:] == [0.0, 0.0, 0.0]


def test_what_waits_for_its_weight_gradient_holds_what_was_measured_or_half_as_much_again():
    seen = a_rank_of(0.0, per_microbatch_bytes=20.0, halfway_bytes=3.0)
    assert fit_memory(a_run_of(seen, seen)).halfway_share == pytest.approx(0.15)
    unseen = a_rank_of(0.0, per_microbatch_bytes=20.0)
    assert fit_memory(a_run_of(unseen, unseen)).halfway_share == 0.5


def test_a_weight_gradient_alone_needs_more_work_space_than_a_backward_pass():
    run = a_run_of(*[a_rank_of(100.0, transient_bytes=40.0, gradient_bytes=1.0)] * 2)
    costs = fit_memory(run)
    whole, split = (
        predict_peaks(costs, order_of(name, 2, 4))[1].peak_bytes for name in ("1f1b", "zb-h1")
    )
    assert split - whole == pytest.approx(0.37 * 40)


def test_input_gradients_that_were_sent_are_kept_until_the_step_ends():
    run = a_run_of(*[a_rank_of(100.0, gradient_bytes=1.0)] * 2, message_bytes=5.0)
    whole, split = (
        predict_peaks(fit_memory(run), order_of(name, 2, 4))[1] for name in ("1f1b", "zb-h1")
    )
    assert split.peak_bytes - whole.peak_bytes == pytest.approx(4 * 5.0)


@pytest.mark.parametrize("embedding", [0.0, 3.0])
def test_forward_only_a_rank_with_more_layers_bounds_what_a_layer_holds(embedding):
    """Layers of 10, and 20 that every rank has besides; an embedding makes the first one heavier.

    Ranks between the ends alone would say (3 x 10 + 20) / 3 = 16.7.
    """
    ranks = [
        a_rank_of(100.0, layers=(layers,), static_bytes=10.0 * layers + 20 + more)
        for layers, more in ((7, embedding), (3, 0.0), (3, 0.0), (3, 0.0))
    ]
    costs = fit_memory(a_run_of(*ranks, name="forward-only"))
    assert costs.layer_static_bytes == pytest.approx(10 + embedding / 4)


def test_recomputing_keeps_of_a_layer_what_it_is_given_and_never_more_than_before():
    rank = a_rank_of(0.0, per_microbatch_bytes=20.0)
    heavy, light = (fit_memory(a_run_of(rank, rank, message_bytes=size)) for size in (4.0, 400.0))
    for costs, spares in ((heavy, True), (light, False)):
        kept, recomputed = (
            predict_peaks(costs, order_of("1f1b", 2, 4), recompute=on)[0].activation_bytes
            for on in (False, True)
        )
        assert (recomputed < kept) is spares


def test_gradients_that_are_always_there_tell_no_multiple_and_layers_are_taken_to_be_equal():
    """As Megatron keeps them: the step of the curve is a sliver of what is held."""
    run = a_run_of(*[a_rank_of(0.0, static_bytes=1000.0, gradient_bytes=10.0)] * 2)
    costs = fit_memory(run)
    assert costs.layer_static_bytes == 500.0
    assert "spread evenly over the layers" in " ".join(costs.assumptions)
    told = a_run_of(*[a_rank_of(0.0, static_bytes=1000.0, gradient_bytes=240.0)] * 2)
    assert fit_memory(told).layer_static_bytes == 3 * 120.0


class TestMemoryOfATimeline:
    FIGURES = MemoryFigures(
        peak_bytes=500, peak_reserved_bytes=600, static_bytes=100, per_microbatch_bytes=20,
        transient_bytes=None, most_in_flight=2, limit_bytes=1000, passes_peak_bytes=400,
    )  # fmt: skip
    HOPS = [(0, 1, n, n, n + 1) for n in range(2)] + [(1, 0, n, n, n + 1) for n in range(2)]

    def run(self, memory, transfers=HOPS, order=None, stages=((0,), (1,)), layers=None):
        order = order or order_of("1f1b", 2, 2)
        timeline = a_timeline([(n, n, "F", 0, 0, 0, 1) for n in range(2)], transfers, stages)
        sizes = np.full(len(timeline.transfers), 6, dtype=np.int64)
        ranks = tuple(replace(rank, memory=memory) for rank in timeline.ranks)
        transfers = replace(timeline.transfers, message_bytes=sizes)
        return memory_run(replace(timeline, ranks=ranks, transfers=transfers), 0, order, layers)

    def test_the_peak_is_that_of_passes_and_what_is_not_known_is_nothing(self):
        run = self.run(self.FIGURES)
        assert [rank.peak_bytes for rank in run.ranks] == [400, 400]
        assert [rank.transient_bytes for rank in run.ranks] == [0, 0]
        assert [rank.layers for rank in run.ranks] == [None, None]
        whole = replace(self.FIGURES, passes_peak_bytes=None)
        assert self.run(whole).ranks[0].peak_bytes == 500

    def test_a_message_is_what_comes_to_a_rank_for_each_microbatch_and_input(self):
        run = self.run(self.FIGURES)
        assert run.message_bytes == 6.0
        assert [rank.received_bytes for rank in run.ranks] == [6.0, 6.0]
        assert self.run(self.FIGURES, self.HOPS * 2).message_bytes == 12.0
        # In a V each of two ranks has two inputs from the other.
        v = self.run(self.FIGURES, self.HOPS * 4, order_of("zbv", 2, 4), ((0, 3), (1, 2)))
        assert v.message_bytes == 6.0
        assert [rank.received_bytes for rank in v.ranks] == [12.0, 12.0]

    @pytest.mark.parametrize("missing", ["static_bytes", "per_microbatch_bytes"])
    def test_a_rank_that_does_not_tell_how_it_grows_is_refused(self, missing):
        for memory in (None, replace(self.FIGURES, **{missing: None})):
            with pytest.raises(UsageError, match="rank 0 does not tell how its memory grows"):
                self.run(memory)


@cache
def recorded(name):
    folder = recorded_run(name)
    timeline = build_recording(folder)
    figures = measure_pipeline(timeline, 0)
    chunks = len(timeline.ranks[0].stages)
    order = order_of(figures.schedule, len(timeline.ranks), figures.microbatches, chunks)
    run = memory_run(timeline, 0, order)
    for number, rank in enumerate(run.ranks):
        truth = json.loads((folder / f"truth{number}.json").read_text())
        assert rank.peak_bytes == truth["peak_bytes"]  # of steps that were not profiled
    return run


@pytest.mark.parametrize("name", ["1f1b_p2_m4", "1f1b_p3_m7", "1f1b_m8", "zbv_m8", "fwd_closed_m4"])
def test_a_real_run_is_predicted_by_itself(name):
    assert errors_of(recorded(name), recorded(name)) == pytest.approx(
        [0] * len(recorded(name).ranks), abs=1e-9
    )


@pytest.mark.parametrize(
    ("source", "target", "worst"),
    [
        # Another split, and another schedule: measured 0.8 % and 1.2 %.
        ("1f1b_m8", "1f1b_m8_split3337", 0.015),
        ("1f1b_m8_split3337", "1f1b_m8", 0.015),
        ("1f1b_m8", "gpipe_m8", 0.015),
        ("gpipe_m8", "1f1b_m8", 0.015),
        ("gpipe_m8", "1f1b_m8_split3337", 0.015),
        ("1f1b_m8_split3337", "gpipe_m8", 0.015),
        # Another number of microbatches, from one run: 2.6 %; the batch itself is not seen.
        ("fwd_closed_m4", "fwd_closed_m8", 0.03),
        ("fwd_closed_m8", "fwd_closed_m4", 0.03),
        # To a split backward pass, and from one: 0.7 and 1.0 %.
        ("1f1b_m8", "zbv_m8", 0.015),
        ("zbv_m8", "1f1b_m8", 0.015),
        # Forward only, from an uneven split: 1.9 %, and 5.6 % by ranks between the ends alone.
        ("../h200_free/c_fwd_m6_7333", "../h200_free/c_fwd_m6", 0.02),
    ],
)
def test_real_peaks_are_predicted_from_another_run(source, target, worst):
    errors = errors_of(recorded(source), recorded(target))
    assert max(map(abs, errors)) < worst


def test_a_real_run_tells_half_the_tokens():
    run = recorded("fwd_closed_m8")
    errors = errors_of(run, recorded("fwd_closed_m8_t512"), token_scale=0.5)
    assert max(map(abs, errors)) < 0.03


def test_a_layer_of_the_real_model_weighs_what_it_does():
    costs = fit_memory(recorded("1f1b_p3_m7"))
    layer = 8 * 4096 * 4096 * 2
    assert costs.layer_static_bytes == pytest.approx(layer, rel=0.05)
    assert costs.layer_gradient_bytes == pytest.approx(layer, rel=0.05)
    assert costs.layer_activation_bytes == pytest.approx(80 * MIB, rel=0.02)
    assert costs.message_bytes == 8 * MIB
