"""Orders held against the ones that torch itself would run."""

from __future__ import annotations

import csv
import io
from unittest import mock

import pytest
from support.requirements import need_package

from debubble.errors import UsageError
from debubble.timeline.schedules import Action, format_order, order_of, parse_order, placement_of

need_package("torch.distributed.pipelining._schedule_visualizer")

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import PipelineStage

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


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("name", LOOPED)
def test_looped_orders_are_torchs_and_refuse_what_torch_refuses(name, ranks, chunks):
    found = [torch_order(LOOPED[name], ranks, m, chunks) for m in MICROBATCHES]
    assert any(found)
    assert [our_order(name, ranks, m, chunks) for m in MICROBATCHES] == found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", V_SHAPED)
def test_v_shaped_orders_are_torchs_and_refuse_what_torch_refuses(name, ranks):
    found = [torch_order(V_SHAPED[name], ranks, m, 2) for m in MICROBATCHES]
    assert any(found)
    assert [our_order(name, ranks, m, 2) for m in MICROBATCHES] == found


@pytest.mark.slow
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


def in_torchs_csv(ops):
    """Write actions as torch's `_dump_csv` does."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(ops)
    return text.getvalue()


@pytest.mark.parametrize("comms", [False, True])
@pytest.mark.parametrize("name", LOOPED | V_SHAPED)
def test_torchs_csv_is_read_with_idle_slots_or_with_communication(name, comms):
    torchs = (LOOPED | V_SHAPED)[name]
    ops = get_schedule_ops(torchs, 4, 8, 2, with_comms=comms)
    cells = {str(op) for rank in ops for op in rank}
    assert comms == ("2SEND_F0" in cells)
    assert parse_order(in_torchs_csv(ops)) == order_of(name, 4, 8)


@pytest.mark.parametrize("name", LOOPED | V_SHAPED)
def test_torch_loads_what_we_write(name, tmp_path):
    path = tmp_path / "order.csv"
    path.write_text(format_order(order_of(name, 4, 8)), "utf-8")
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, 4, 8, None
    schedule = _PipelineScheduleRuntime([stage, stage], 8)
    PipelineScheduleMulti._load_csv(schedule, str(path))
    ops = [schedule.pipeline_order[rank] for rank in range(4)]
    assert [[a for op in rank for a in in_our_words(op)] for rank in ops] == order_of(name, 4, 8)
