"""When events happen, against the plain definition: the longest way to each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from debubble.simulate.events import NEVER_NS, Edges, Happened, Network, OrderCycle, Stretch


def network(events, target, source, floored=None):
    """The edges as one length each; where nothing is said any event may have a floor."""
    target, source = (np.array(ends, dtype=np.int64) for ends in (target, source))
    floored = np.ones(events, dtype=bool) if floored is None else np.array(floored)
    edges = Edges(target, source, "after", np.arange(len(target)))
    return Network(events, (edges,), floored=floored, asked=np.zeros(0, dtype=np.int64))


@st.composite
def graphs(draw):
    """Events that may wait for those with smaller numbers; only some may have a floor."""
    events = draw(st.integers(1, 12))
    pairs = [(target, source) for target in range(events) for source in range(target)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=30)) if pairs else []
    lengths = draw(st.lists(st.integers(0, 100), min_size=len(edges), max_size=len(edges)))
    floors = draw(st.lists(st.integers(-50, 50), min_size=events, max_size=events))
    floored = draw(st.lists(st.booleans(), min_size=events, max_size=events))
    waits = {target for target, _ in edges}
    floored = [may or event not in waits for event, may in enumerate(floored)]
    floors = [floor if may else NEVER_NS for floor, may in zip(floors, floored, strict=True)]
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    return network(events, *ends, floored), ends, np.array(lengths), np.array(floors)


def longest_ways(ends, lengths, floors):
    moments = floors.tolist()
    for event in range(len(moments)):
        for target, source, length in zip(*ends.tolist(), lengths.tolist(), strict=True):
            if target == event:
                moments[event] = max(moments[event], moments[source] + length)
    return moments


@given(graphs())
def test_every_event_happens_at_the_latest_of_its_sources(graph):
    run, ends, lengths, floors = graph
    assert run.run({"after": lengths}, floors).tolist() == longest_ways(ends, lengths, floors)


@given(graphs(), st.integers(2, 4), st.booleans())
def test_many_runs_at_once_are_as_many_single_ones(graph, runs, of_floors):
    run, ends, lengths, floors = graph
    many = np.arange(1, runs + 1)
    if of_floors:
        floors = np.where(floors[:, None] == NEVER_NS, NEVER_NS, floors[:, None] * many)
    else:
        lengths = lengths[:, None] * many
    together = run.run({"after": lengths}, floors)
    for column in range(runs):
        alone = (lengths, floors[:, column]) if of_floors else (lengths[:, column], floors)
        # Where nothing differs from run to run there is one.
        found = together[:, column] if together.ndim > 1 else together
        assert found.tolist() == longest_ways(ends, *alone)


def test_a_circle_is_refused_with_its_cure():
    with pytest.raises(OrderCycle, match="circle"):
        network(3, [1, 2, 1], [0, 1, 2])


def test_wide_levels_and_a_long_chain_behind_them_are_found_alike():
    random = np.random.default_rng(0)
    wide, levels, chain = 200, 260, 700
    target, source = [], []
    for level in range(1, levels):
        for event in range(level * wide, (level + 1) * wide):
            before = random.integers((level - 1) * wide, level * wide, 2)
            target += [event, event]
            source += before.tolist()
    first = wide * levels
    target += list(range(first, first + chain))
    source += [first - 1, *range(first, first + chain - 1)]
    after = random.integers(1, 9, len(target))
    run = network(first + chain, target, source)
    expected = np.zeros(first + chain, dtype=np.int64)
    for edge, (later, earlier) in enumerate(zip(target, source, strict=True)):
        expected[later] = max(expected[later], expected[earlier] + after[edge])
    found = run.run({"after": after}, np.zeros(first + chain, dtype=np.int64))
    assert found.tolist() == expected.tolist()


def test_the_way_back_covers_a_wait_and_never_blames_what_was_done():
    """Of any events: stretches follow each other, and in each the event alone was still to come."""
    draws = np.random.default_rng(5)
    for events in (2, 7, 40):
        target = np.repeat(np.arange(1, events), 2)
        source = (draws.random(len(target)) * target).astype(np.int64)
        after = draws.integers(0, 50, len(target))
        moments = network(events, target, source).run({"after": after}, np.zeros(events, int))
        happened = Happened(moments, (Edges(target, source, "after", np.arange(len(target))),))
        for event in range(events):
            stretches = [*happened.way_back(event, 0, int(moments[event]))][::-1]
            ends = [0, *(stretch.end_ns for stretch in stretches)]
            assert [stretch.begin_ns for stretch in stretches] == ends[:-1]
            assert ends[-1] == moments[event]
            for stretch in stretches:
                sources = moments[source[target == stretch.event]]
                assert stretch.begin_ns >= sources.max(initial=0)
                assert stretch.end_ns <= moments[stretch.event]


def test_a_wait_in_a_circle_has_no_event():
    edges = Edges(np.array([0, 1]), np.array([1, 0]), "after", np.array([0, 1]))
    happened = Happened(np.array([5, 5]), (edges,))
    assert [*happened.way_back(0, 0, 5)] == [Stretch(-1, -1, 0, 5)]
