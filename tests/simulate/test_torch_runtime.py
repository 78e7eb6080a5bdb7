"""Where messages are posted among the passes, held against what torch itself writes."""

from __future__ import annotations

import pytest
from support.requirements import need_package

from debubble.schedules import Action, order_of
from debubble.simulate.communication import Post, lower_for_runtime, wire_up

need_package("torch.distributed.pipelining._schedule_visualizer")

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

LOOPED = {
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble",
}
V_SHAPED = {"zbv": "ZBVZeroBubble", "dualpipe-v": "DualPipeV"}
SIZES = [
    *((name, *sizes) for name in LOOPED for sizes in [(2, 4, 2), (4, 8, 2), (4, 12, 3), (3, 6, 5)]),
    *((name, *sizes) for name in V_SHAPED for sizes in [(2, 4, 2), (3, 6, 2), (4, 8, 2)]),
]


def in_torchs_words(step):
    if isinstance(step, Post):
        verb, (result,) = ("SEND", step.sends) if step.sends else ("RECV", step.receives)
        back = 1 if result.backward else -1
        stage = result.stage + (back if step.sends else 0)
        return f"{stage}{verb}_{'B' if result.backward else 'F'}{result.microbatch}"
    return str(step[0]) if len(step) == 1 else f"({step[0]};{step[1]})OVERLAP_F_B"


@pytest.mark.parametrize("defer", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), SIZES)
def test_messages_are_posted_where_torch_posts_them(name, ranks, microbatches, chunks, defer):
    order = order_of(name, ranks, microbatches, chunks)
    ours = lower_for_runtime(wire_up(order), defer=defer)
    theirs = get_schedule_ops(
        (LOOPED | V_SHAPED)[name],
        ranks,
        microbatches,
        chunks,
        with_comms=True,
        defer_pp_recv=defer,
    )
    words = [[str(op) for op in rank] for rank in theirs]
    expected = [[w for w in rank if "SHARD" not in w and "REDUCE" not in w] for rank in words]
    assert [[in_torchs_words(step) for step in rank] for rank in ours] == expected


def test_an_order_that_cannot_finish_is_refused():
    backward_first = [
        [Action(0, "B", 0), Action(0, "F", 0)],
        [Action(1, "F", 0), Action(1, "B", 0)],
    ]
    with pytest.raises(ValueError, match="cannot finish"):
        lower_for_runtime(wire_up(backward_first))
