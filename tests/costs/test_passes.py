"""What passes take, on a few passes set by hand: medians, layers, ends, what slows them."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
from support.timelines.by_hand import MS, a_rank, a_timeline

from debubble.simulate.costs.passes import (
    WHOLE,
    PassModel,
    beside_messages,
    collectives_of,
    equal_stages,
    fit_passes,
    measure_passes,
    slowed_beside,
)
from debubble.simulate.overlap import share_under, time_under
from debubble.simulate.shared_device import SLOPE, trailing_activity
from debubble.timeline.model import Intervals, LayerKind, PassKind, StageLayers

F, B, I, W = (int(kind) for kind in PassKind)  # noqa: E741 (the papers' letter)


def ns(*milliseconds):
    return np.array(milliseconds, dtype=np.int64) * MS


def between(*stretches):
    start, end = zip(*stretches, strict=True)
    return Intervals(start_ns=ns(*start), end_ns=ns(*end))


class TestActivity:
    def test_a_pass_alone_counts_for_its_share_of_the_last_40_ms(self):
        assert trailing_activity(ns(100), ns(110)).tolist() == [0.25]
        assert trailing_activity(ns(100), ns(180)).tolist() == [1.0]

    def test_passes_at_once_count_each_and_those_long_over_do_not(self):
        found = trailing_activity(ns(0, 100, 100), ns(40, 140, 120))
        assert found.tolist() == [1.0, 1.5, 1.0]

    def test_time_under_others_counts_each_of_them_inside_the_stretch_alone(self):
        found = time_under(ns(10, 30), ns(20, 40), ns(0, 15), ns(18, 100))
        assert found.tolist() == [8 * MS + 5 * MS, 10 * MS]


class TestMedians:
    """One rank; microbatch 0 is the first of a step."""

    def costs(self, *passes, **changes):
        timeline = a_timeline(passes, stages=((0,),))
        return measure_passes(timeline.passes, (replace(timeline.ranks[0], **changes),))

    def test_a_first_microbatch_does_not_count_among_the_others(self):
        found = self.costs(
            (0, 0, "B", 0, 0, 0, 1), (0, 0, "B", 1, 0, 1, 4), (0, 0, "B", 2, 0, 4, 9)
        )
        assert found.median == {(0, B): 4 * MS}

    def test_it_has_a_median_of_its_own_where_several_steps_show_it_and_gradients_are_added_to(
        self,
    ):
        steps = [
            one
            for step, begin in ((0, 0), (1, 100))
            for one in (
                (0, 0, "F", 0, step, begin, begin + 1),
                (0, 0, "F", 1, step, begin + 1, begin + 3),
                (0, 0, "B", 0, step, begin + 3, begin + 6),
                (0, 0, "B", 1, step, begin + 6, begin + 11),
            )
        ]
        found = self.costs(*steps)
        assert found.first == {(0, B): 3 * MS}
        assert self.costs(*steps[:4]).first == {}
        assert found.typical((0, B), 0) == 3 * MS
        assert found.typical((0, B), 1) == 5 * MS
        assert found.typical((0, F), 0) == 2 * MS

    def test_collectives_and_gathers_inside_a_pass_are_none_of_its_work(self):
        found = self.costs(
            (0, 0, "F", 1, 0, 0, 10),
            busy=between((0, 6)),
            occupied=between((0, 9)),
            data_parallel=between((8, 9)),
        )
        assert found.median == {(0, F): (10 - 2 - 1) * MS}

    def test_a_first_stage_without_input_gradient_is_held_against_both_halves(self):
        found = equal_stages({(0, W): 50, (1, I): 10, (1, W): 20, (2, I): 14, (2, W): 30})
        assert found == {(0, W): 12 + 25, (1, I): 12, (1, W): 25, (2, I): 12, (2, W): 25}


def test_forward_passes_that_took_no_time_tell_nothing_of_their_data():
    """As marks of a busy machine had them once."""
    lengths = (6, 0, 30, 6, 6)
    passes = [
        (rank, rank, kind, m, 0, 200 * m + at, 200 * m + at + length)
        for m, length in enumerate(lengths)
        for rank, kind, at in ((0, "F", 0), (1, "F", 40), (1, "B", 80), (0, "B", 120))
    ]
    timeline = a_timeline(passes)
    found = measure_passes(timeline.passes, timeline.ranks)
    assert found.median[0, F] == 6 * MS


def test_a_collective_is_what_occupies_a_rank_beyond_compute_and_data_parallelism():
    rank = replace(
        a_rank(0, (0,)),
        busy=between((0, 4)),
        occupied=between((0, 9)),
        data_parallel=between((6, 7)),
    )
    found = collectives_of(rank)
    assert (found.start_ns // MS).tolist() == [4, 7]
    assert (found.end_ns // MS).tolist() == [6, 9]
    assert len(collectives_of(replace(rank, occupied=rank.busy)).start_ns) == 0


class TestFit:
    """Two ranks, one stage each; passes in milliseconds."""

    def test_a_layer_takes_what_passes_take_over_their_layers(self):
        passes = [(0, 0, "F", m, 0, 20 * m, 20 * m + 6) for m in (0, 1)]
        passes += [(1, 1, "F", m, 0, 20 * m + 6, 20 * m + 18) for m in (0, 1)]
        found = fit_passes(a_timeline(passes), 0, [2, 4])
        assert found.base[F, False, 0] == pytest.approx(log(3 * MS))
        assert found.base[F, False, 1] == pytest.approx(log(3 * MS))
        assert found.residuals == pytest.approx([0] * 4)
        assert found.layers == (2.0, 4.0)
        assert fit_passes(a_timeline(passes), 0).base[F, False, 1] == pytest.approx(log(12 * MS))

    def test_a_base_lies_in_the_middle_of_its_passes_and_residuals_say_how_far_they_are(self):
        passes = [(0, 0, "F", 0, 0, 0, 2), (0, 0, "F", 1, 0, 10, 18)]
        found = fit_passes(a_timeline(passes, stages=((0,),)), 0)
        assert found.base == {(F, False, 0): pytest.approx(log(4 * MS))}
        assert found.residuals == pytest.approx([-log(2), log(2)])

    def test_first_backward_passes_are_a_class_of_their_own_and_first_forward_passes_are_not(self):
        passes = [(0, 0, "F", 0, 0, 0, 2), (0, 0, "F", 1, 0, 2, 4)]
        passes += [(0, 0, "B", 0, 0, 4, 7), (0, 0, "B", 1, 0, 7, 11)]
        found = fit_passes(a_timeline(passes, stages=((0,),)), 0)
        assert {of: exp(base) / MS for of, base in found.base.items()} == pytest.approx(
            {(F, False, 0): 2, (B, True, 0): 3, (B, False, 0): 4}
        )
        assert found.stays[B, False] == pytest.approx(1 - 3 / 4)
        assert not found.splits_backward

    def test_a_first_stage_that_has_weight_gradients_alone_has_its_whole_backward_pass_in_them(
        self,
    ):
        passes = [(0, 0, "W", 1, 0, 20, 26), (1, 1, "I", 1, 0, 10, 13), (1, 1, "W", 1, 0, 13, 16)]
        found = fit_passes(a_timeline(passes), 0)
        assert set(found.base) == {(WHOLE, False, 0), (I, False, 1), (W, False, 1)}
        assert found.splits_backward

    def test_gathers_in_the_midst_of_a_pass_are_none_of_its_work(self):
        timeline = a_timeline([(0, 0, "F", 0, 0, 0, 10)], stages=((0,),))
        rank = replace(timeline.ranks[0], data_parallel=between((4, 7)))
        found = fit_passes(replace(timeline, ranks=(rank,)), 0)
        assert found.base[F, False, 0] == pytest.approx(log(7 * MS))


class TestEnds:
    """Three stages of two layers; the first has an embedding, the last a head."""

    PASSES = tuple(
        (n, n, "F", 0, 0, 50 * n, 50 * n + length) for n, length in enumerate((9, 6, 15))
    )

    def fitted(self, *rest, layers=(2, 2, 2), each=(3 * MS, 3 * MS, 3 * MS)):
        timeline = a_timeline(self.PASSES, stages=((0,), (1,), (2,)))
        ranks = tuple(
            replace(
                rank,
                layers=(
                    StageLayers(stage=n, layers=2, layer_ns=took, before_ns=0, after_ns=more * MS),
                ),
            )
            for n, (rank, took, more) in enumerate(zip(timeline.ranks, each, rest, strict=True))
        )
        return fit_passes(replace(timeline, ranks=ranks), 0, layers)

    def test_what_the_ends_have_besides_layers_is_counted_in_layers(self):
        found = self.fitted(3, 0, 9)
        assert found.extras == {F: pytest.approx((1.0, 3.0))}
        for place in range(3):
            assert found.base[F, False, place] == pytest.approx(log(3 * MS))

    def test_what_stages_between_have_too_is_part_of_every_layer(self):
        # 1.5 ms of 6: a quarter of each layer. The first has 1.5 + 3, the last 1.5 + 6.
        found = self.fitted(4.5, 1.5, 7.5)
        assert found.extras[F] == pytest.approx((1.0 / 1.25, 2.0 / 1.25))

    def test_less_than_a_tenth_of_a_layer_is_no_embedding(self):
        assert self.fitted(0.2, 0, 0.4).extras[F] == pytest.approx((0.0, 0.4 / 3))


class TestKinds:
    """One dense layer of 2 ms and seven with experts of 10 ms; kernels work for a half of that."""

    def fitted(self, slow=1):
        lengths = (2 + 3 * 10, slow * 4 * 10)
        passes = [(n, n, "F", 0, 0, 50 * n, 50 * n + length) for n, length in enumerate(lengths)]
        timeline = a_timeline(passes)
        kinds = (
            (a_kind("dense", 1, 2), a_kind("experts", 3, 10)),
            (a_kind("experts", 4, 10 * slow),),
        )
        ranks = tuple(
            replace(
                rank,
                layers=(
                    StageLayers(
                        stage=n,
                        layers=4,
                        layer_ns=sum(kind.layers * kind.layer_ns for kind in held) // 4,
                        before_ns=0,
                        after_ns=0,
                        kinds=held,
                    ),
                ),
            )
            for n, (rank, held) in enumerate(zip(timeline.ranks, kinds, strict=True))
        )
        return fit_passes(replace(timeline, ranks=ranks), 0, (4, 4))

    @pytest.mark.parametrize("slow", [1, 2])
    def test_each_layer_has_the_price_of_its_kind_wherever_it_goes(self, slow):
        found = self.fitted(slow)
        for split, first in (((4, 4), 32), ((5, 3), 42), ((1, 7), 2), ((0, 8), 0)):
            stages = found.priced(split)
            taken = [stages[n] * exp(found.base[F, False, n]) / MS for n in (0, 1)]
            assert taken == pytest.approx([first, slow * (72 - first)])

    def test_splits_are_priced_a_row_each(self):
        found = self.fitted()
        rows = np.array([(4, 4), (5, 3)])
        assert found.priced(rows).tolist() == [found.priced(row).tolist() for row in rows]
        assert found.layers == pytest.approx(found.priced((4, 4)))


def a_kind(name, layers, span):
    return LayerKind(name=name, layers=layers, layer_ns=span * MS // 2, span_ns=span * MS)


class TestSlope:
    """Two ranks; every other pass of rank 0 runs beside one of rank 1, and takes its own time."""

    PARTS = {"device": ("a", 0), "device_name": "NVIDIA H200", "multiprocessors": 33}  # noqa: RUF012

    def fitted(self, beside, alone=(40, 40), **device):
        passes = []
        for number in range(8):
            begin, together = 1000 * number, number % 2
            length = beside if together else alone[number % 4 // 2]
            passes.append((0, 0, "F", number, 0, begin, begin + length))
            other = begin + (0 if together else 500)
            passes.append((1, 1, "F", number, 0, other, other + 200))
        timeline = a_timeline(passes)
        ranks = tuple(replace(rank, **device) for rank in timeline.ranks)
        return fit_passes(replace(timeline, ranks=ranks), 0)

    @pytest.mark.parametrize(
        ("device", "slope"), [({}, 0.0), ({"device": ("a", 0)}, 0.0), (PARTS, SLOPE)]
    )
    def test_a_base_is_what_a_pass_takes_with_nobody_at_work_on_its_device(self, device, slope):
        """Ranks that do not surely share a device slow nobody, whatever was seen."""
        found = self.fitted(66, **device)
        assert found.slope == slope
        expected = (log(40 * MS) + log(66 * MS)) / 2 - slope * 1.5
        assert found.base[F, False, 0] == pytest.approx(expected)


class TestShares:
    def test_a_share_lies_under_some_others_however_many(self):
        found = share_under(ns(10, 30), ns(20, 40), ns(0, 11, 36, 90), ns(15, 18, 99, 95))
        assert found.tolist() == [0.8, 0.4]
        assert share_under(ns(10), ns(20), ns(), ns()).tolist() == [0.0]

    def test_a_pass_lies_beside_what_its_own_rank_sends_and_receives_waiting_or_not(self):
        passes = [(0, 0, "F", 0, 0, 0, 10), (1, 1, "F", 0, 0, 0, 10), (2, 2, "F", 0, 0, 0, 10)]
        # Rank 0 sends from 2 to 6; rank 1 waits for it from 1, and sends back from 4 to 8.
        messages = [(0, 1, 2, 1, 6), (1, 0, 4, 5, 8)]
        timeline = a_timeline(passes, messages, stages=((0,), (1,), (2,)))
        found = beside_messages(timeline.passes, timeline.transfers)
        assert found.tolist() == pytest.approx([0.6, 0.7, 0.0])

    def test_a_moment_beside_messages_does_less_work(self):
        assert exp(slowed_beside(log(2), 0.5)) == pytest.approx(1 / (1 - 0.5 * 0.5))
        assert exp(slowed_beside(log(2), 1.0)) == pytest.approx(2.0)
        assert slowed_beside(log(2), 0.0) == slowed_beside(0.0, 0.7) == 0.0


class TestBeside:
    """Eight passes that take 50 ms alone; beside some a message goes on for 20 ms, at a cost."""

    PART = {"device": ("a", 0), "device_name": "NVIDIA H200", "multiprocessors": 30}  # noqa: RUF012

    def fitted(self, slowdown, among=(1, 3, 5, 7), **device):
        passes, messages = [], []
        for number in range(8):
            begin = 1000 * number
            # Of each millisecond beside a message, this much of one is done.
            lost = round(20 * (1 - 1 / slowdown)) if number in among else 0
            passes.append((0, 0, "F", number, 0, begin, begin + 50 + lost))
            passes.append((1, 1, "F", number, 0, begin + 500, begin + 550))
            if number in among:
                messages.append((0, 1, begin + 10, begin + 10, begin + 30))
        timeline = a_timeline(passes, messages)
        ranks = tuple(replace(rank, **device) for rank in timeline.ranks)
        return fit_passes(replace(timeline, ranks=ranks), 0)

    @pytest.mark.parametrize("slowdown", [1.0, 1.25, 2.0])
    @pytest.mark.parametrize("device", [{}, {"multiprocessors": 132}, PART])
    def test_a_slowdown_is_found_as_it_was_planted(self, slowdown, device):
        found = self.fitted(slowdown, **device)
        assert exp(found.beside) == pytest.approx(slowdown, rel=0.02)
        assert found.tells_beside
        # What a pass takes alone.
        if not device:
            assert exp(found.base[F, False, 0]) == pytest.approx(50 * MS, rel=0.001)

    def test_where_nothing_overlaps_parts_of_a_device_have_what_others_showed_and_whole_ones_none(
        self,
    ):
        for device, beside in ((self.PART, 0.14), ({"multiprocessors": 132}, 0.0), ({}, 0.0)):
            found = self.fitted(1.0, among=(), **device)
            assert found.beside == beside
            assert not found.tells_beside

    def test_one_pass_that_is_not_like_the_others_tells_nothing(self):
        assert not self.fitted(1.0, among=range(1, 8)).tells_beside
        assert not self.fitted(1.0, among=(3,)).tells_beside


def a_model(base, **more):
    known = {
        "residuals": np.zeros(1),
        "slope": 0.0,
        "layers": (1.0, 1.0),
        "extras": {},
        "beside": 0.0,
        "tells_beside": False,
        "stays": {(kind, first): 0.0 for kind, first, _ in base},
    }
    return PassModel(base=base, **(known | more))


class TestModel:
    def test_a_rank_without_such_a_pass_has_the_mean_of_the_others(self):
        model = a_model({(B, True, 0): 1.0, (B, False, 0): 2.0, (B, False, 1): 4.0})
        assert model.log_ns(B, first=True, place=0) == 1.0
        assert model.log_ns(B, first=True, place=1) == 4.0
        assert model.log_ns(B, first=False, place=7) == 3.0
        assert model.log_ns(B, first=True, place=7) == 1.0
        assert model.log_ns(W, first=False, place=0) is None

    def test_a_run_of_one_microbatch_tells_of_the_others_too(self):
        assert a_model({(B, True, 0): 1.0}).log_ns(B, first=False, place=0) == 1.0

    def test_with_more_tokens_each_kind_grows_as_it_does(self):
        model = a_model(
            {(F, False, 0): 0.0, (B, False, 0): 1.0},
            stays={(F, False): 0.0, (B, False): 0.5},
        )
        grown = model.with_tokens(3.0).base
        assert grown[F, False, 0] == pytest.approx(log(3))
        assert grown[B, False, 0] == pytest.approx(1 + log(0.5 + 0.5 * 3))


def test_stamps_as_traces_have_them_are_counted_as_small_ones_are():
    begun, over = np.arange(8) * 1_000, np.arange(8) * 1_000 + 600
    start, end = np.array([100, 3_300]), np.array([5_200, 9_000])
    small = time_under(start, end, begun, over)
    assert small.tolist() == [500 + 4 * 600 + 200, 300 + 4 * 600]
    years = 1_800_000_000_000_000_000
    assert time_under(start + years, end + years, begun + years, over + years).tolist() == (
        small.tolist()
    )
