"""Orders held against the ones that torch itself would run."""

from __future__ import annotations

import pytest

from debubble.errors import UsageError
from debubble.schedules import Action, order_of, placement_of

pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

RANKS = range(2, 7)
MICROBATCHES = (*range(1, 14), 16, 18, 24, 30)
LOOPED = {
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble",
}
V_SHAPED = {"zbv": "ZBVZeroBubble", "dualpipe-v": "DualPipeV"}


def torch_order(name, ranks, microbatches, chunks):
    """Return torch's order in our words, or None where torch refuses the sizes."""
    try:
        ops = get_schedule_ops(name, ranks, microbatches, chunks)
    except ValueError:
        return None
    return [
        [action for op in rank if op is not None for action in in_our_words(op)] for rank in ops
    ]


def in_our_words(op):
    if op.sub_actions:
        (forward,), (backward,) = map(in_our_words, op.sub_actions)
        return [forward._replace(overlap=True), backward]
    kind = op.computation_type.value
    # What is no pass: reductions, which torch appends for parallel data.
    return [Action(op.stage_index, kind, op.microbatch_index)] if kind in set("FBIW") else []


def our_order(name, ranks, microbatches, chunks):
    try:
        return order_of(name, ranks, microbatches, chunks)
    except UsageError:
        return None


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("name", LOOPED)
def test_looped_orders_are_torchs_and_refuse_what_torch_refuses(name, ranks, chunks):
    found = [torch_order(LOOPED[name], ranks, m, chunks) for m in MICROBATCHES]
    assert any(found)
    assert [our_order(name, ranks, m, chunks) for m in MICROBATCHES] == found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", V_SHAPED)
def test_v_shaped_orders_are_torchs_and_refuse_what_torch_refuses(name, ranks):
    found = [torch_order(V_SHAPED[name], ranks, m, 2) for m in MICROBATCHES]
    assert any(found)
    assert [our_order(name, ranks, m, 2) for m in MICROBATCHES] == found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_gpipe_is_torchs(ranks, microbatches):
    assert order_of("gpipe", ranks, microbatches) == torch_order("GPipe", ranks, microbatches, 1)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_1f1b_is_torchs_but_for_the_last_rank_where_torchs_list_is_not_what_torch_runs(
    ranks, extra
):
    microbatches = ranks + extra
    ours = order_of("1f1b", ranks, microbatches)
    theirs = torch_order("1F1B", ranks, microbatches, 1)
    assert ours[:-1] == theirs[:-1]
    last = ranks - 1
    assert ours[-1] == [Action(last, kind, m) for m in range(microbatches) for kind in "FB"]
    # The day torch mends its list (its last rank begins with microbatch 1), this test should go.
    assert theirs[-1][0] == Action(last, "F", 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_stages_are_placed_where_torch_places_them(ranks):
    for chunks in (1, 2, 3):
        theirs = generate_rank_to_stage_mapping(ranks, ranks * chunks, style="loop")
        name = "interleaved-1f1b" if chunks > 1 else "1f1b"
        assert list(placement_of(name, ranks, chunks)) == [tuple(theirs[r]) for r in range(ranks)]
    theirs = generate_rank_to_stage_mapping(ranks, ranks * 2, style="v")
    assert list(placement_of("zbv", ranks)) == [tuple(theirs[r]) for r in range(ranks)]
