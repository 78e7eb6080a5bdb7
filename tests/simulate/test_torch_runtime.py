"""Where messages are posted among the passes, held against what torch itself writes."""

from __future__ import annotations

import pytest
from support.requirements import need_package
from support.simulator.posted import words_of

from debubble.simulate.communication import Communication
from debubble.simulate.planned import plan_program
from debubble.timeline.schedules import Action, order_of

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


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), SIZES)
def test_messages_are_posted_where_torch_posts_them(name, ranks, microbatches, chunks):
    program = plan_program(order_of(name, ranks, microbatches, chunks), Communication.RUNTIME)
    torchs = (LOOPED | V_SHAPED)[name]
    theirs = get_schedule_ops(torchs, ranks, microbatches, chunks, with_comms=True)
    for rank, ops in enumerate(theirs):
        expected = []
        for word in map(str, ops):
            if "SHARD" not in word and "REDUCE" not in word:
                expected += word.removesuffix("OVERLAP_F_B").strip("()").split(";")
        assert [word for words in words_of(program, rank) for word in words] == expected


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(2, 4, 2), (4, 12, 3), (3, 6, 5)])
def test_before_2_12_ranks_exchange_after_the_slots_that_torch_has(ranks, microbatches, chunks):
    order = order_of("looped-bfs", ranks, microbatches, chunks)
    program = plan_program(order, Communication.SLOTS)
    at = {
        str(op): number
        for ops in get_schedule_ops("LoopedBFS", ranks, microbatches, chunks)
        for number, op in enumerate(ops)
        if op is not None
    }
    for rank in range(ranks):
        now = -1
        for words in words_of(program, rank):
            if "_" not in words[0]:
                now = at[words[0]]
            for received in (word for word in words if "RECV" in word):
                stage, result = received.split("RECV_")
                way, number = result[0], result[1:]
                slot = at[f"{int(stage) + (-1 if way == 'F' else 1)}{way}{number}"]
                assert slot == now if any("SEND" in word for word in words) else slot >= now
                now = slot


def test_an_order_that_cannot_finish_is_refused():
    backward_first = [
        [Action(0, "B", 0), Action(0, "F", 0)],
        [Action(1, "F", 0), Action(1, "B", 0)],
    ]
    for way in (Communication.RUNTIME, Communication.SLOTS):
        with pytest.raises(ValueError, match="cannot finish"):
            plan_program(backward_first, way)
