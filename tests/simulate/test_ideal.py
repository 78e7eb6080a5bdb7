"""Orders run with nothing in their way wait exactly as theory says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from debubble.simulate.events import OrderCycle
from debubble.simulate.theory import bubble_fraction, bubble_fraction_of_stream, ideal_bubble
from debubble.timeline.schedules import Action, order_of

UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


@pytest.mark.parametrize("name", ["forward-only", "gpipe", "1f1b"])
@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 20), backward=st.floats(0.5, 4))
def test_the_formula_holds_for_one_stage_a_rank(name, ranks, microbatches, backward):
    order = order_of(name, ranks, microbatches)
    waits = ideal_bubble(order, {**UNITS, "B": backward})
    assert waits == pytest.approx(bubble_fraction(ranks, microbatches), abs=1e-9)


@pytest.mark.parametrize(
    ("name", "chunks", "expected"),
    [
        ("looped-bfs", 2, 0.1579),
        ("interleaved-1f1b", 2, 0.1579),
        ("zb-h1", 1, 0.1111),
        ("interleaved-zb", 2, 0.0588),
        ("zbv", 2, 0.0588),
        ("dualpipe-v", 2, 0.1111),
    ],
)
def test_published_figures_for_4_ranks_and_8_microbatches(name, chunks, expected):
    assert ideal_bubble(order_of(name, 4, 8, chunks), UNITS) == pytest.approx(expected, abs=1e-4)


def test_an_order_that_cannot_finish_is_refused():
    crossed = [[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    with pytest.raises(OrderCycle):
        ideal_bubble(crossed, UNITS)


def test_a_stream_with_as_many_batches_as_ranks_need_not_wait():
    assert [bubble_fraction_of_stream(4, k) for k in (1, 2, 4, 5)] == [0.75, 0.5, 0.0, 0.0]
