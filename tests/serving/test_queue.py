"""The closed queue against what theory says of it."""

import numpy as np
import pytest

from debubble.serving.queue import Queue, with_slots
from debubble.simulate.theory import bubble_fraction_of_stream


def queue_of(lengths, in_flight, *, back=0, wire=0, turn=0, opened=None):
    batches = 64
    length = np.tile(np.array(lengths, dtype=np.int64), (batches, 1))
    zeros = np.zeros_like(length)
    wires = zeros + wire
    wires[:, 0] = 0
    return Queue(
        in_flight=in_flight,
        length=length,
        busy=length,
        turn=zeros + turn,
        wire=wires,
        begin=zeros,
        lag=zeros,
        back=np.full(batches, back, dtype=np.int64),
        entered=np.zeros(batches, dtype=np.int64),
        opened=np.array(opened or [0] * len(lengths), dtype=np.int64),
    )


@pytest.mark.parametrize("in_flight", [1, 2, 3, 4, 8])
def test_equal_stages_wait_as_the_formula_says(in_flight):
    queue = queue_of([1000] * 4, in_flight)
    waits = 1 - 1000 / queue.turn_ns()
    assert waits == pytest.approx(bubble_fraction_of_stream(4, in_flight), abs=0.01)


@pytest.mark.parametrize("lengths", [[1000, 1000, 1000, 2500], [3000, 500, 500], [700, 900]])
@pytest.mark.parametrize("in_flight", [1, 2, 3, 6])
def test_a_turn_is_the_longest_stage_or_the_way_around_over_those_in_flight(lengths, in_flight):
    queue = queue_of(lengths, in_flight, back=200)
    around = (sum(lengths) + 200) / in_flight
    assert queue.turn_ns() == pytest.approx(max(*lengths, around), rel=0.02)


def test_a_wire_and_a_turn_of_the_host_are_the_stages_own():
    queue = queue_of([1000, 1000, 1000], 6, wire=300, turn=50)
    assert queue.turn_ns() == pytest.approx(1350, rel=0.01)


def test_more_in_flight_help_until_a_stage_is_always_at_work():
    turns = [with_slots(queue_of([1000] * 4, 1), slots).turn_ns() for slots in (1, 2, 4, 8)]
    assert turns == pytest.approx([4000, 2000, 1000, 1000], rel=0.02)


def test_a_stage_begins_with_what_it_still_had_to_do():
    """A capture begins while others wait at a stage: its first batch waits behind them."""
    queue = queue_of([1000] * 4, 8, opened=[0, 1000, 2000, 7000])
    start, _ = queue.run()
    assert start[0].tolist() == [0, 1000, 2000, 7000]
    assert start[1].tolist() == [1000, 2000, 3000, 8000]
