"""What passes and messages meet in a changed run, and what that makes of them: small runs by hand.

Each run is simulated with every pass and message at its mean; passes take 5 ms alone.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
from support.timelines.engine_runs import MS, planned_run

from debubble.simulate.communication import Communication
from debubble.simulate.costs.wire_pools import BUFFERED_BYTES
from debubble.simulate.planned import planned_engine
from debubble.simulate.predict import SPREAD, WhatIf, mean_lengths, predict
from debubble.timeline.model import PassKind
from debubble.timeline.schedules import order_of

WIRE_NS = 4 * MS


def a_source(name, ranks, microbatches, **wires):
    """A run whose messages take 4 ms one way, and as long at either end, if nothing else is set."""
    source = planned_run(name, ranks, microbatches, wire_ns=WIRE_NS)[0].source
    known = dict.fromkeys(("one_way", "both_ways", "sending", "drain"), WIRE_NS)
    known |= {"body": np.ones(1), "tail_ns": np.zeros(1), "step": np.zeros(1, dtype=np.int64)}
    return replace(source, wires=replace(source.wires, **(known | wires)))


def run_at_means(source, name, microbatches, way, **more):
    """The program, what everything takes in it, and when it happens."""
    order = order_of(name, len(source.ranks), microbatches)
    engine = planned_engine(order, way, rendezvous=not source.wires.buffers)
    what_if = WhatIf(order=order, communication=way, layers=source.passes.layers, **more)
    lengths = mean_lengths(engine, source, what_if)
    return engine.program, lengths, engine.run(lengths)


class TestBesideMessages:
    def test_a_moment_of_a_pass_beside_messages_does_what_share_of_its_work_is_left(self):
        source = a_source("forward-only", 2, 4, sending=10 * MS, one_way=10 * MS)
        program, lengths, _ = run_at_means(
            source, "forward-only", 4, Communication.ASYNCHRONOUS, beside=log(2)
        )
        # Rank 0 sends all the while from its first pass on; rank 1 receives until its last.
        by_rank = [(lengths.passes[program.passes.place == rank] / MS).tolist() for rank in (0, 1)]
        assert by_rank == [pytest.approx([5, 10, 10, 10]), pytest.approx([10, 10, 10, 5])]

    def test_a_part_of_a_pass_beside_them_makes_it_longer_by_that_part(self):
        source = a_source("forward-only", 2, 4, sending=3 * MS)
        program, lengths, _ = run_at_means(
            source, "forward-only", 4, Communication.ASYNCHRONOUS, beside=log(2)
        )
        # Of a pass that lasts 6.5 ms, 3 are beside its predecessor's send: half of them is lost.
        share = 3 / 6.5
        sends = lengths.passes[program.passes.place == 0][1:]
        expected = 1 / (1 - share * (1 - exp(-log(2))))
        assert sends / (5 * MS) == pytest.approx([expected] * 3, rel=0.005)


@pytest.mark.parametrize(("buffers", "drain"), [(True, 15 * MS), (False, 30 * MS)])
def test_over_a_slow_hop_what_is_buffered_is_underway_in_an_exchange_too(buffers, drain):
    """Half of each message fits on its way; where senders wait for receivers nothing does."""
    size = round(2 * BUFFERED_BYTES)
    source = a_source("1f1b", 2, 6, message_bytes=size, buffers=buffers)
    program, lengths, _ = run_at_means(
        source, "1f1b", 6, Communication.FUSED, hops_ns={(0, 1): 30 * MS}
    )
    slow = (program.batches.place[program.messages.sent] == 0) & program.messages.rendezvous
    assert slow.any()
    assert set(lengths.wire[slow].tolist()) == {30 * MS}
    assert lengths.drain[slow] == pytest.approx(np.full(slow.sum(), drain), rel=1e-3)


class TestMessages:
    def test_a_tail_is_added_to_the_wire_and_to_the_send_and_not_to_the_drain(self):
        wires = {"body": np.array([1.0, 2.0]), "tail_ns": np.array([0.0, 6.0 * MS])}
        source = a_source("forward-only", 2, 4, **wires, step=np.zeros(2, dtype=np.int64))
        _, lengths, _ = run_at_means(source, "forward-only", 4, Communication.POSTED)
        assert set(lengths.wire.tolist()) == {1.5 * WIRE_NS + 3 * MS}
        assert set(lengths.sending.tolist()) == {1.5 * WIRE_NS + 3 * MS}
        assert set(lengths.drain.tolist()) == {1.5 * WIRE_NS}

    def test_where_a_sender_waits_for_its_receiver_nothing_is_there_before(self):
        source = a_source("forward-only", 2, 4, drain=MS, buffers=False)
        way = Communication.POSTED
        assert set(run_at_means(source, "forward-only", 4, way)[1].drain.tolist()) == {WIRE_NS}
        source = a_source("forward-only", 2, 4, drain=MS, buffers=True)
        assert set(run_at_means(source, "forward-only", 4, way)[1].drain.tolist()) == {MS}

    def test_with_more_tokens_they_grow_as_sizes_do(self):
        source = a_source("forward-only", 2, 4)
        way = Communication.POSTED
        _, lengths, _ = run_at_means(source, "forward-only", 4, way, token_scale=16.0)
        assert set(lengths.wire.tolist()) == set(lengths.sending.tolist()) == {16 * WIRE_NS}
        assert lengths.passes / (5 * MS) == pytest.approx([16] * 8)


def test_other_layers_meet_what_those_that_are_asked_for_meet():
    """To compare many splits by: the shares are those of the one, the work is that of the other."""
    source = a_source("forward-only", 2, 4, sending=10 * MS, one_way=10 * MS)
    order, way = order_of("forward-only", 2, 4), Communication.ASYNCHRONOUS
    engine = planned_engine(order, way, rendezvous=False)
    asked = WhatIf(order=order, communication=way, layers=(1.0, 1.0), beside=log(2))
    one, other = (mean_lengths(engine, source, asked, layers) for layers in (None, (2.0, 0.5)))
    scale = np.where(engine.program.passes.place == 0, 2.0, 0.5)
    assert other.passes.tolist() == pytest.approx((one.passes * scale).tolist())


def test_an_interval_is_as_wide_as_launches_differ_and_as_the_measured_steps_are_unsure():
    source = a_source("forward-only", 2, 4)
    order = order_of("forward-only", 2, 4)
    same = WhatIf(order=order, communication=Communication.POSTED, layers=source.passes.layers)
    for unsure in (0.0, 0.1):
        found = predict(replace(source, window_spread=unsure), same)
        # Four draws of five of a normal one lie within 1.28 standard deviations.
        wide = log(found.high_ns / found.low_ns) / (2 * 1.2816)
        assert wide == pytest.approx(np.hypot(SPREAD, unsure), rel=0.01)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_a_backward_pass_is_cut_where_its_weight_gradients_end(share):
    source = planned_run("1f1b", 2, 4, weight_share=share)[0].source
    program, lengths, _ = run_at_means(source, "zb-h1", 4, Communication.RUNTIME)
    whole = run_at_means(source, "1f1b", 4, Communication.RUNTIME)
    backward = whole[1].passes[whole[0].passes.kind == PassKind.B].mean()
    later = (program.passes.stage == 1) & (program.passes.microbatch > 0)
    cut = {
        kind: lengths.passes[later & (program.passes.kind == kind)].mean()
        for kind in (PassKind.I, PassKind.W)
    }
    assert sum(cut.values()) == pytest.approx(1.05 * backward, rel=0.03)
    assert cut[PassKind.W] == pytest.approx(share * 1.05 * backward, rel=0.03, abs=2)
