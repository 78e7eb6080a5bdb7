"""Traps, each seen in somebody's trace, set on purpose in simulated ones."""

from __future__ import annotations

import re

import pytest
from support.simulator.analysis import (
    EARLY,
    FUSED,
    analyse,
    assert_all_named,
    assert_measured,
    assert_measured_shares,
    names_of,
    setup_of,
    simulated,
    true_names,
)
from support.simulator.devices import Play
from support.simulator.written_traces import Writing, write_run


@pytest.mark.parametrize(
    ("name", "behaviour"),
    [
        ("forward-only", {}),
        ("forward-only", {"separate": True}),
        ("gpipe", {}),
        ("gpipe", {"separate": True}),
        ("gpipe", {"early": True, "separate": True}),
        ("1f1b", FUSED),
    ],
)
def test_hidden_states_and_residual_are_one_hop(name, behaviour, tmp_path):
    setup = setup_of(name, 4, 5, messages=2, even=False, **behaviour)
    found = simulated(tmp_path, setup)
    assert_all_named(found)
    assert_measured(found)
    assert found.figures.schedule == name
    ways = [(hop.source, hop.destination) for hop in found.figures.hops]
    assert len(set(ways)) == len(ways) == (3 if name == "forward-only" else 6)


@pytest.mark.parametrize(
    ("name", "group", "behaviour"),
    [
        ("1f1b", "tp", FUSED),
        ("gpipe", "tp", EARLY),
        ("forward-only", "tp", EARLY),
        ("1f1b", "pp", FUSED),
        ("gpipe", "pp", {"messages": 2}),
        ("forward-only", "pp", {"messages": 2, "separate": True}),
    ],
)
def test_a_wait_in_the_middle_of_a_pass_does_not_part_it(name, group, behaviour, tmp_path):
    found = simulated(tmp_path, setup_of(name, 3, 5, **behaviour), waits_inside=group)
    assert sorted(names_of(found)) == sorted(true_names(found))
    assert_measured(found)


def test_a_recomputed_forward_pass_belongs_to_its_backward_pass(tmp_path):
    found = simulated(tmp_path, setup_of("1f1b", 3, 6, fused=True, recompute=True))
    assert_all_named(found)
    assert_measured(found)


def test_labels_may_count_microbatches_from_one(tmp_path):
    play = Play(setup_of("gpipe", 3, 4))
    write_run(play, tmp_path, Writing(labels="simple"))
    for file in tmp_path.glob("rank*.json"):
        text = re.sub(
            r"(Forward|Backward) (\d+)", lambda m: f"{m[1]} {int(m[2]) + 1}", file.read_text()
        )
        assert "Forward 0" not in text
        assert "Forward 4" in text
        file.write_text(text)
    found = analyse(tmp_path, play)
    assert found.figures.schedule == "gpipe"
    assert_all_named(found)


@pytest.mark.parametrize(("name", "labels"), [("forward-only", "none"), ("gpipe", "simple")])
def test_all_kernels_of_a_graph_belong_to_the_pass_that_launched_it(name, labels, tmp_path):
    found = simulated(tmp_path, setup_of(name, 3, 4, graphs=True), labels=labels)
    assert_all_named(found)
    assert_measured(found)


def test_work_belongs_to_the_step_of_its_launch_though_it_runs_in_the_next(tmp_path):
    found = simulated(tmp_path, setup_of("1f1b", 3, 4, fused=True, run_ahead=True))
    first, second = (step[1] for step in found.play.steps)
    late = [k for k in first.kernels if k.start_ns > second.start_ns and k.action]
    assert len(late) > len(first.kernels) // 2
    assert_all_named(found)


def test_peers_counted_inside_their_group_are_translated(tmp_path):
    setup = setup_of("1f1b", 4, 6, fused=True)
    found = simulated(tmp_path, setup, members=(1, 3, 5, 7), world=8)
    assert [rank.rank for rank in found.figures.ranks] == [1, 3, 5, 7]
    assert [rank.stages for rank in found.figures.ranks] == [(0,), (1,), (2,), (3,)]
    assert found.figures.schedule == "1f1b"
    assert_measured_shares(found)
    assert found.gaps == ()
