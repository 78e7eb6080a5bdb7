"""Memory and layers of the recorded runs, against what is known of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import H200, SHARED

from debubble.timeline.build import build_timeline
from debubble.timeline.layers import find_blocks
from debubble.trace.run import find_run, read_run

MIB = 1024**2
# One block of width 4096 keeps, of 1024 tokens in bf16: input, norm's output, 4x wide twice.
MESSAGE_BYTES = 1024 * 4096 * 2
BLOCK_BYTES = MESSAGE_BYTES * (1 + 1 + 4 + 4)


def timeline_of(name):
    folder = H200 / name if (H200 / name).is_dir() else SHARED / "h200" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: only a part of our recordings is shipped")
    return build_timeline(read_run(find_run([str(folder)])).ranks), folder


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("1f1b_p2_m4", [8, 8]),
        ("fwd_closed_m4", [4, 4, 4, 4]),
        ("1f1b_m8", [4, 4, 4, 4]),
        ("1f1b_m8_split3337", [3, 3, 3, 7]),
        ("gpipe_m8", [4, 4, 4, 4]),
    ],
)
def test_the_layers_of_each_stage_are_counted_without_labels(name, layers):
    timeline, _ = timeline_of(name)
    assert [rank.layers[0].layers for rank in timeline.ranks] == layers


def test_both_stages_of_a_rank_have_their_layers():
    timeline, _ = timeline_of("zbv_m8")
    assert [[one.layers for one in rank.layers] for rank in timeline.ranks] == [[2, 2]] * 4
    assert [[one.stage for one in rank.layers] for rank in timeline.ranks] == [
        [0, 7],
        [1, 6],
        [2, 5],
        [3, 4],
    ]


def test_what_the_last_stage_adds_is_left_over():
    timeline, _ = timeline_of("1f1b_p2_m4")
    first, last = timeline.ranks
    assert first.layers[0].after_ns == first.layers[0].before_ns == 0
    assert last.layers[0].after_ns > 50_000


@given(
    block=st.lists(st.integers(0, 5), min_size=2, max_size=8),
    count=st.integers(2, 6),
    before=st.lists(st.integers(10, 15), max_size=4),
    after=st.lists(st.integers(20, 25), max_size=4),
)
def test_any_repeated_block_is_found(block, count, before, after):
    names = np.array([*before, *(block * count), *after], dtype=np.int32)
    blocks = find_blocks(names)
    covered = names[blocks.first : blocks.first + blocks.period * blocks.count]
    assert len(covered) >= len(block) * count
    assert np.array_equal(covered, np.tile(covered[: blocks.period], blocks.count))


def test_a_sequence_that_never_repeats_has_no_layers():
    assert find_blocks(np.arange(30, dtype=np.int32)) is None
    assert find_blocks(np.zeros(0, dtype=np.int32)) is None


@pytest.mark.parametrize("name", ["1f1b_p2_m4", "1f1b_m8", "1f1b_m8_split3337", "gpipe_m8"])
def test_a_microbatch_in_flight_costs_what_its_activations_weigh(name):
    timeline, folder = timeline_of(name)
    for rank in timeline.ranks:
        truth = json.loads((folder / f"truth{rank.rank}.json").read_text())
        layers = rank.layers[0].layers
        # The last stage has an output and its gradient as well.
        ends = 2 * MESSAGE_BYTES * (rank.rank == timeline.ranks[-1].rank)
        weight = layers * BLOCK_BYTES + ends
        assert rank.memory.per_microbatch_bytes == pytest.approx(weight, rel=0.02)
        # Parameters and their gradients, both in bf16; the batch, receive buffers, work spaces.
        beyond = rank.memory.static_bytes - 2 * truth["param_bytes"]
        assert 0 < beyond < 512 * MIB
        assert rank.memory.transient_bytes < 200 * MIB
        assert rank.memory.limit_bytes == 150_109_880_320


def test_microbatches_in_flight_fall_stage_by_stage_in_1f1b_and_not_in_gpipe():
    one_f_one_b, _ = timeline_of("1f1b_m8")
    gpipe, _ = timeline_of("gpipe_m8")
    assert [rank.memory.most_in_flight for rank in one_f_one_b.ranks] == [4, 3, 2, 1]
    assert [rank.memory.most_in_flight for rank in gpipe.ranks] == [8, 8, 8, 8]
