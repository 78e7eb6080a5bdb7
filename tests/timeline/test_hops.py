"""Hops: which stages they join, and what their messages take."""

from __future__ import annotations

import numpy as np
import pytest
from support.simulator.analysis import BUFFERED, EARLY, FUSED, setup_of, simulated
from support.simulator.host_programs import MS


def ways(found):
    return {(hop.source, hop.destination): hop.stages for hop in found.figures.hops}


def test_wire_and_wait_of_every_message_are_the_simulated_ones(tmp_path):
    found = simulated(tmp_path, setup_of("gpipe", 3, 4, wire_ns=2 * MS), labels="simple")
    for hop in found.figures.hops:
        assert hop.wire_ns == hop.wire_p95_ns == 2 * MS
        assert hop.wires == hop.count == 8
        assert hop.bytes_per_s == pytest.approx(hop.message_bytes / 2e-3)
    transfers = found.timeline.transfers
    mine = (transfers.source == 0) & (transfers.destination == 1)
    lengths = (transfers.receive_end_ns - transfers.receive_start_ns)[mine] - 2 * MS
    first = found.figures.hops[0]
    assert (first.source, first.destination) == (0, 1)
    assert first.wait_ns == round(float(np.median(np.maximum(lengths, 0))))
    assert first.wait_p95_ns == round(float(np.percentile(np.maximum(lengths, 0), 95)))
    assert first.wait_p95_ns > MS


def test_buffered_messages_show_no_wire(tmp_path):
    found = simulated(tmp_path, setup_of("1f1b", 4, 8, **FUSED, **BUFFERED))
    for hop in found.figures.hops:
        assert hop.wires == round((1 - hop.buffered_fraction) * hop.count)
    assert any(hop.wires < hop.count for hop in found.figures.hops)


def test_around_a_loop_the_last_rank_passes_on_to_the_first(tmp_path):
    found = simulated(tmp_path, setup_of("interleaved-1f1b", 3, 6, **EARLY), labels="runtime")
    assert ways(found)[2, 0] == ((2, 3),)
    assert ways(found)[0, 2] == ((3, 2),)
    assert ways(found)[0, 1] == ((0, 1), (3, 4))
    assert sum(hop.count for hop in found.figures.hops) == len(found.timeline.transfers)


def test_an_answer_to_the_first_of_two_ranks_is_no_hop(tmp_path):
    found = simulated(tmp_path, setup_of("forward-only", 2, 4), labels="simple")
    assert ways(found) == {(0, 1): ((0, 1),)}
