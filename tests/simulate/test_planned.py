"""Planned programs held against closed forms, published figures and a simulator of kernels."""

from __future__ import annotations

from itertools import product
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.requirements import need_package
from support.simulator.devices import Play, true_windows
from support.simulator.host_programs import LENGTH_NS, Setup
from support.timelines.engine_runs import UNITS, lengths_of, run_order

from debubble.simulate.communication import (
    OF_ONE_SCHEDULE,
    Communication,
)
from debubble.simulate.engine import Engine
from debubble.simulate.hand_set import GivenCosts, give_lengths
from debubble.simulate.planned import plan_program, planned_engine
from debubble.simulate.theory import bubble_fraction
from debubble.timeline.model import PassKind
from debubble.timeline.schedules import SCHEDULES, Action, order_of

MS = 1_000_000
ALL = [way for way in Communication if way not in OF_ONE_SCHEDULE]
stage_times = st.lists(st.integers(1, 1000), min_size=1, max_size=6)


def window(order, units=UNITS, communication=Communication.LATENCY, **more):
    return int(run_order(order, units, communication, unit_ns=1, **more)[1].window_ns)


def longest_rank(program, times):
    place = program.passes.place
    return max(
        int(times.pass_end[place == rank].max() - times.pass_start[place == rank].min())
        for rank in range(len(program.ranks))
    )


@given(times=stage_times, microbatches=st.integers(1, 12))
def test_forward_passes_take_their_sum_and_the_longest_for_each_further_microbatch(
    times, microbatches
):
    order = order_of("forward-only", len(times), microbatches)
    expected = sum(times) + (microbatches - 1) * max(times)
    assert window(order, {"F": times}) == expected


@given(
    times=st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), min_size=1, max_size=6),
    microbatches=st.integers(1, 12),
)
def test_gpipe_takes_the_longest_forward_and_the_longest_backward_for_each_further_microbatch(
    times, microbatches
):
    forward, backward = zip(*times, strict=True)
    order = order_of("gpipe", len(times), microbatches)
    expected = sum(forward) + sum(backward) + (microbatches - 1) * (max(forward) + max(backward))
    assert window(order, {"F": forward, "B": backward}) == expected


@given(times=stage_times, microbatches=st.integers(1, 12), ratio=st.integers(1, 3))
def test_1f1b_never_takes_more_than_its_sum_and_the_longest_stage_for_each_further_microbatch(
    times, microbatches, ratio
):
    order = order_of("1f1b", len(times), microbatches)
    backward = [ratio * time for time in times]
    both = [forward + back for forward, back in zip(times, backward, strict=True)]
    limit = sum(both) + (microbatches - 1) * max(both)
    assert window(order, {"F": times, "B": backward}) <= limit


@pytest.mark.parametrize("communication", ALL)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 3), (4, 4), (4, 8), (8, 64)])
def test_equal_stages_and_free_transfers_wait_as_the_formula_says(
    communication, ranks, microbatches
):
    for name in ("forward-only", "gpipe", "1f1b"):
        order = order_of(name, ranks, microbatches)
        work = microbatches * sum(UNITS[kind] for kind in SCHEDULES[name].kinds)
        expected = bubble_fraction(ranks, microbatches)
        taken = window(order, communication=communication)
        assert 1 - work / taken == pytest.approx(expected, abs=1e-12)


# arXiv 2401.10241, its own profiles: p, m, F, I, W, comm in us → 1F1B, ZB-H1, ZB-H2.
PUBLISHED = [
    ((8, 24, 18522, 18086, 9337, 601), (0.2431, 0.1585, 0.1083)),
    ((8, 32, 18513, 18086, 9331, 626), (0.1985, 0.1242, 0.0837)),
    ((8, 64, 18546, 18097, 9321, 762), (0.1240, 0.0674, 0.0444)),
    ((16, 48, 11347, 11248, 8132, 377), (0.2552, 0.1397, 0.0672)),
    ((16, 64, 11307, 11254, 8101, 379), (0.2082, 0.1088, 0.0516)),
    ((16, 128, 11325, 11308, 8109, 378), (0.1251, 0.0576, 0.0266)),
    # The second set of the same authors.
    ((16, 48, 14407, 14380, 9676, 1610), (0.2935, 0.1719, 0.0932)),
    ((16, 64, 14412, 14393, 9688, 1621), (0.2491, 0.1349, 0.0716)),
    ((16, 128, 14316, 14306, 9639, 1619), (0.1707, 0.0723, 0.0371)),
    ((32, 96, 9458, 9748, 7288, 879), (0.2897, 0.1583, 0.0722)),
    ((32, 128, 9469, 9744, 7306, 892), (0.2442, 0.1238, 0.0551)),
    ((32, 256, 9447, 9644, 7193, 887), (0.1628, 0.0664, 0.0290)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "bubbles"), PUBLISHED)
def test_the_zero_bubble_papers_figures_come_out_to_four_digits(setting, bubbles):
    ranks, microbatches, forward, inputs, weights, comm = setting
    units = {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}
    ideal = microbatches * (forward + inputs + weights)
    for name, bubble in zip(("1f1b", "zb-h1", "zb-h2"), bubbles, strict=True):
        order = order_of(name, ranks, microbatches)
        found = longest_rank(*run_order(order, units, unit_ns=1, one_way=comm))
        assert 1 - ideal / found == pytest.approx(bubble, abs=0.5e-4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpipe", 33.0),
        ("1f1b", 33.0),
        ("interleaved-1f1b", 28.5),
        ("looped-bfs", 28.5),
        ("interleaved-zb", 25.5),
        ("zbv", 25.5),
        ("dualpipe-v", 27.0),
    ],
)
def test_four_ranks_and_eight_microbatches_take_what_torchs_orders_take(name, expected):
    chunks = SCHEDULES[name].least_chunks
    times = run_order(order_of(name, 4, 8), unit_ns=MS // chunks)[1]
    assert int(times.window_ns) / MS == expected


@pytest.mark.parametrize(("ranks", "share", "expected"), [
    (4, 1.0, 6.0), (4, 0.8, 4.2), (8, 1.0, 14.0), (8, 0.8, 9.8),
])  # fmt: skip
def test_dualpipe_v_waits_as_deepseek_says_also_where_a_pair_is_quicker(ranks, share, expected):
    order = order_of("dualpipe-v", ranks, 3 * ranks)
    program, times = run_order(order, pair_share=share)
    length = times.pass_end - times.pass_start
    # Pairs make ranks quicker, the last one most: it waits as long as the formula says.
    quickest = min(int(length[program.passes.place == rank].sum()) for rank in range(ranks))
    assert (int(times.window_ns) - quickest) / MS == pytest.approx(expected)


def test_neither_result_of_a_pair_leaves_before_both_are_done():
    order = [
        [Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "B", 1)],
        [Action(1, "F", 0), Action(1, "F", 1, overlap=True), Action(1, "B", 0), Action(1, "B", 1)],
    ]
    for communication in ALL:
        program, times = run_order(order, communication=communication)
        rows = {
            (stage, kind, number): row
            for row, (stage, kind, number) in enumerate(
                zip(
                    program.passes.stage,
                    program.passes.kind,
                    program.passes.microbatch,
                    strict=True,
                )
            )
        }
        both_done = times.pass_end[rows[1, PassKind.B, 0]]
        assert times.pass_start[rows[0, PassKind.B, 0]] == both_done == 5 * MS


def test_a_pair_starts_when_the_inputs_of_both_are_there():
    order = [
        [Action(0, "F", 0), Action(0, "F", 1, overlap=True), Action(0, "B", 0), Action(0, "B", 1)],
        [Action(1, "F", 0), Action(1, "B", 0), Action(1, "F", 1), Action(1, "B", 1)],
    ]
    for communication in ALL:
        program, times = run_order(order, communication=communication)
        # The gradient of microbatch 0 is there after 1 + 1 + 2; the forward pass could start at 1,
        # and does where torch runs the two one after the other.
        assert program.pairs.tolist() == [1]
        one_by_one = communication is Communication.RUNTIME
        assert times.pass_start[1] == (1 if one_by_one else 4) * MS
        assert times.pass_start[2] == (4 if one_by_one else 5) * MS


class TestCommunication:
    """Against a simulator that launches kernels: same window, to what launching takes."""

    SIZES = tuple(product((2, 4), (4, 8)))
    WIRE_NS = 700_000

    def played(self, name, ranks, microbatches, **how):
        setup = Setup(
            schedule=name, ranks=ranks, microbatches=microbatches, noise=0.0, steps=3,
            wire_ns=self.WIRE_NS, **how,
        )  # fmt: skip
        return median(end - begin for begin, end in true_windows(Play(setup))[1:])

    def planned(self, name, ranks, microbatches, communication, **how):
        order = order_of(name, ranks, microbatches)
        units = {kind: length + 4_000 for kind, length in LENGTH_NS.items()}
        return window(order, units, communication, one_way=self.WIRE_NS, **how)

    @pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
    def test_fused(self, ranks, microbatches):
        found = self.planned("1f1b", ranks, microbatches, Communication.FUSED, rendezvous=True)
        assert found == pytest.approx(
            self.played("1f1b", ranks, microbatches, fused=True), rel=0.002
        )

    @pytest.mark.parametrize("name", ["gpipe", "forward-only"])
    @pytest.mark.parametrize("rendezvous", [True, False])
    @pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
    def test_posted(self, name, ranks, microbatches, rendezvous):
        found = self.planned(
            name, ranks, microbatches, Communication.POSTED,
            rendezvous=rendezvous, drain=self.WIRE_NS // 2,
        )  # fmt: skip
        played = self.played(name, ranks, microbatches, buffered=not rendezvous, run_ahead=False)
        assert found == pytest.approx(played, rel=0.002)

    @pytest.mark.parametrize("torchs", ["Interleaved1F1B", "LoopedBFS"])
    def test_runtime(self, torchs):
        visualizer = need_package("torch.distributed.pipelining._schedule_visualizer")
        name = {"Interleaved1F1B": "interleaved-1f1b", "LoopedBFS": "looped-bfs"}[torchs]
        ops = visualizer.get_schedule_ops(torchs, 4, 8, 2, with_comms=True)
        lowered = tuple(
            tuple(w for w in map(str, rank) if "SHARD" not in w and "REDUCE" not in w)
            for rank in ops
        )
        found = self.planned(name, 4, 8, Communication.RUNTIME, drain=self.WIRE_NS // 2)
        played = self.played(name, 4, 8, buffered=True, lowered=lowered)
        assert found == pytest.approx(played, rel=0.002)
        # The receives that torch posts ahead stand in front of sends that are ready.
        assert found > 1.05 * self.planned(name, 4, 8, Communication.ASYNCHRONOUS)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("communication", ALL)
def test_every_order_runs_under_every_communication_and_none_is_quicker_than_plain_delays(
    name, communication
):
    order = order_of(name, 4, 8)
    taken = window(order, communication=communication, one_way=1)
    assert taken >= window(order, communication=Communication.LATENCY, one_way=1)
    assert taken > window(order, communication=communication)


def test_a_hop_is_a_queue_where_transfers_overlap_freely():
    # Three messages of 5 on a hop, made one every 1: the last is there after 1 + 3 * 5.
    order = order_of("forward-only", 2, 3)
    assert window(order, {"F": 1}, Communication.ASYNCHRONOUS, one_way=5) == 1 + 3 * 5 + 1
    assert window(order, {"F": 1}, Communication.LATENCY, one_way=5) == 3 + 5 + 1


class TestCircles:
    """1F1B of two ranks, posted: each sends first what the other will receive later."""

    ORDER = order_of("1f1b", 2, 4)

    def test_a_program_that_can_never_end_is_told(self):
        for rendezvous, circle in ((True, True), (False, False)):
            program = plan_program(self.ORDER, Communication.POSTED, rendezvous=rendezvous)
            assert Engine(program).waits_in_a_circle() == circle

    def test_messages_of_a_run_that_would_hang_are_buffered_instead(self):
        engine = planned_engine(self.ORDER, Communication.POSTED, rendezvous=True)
        assert not engine.program.messages.rendezvous.any()
        lengths = lengths_of(engine.program, self.ORDER, one_way=MS)
        buffered = run_order(self.ORDER, communication=Communication.POSTED, one_way=MS)[1]
        assert engine.run(lengths).window_ns == buffered.window_ns

    def test_those_of_one_that_runs_meet_as_they_were_said_to(self):
        engine = planned_engine(self.ORDER, Communication.BLOCKING, rendezvous=True)
        assert engine.program.messages.rendezvous.all()
        engine = planned_engine(self.ORDER, Communication.POSTED, rendezvous=False)
        assert not engine.program.messages.rendezvous.any()


class TestGivenLengths:
    ORDER = order_of("1f1b", 3, 4)

    def lengths(self, communication=Communication.FUSED, **costs):
        program = plan_program(self.ORDER, communication)
        even = {PassKind.F: np.array([1, 2, 3]), PassKind.B: np.array([4, 5, 6])}
        return program, give_lengths(program, GivenCosts(passes=even, **costs))

    def test_candidates_run_together_as_they_run_alone(self):
        draw = np.random.default_rng(0)
        passes = {kind: draw.integers(1, 99, (3, 5)) for kind in (PassKind.F, PassKind.B)}
        wires = draw.integers(1, 9, (2, 5))
        program = plan_program(self.ORDER, Communication.FUSED)
        engine = Engine(program)
        together = engine.run(give_lengths(program, GivenCosts(passes=passes, one_way=wires)))
        for one in range(5):
            own = {kind: table[:, one] for kind, table in passes.items()}
            costs = GivenCosts(passes=own, one_way=wires[:, one])
            alone = engine.run(give_lengths(program, costs))
            assert together.window_ns[one] == alone.window_ns
