"""Several stages on a rank and no label: the order of passes and messages names them all."""

from __future__ import annotations

import pytest
from support.simulator.analysis import (
    BUFFERED,
    EARLY,
    FUSED,
    assert_all_named,
    assert_measured,
    assert_measured_shares,
    setup_of,
    simulated,
)

from debubble.errors import Code

MEGATRON = {"megatron": True}

# schedule, ranks, microbatches, chunks, how messages behave
RUNS = [
    ("interleaved-1f1b", 4, 8, 2, BUFFERED),
    ("interleaved-1f1b", 4, 8, 2, EARLY),
    ("interleaved-1f1b", 3, 6, 3, EARLY),
    ("interleaved-1f1b", 4, 4, 2, BUFFERED),
    ("interleaved-1f1b", 2, 4, 2, BUFFERED),
    ("interleaved-1f1b", 2, 6, 3, BUFFERED),
    ("interleaved-1f1b", 4, 8, 2, MEGATRON),
    ("interleaved-1f1b", 4, 8, 3, MEGATRON),
    ("interleaved-1f1b", 3, 9, 2, MEGATRON),
    ("looped-bfs", 4, 5, 2, BUFFERED),
    ("looped-bfs", 3, 3, 3, EARLY),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks", "behaviour"), RUNS)
def test_stage_kind_and_microbatch_are_all_right(
    name, ranks, microbatches, chunks, behaviour, tmp_path
):
    found = simulated(
        tmp_path,
        setup_of(name, ranks, microbatches, chunks=chunks, **behaviour),
        labels="none",
    )
    assert_all_named(found)
    assert_measured(found)
    assert (found.figures.schedule, found.figures.microbatches) == (name, microbatches)


@pytest.mark.parametrize("labels", ["none", "runtime"])
def test_the_way_from_the_last_rank_back_to_the_first_is_a_hop(labels, tmp_path):
    setup = setup_of("interleaved-1f1b", 4, 8, buffered=True)
    found = simulated(tmp_path, setup, labels=labels)
    ways = [(hop.source, hop.destination, hop.count) for hop in found.figures.hops]
    inner = [(a, b, 32) for low in range(3) for a, b in ((low, low + 1), (low + 1, low))]
    assert sorted(ways) == sorted([*inner, (0, 3, 16), (3, 0, 16)])


@pytest.mark.parametrize("behaviour", [{"messages": 2}, {"messages": 2, "separate": True}])
def test_hidden_states_and_residual_go_around_as_one(behaviour, tmp_path):
    setup = setup_of("interleaved-1f1b", 4, 8, buffered=True, **behaviour)
    found = simulated(tmp_path, setup, labels="none")
    assert_all_named(found)
    assert found.figures.schedule == "interleaved-1f1b"


@pytest.mark.parametrize("name", ["interleaved-zb", "zbv"])
def test_an_order_that_cannot_be_told_is_said_to_be_unknown(name, tmp_path):
    """Weight gradients send nothing, so nothing parts one from the next."""
    found = simulated(tmp_path, setup_of(name, 4, 8, buffered=True), labels="none")
    assert Code.STAGES_UNKNOWN in [gap.code for gap in found.gaps]
    assert found.figures.schedule is None
    assert_measured_shares(found)


@pytest.mark.parametrize(("name", "behaviour"), [("1f1b", FUSED), ("gpipe", {}), ("gpipe", EARLY)])
def test_one_stage_a_rank_is_not_taken_for_several(name, behaviour, tmp_path):
    for ranks in (2, 3, 4):
        found = simulated(tmp_path / str(ranks), setup_of(name, ranks, 6, **behaviour))
        assert_all_named(found)
