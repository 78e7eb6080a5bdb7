"""When events happen, against the plain definition: the longest way to each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from debubble.simulate.events import Edges, EventGraph, Happened, OrderCycle, Stretch, Waits


@st.composite
def graphs(draw):
    events = draw(st.integers(1, 12))
    pairs = [(target, source) for target in range(events) for source in range(target)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=30)) if pairs else []
    lengths = draw(st.lists(st.integers(0, 100), min_size=len(edges), max_size=len(edges)))
    floors = draw(st.lists(st.integers(-50, 50), min_size=events, max_size=events))
    names = draw(st.permutations(range(events)))
    return events, edges, lengths, floors, names


def longest_ways(events, edges, lengths, floors):
    moments = list(floors)
    for event in range(events):
        for (target, source), length in zip(edges, lengths, strict=True):
            if target == event:
                moments[event] = max(moments[event], moments[source] + length)
    return moments


@given(graphs())
def test_every_event_happens_at_the_latest_of_its_sources(graph):
    events, edges, lengths, floors, names = graph
    target = np.array([names[one] for one, _ in edges], dtype=np.int64)
    source = np.array([names[one] for _, one in edges], dtype=np.int64)
    floor = np.zeros(events, dtype=np.int64)
    floor[list(names)] = floors
    after, expected = (
        np.array(lengths, dtype=np.int64),
        longest_ways(events, edges, lengths, floors),
    )
    moments = EventGraph(events, target, source).run(after, floor)
    assert moments[list(names)].tolist() == expected
    without_levels = Waits(events, target, source).run_once(after, floor)
    assert without_levels[list(names)].tolist() == expected


@given(graphs(), st.integers(2, 4))
def test_many_runs_at_once_are_as_many_single_ones(graph, runs):
    events, edges, lengths, floors, _ = graph
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    many = np.array(lengths, dtype=np.int64)[:, None] * np.arange(1, runs + 1)
    together = EventGraph(events, *ends).run(many, np.array(floors, dtype=np.int64))
    for run in range(runs):
        alone = longest_ways(events, edges, many[:, run].tolist(), floors)
        assert together[:, run].tolist() == alone


@given(graphs(), st.integers(1, 3))
def test_floors_may_differ_from_run_to_run(graph, runs):
    events, edges, lengths, floors, _ = graph
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    many = np.array(floors, dtype=np.int64)[:, None] * np.arange(1, runs + 1)
    together = EventGraph(events, *ends).run(np.array(lengths, dtype=np.int64), many)
    for run in range(runs):
        assert together[:, run].tolist() == longest_ways(events, edges, lengths, many[:, run])


def test_a_circle_is_refused_with_its_cure():
    with pytest.raises(OrderCycle, match="circle"):
        EventGraph(3, np.array([1, 2, 1]), np.array([0, 1, 2]))
    with pytest.raises(OrderCycle, match="circle"):
        Waits(3, np.array([1, 2, 1]), np.array([0, 1, 2])).run_once(*np.zeros((2, 3), dtype=int))


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
    graph = EventGraph(first + chain, np.array(target), np.array(source))
    expected = np.zeros(first + chain, dtype=np.int64)
    for edge, (later, earlier) in enumerate(zip(target, source, strict=True)):
        expected[later] = max(expected[later], expected[earlier] + after[edge])
    found = graph.run(after, np.zeros(first + chain, dtype=np.int64))
    assert found.tolist() == expected.tolist()


def test_the_way_back_covers_a_wait_and_never_blames_what_was_done():
    """Of any events: stretches follow each other, and in each the event alone was still to come."""
    draws = np.random.default_rng(5)
    for events in (2, 7, 40):
        target = np.repeat(np.arange(1, events), 2)
        source = (draws.random(len(target)) * target).astype(np.int64)
        graph = EventGraph(events, target, source)
        after = draws.integers(0, 50, len(target))
        moments = graph.run(after, np.zeros(events, dtype=np.int64))
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
