"""Buffered messages: what receives show of wire and drain, and what is inferred of the rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.timelines.noisy_links import MS, SIZE, Case, lengths_of, program_of, slowed

from debubble.simulate.as_timeline import as_timeline
from debubble.simulate.engine import Engine
from debubble.simulate.lengths import hop_of
from debubble.simulate.measured import measure_step

STEADY = {"noise": 0.0, "unlike": 0.0, "tails": 0.0}


def measured(case, slow, hosts=None):
    """Run a step with one hop twice as slow, and measure it."""
    program = program_of(case)
    lengths = slowed(program, lengths_of(case, 0, 0), slow, 2.0)
    sizes = np.full(len(program.messages), SIZE, dtype=np.int64)
    timeline = as_timeline(program, Engine(program).run(lengths), message_bytes=sizes, step=0)
    if hosts:
        ranks = [
            replace(rank, device=(host, 0))
            for rank, host in zip(timeline.ranks, hosts, strict=True)
        ]
        timeline = replace(timeline, ranks=tuple(ranks))
    return lengths, program, measure_step(timeline, 0, 0)


@pytest.mark.parametrize("slow", [(0, 1), (1, 2), (2, 3)])
def test_wires_and_drains_are_found_whichever_of_them_receives_show(slow):
    """The hops after the slow one show no drain, and that before it hardly a wire."""
    lengths, program, step = measured(Case(schedule="forward-only", **STEADY), slow)
    assert not step.program.messages.rendezvous.any()
    assert not step.seen.drain.all()
    assert not (step.seen.wire & step.seen.drain).any()
    for hop in np.unique(hop_of(program)):
        here, there = hop_of(program) == hop, hop_of(step.program) == hop
        for name in ("wire", "drain", "sending"):
            found, true = getattr(step.lengths, name)[there], getattr(lengths, name)[here]
            assert np.sort(found).tolist() == np.sort(true).tolist(), (hop, name)


def test_an_early_send_tells_of_hops_inside_a_host_or_of_hops_between_hosts():
    """Only hop 0 → 1 has early sends; 2 → 3 is as 0 → 1 is, inside a host."""
    _, _, step = measured(Case(schedule="forward-only", **STEADY), (0, 1), hosts="aabb")
    meets = step.program.messages.rendezvous
    hop = hop_of(step.program)
    assert {int(one): bool(meets[hop == one].all()) for one in np.unique(hop)} == {
        0 * 4 + 1: False,
        1 * 4 + 2: True,
        2 * 4 + 3: False,
    }


def test_a_sender_that_is_kept_waiting_meets_its_receiver():
    _, _, step = measured(Case(schedule="gpipe", rendezvous=True, **STEADY), (0, 1))
    assert step.program.messages.rendezvous.all()
    assert step.seen.wire.all()
    assert step.lengths.wire.max() == pytest.approx(2.8 * MS)
