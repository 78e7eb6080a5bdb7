"""Where messages are posted among the passes, held against what torch itself writes."""

from __future__ import annotations

import pytest
from support.requirements import need_package

from debubble.simulate.communication import (
    Communication,
    Post,
    lower_for_runtime,
    wire_up,
    write_hosts,
)
from debubble.simulate.planned import plan_program
from debubble.timeline.model import PassKind
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


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(2, 4, 2), (4, 12, 3), (3, 6, 5)])
def test_before_2_12_ranks_exchange_after_the_slots_that_torch_has(ranks, microbatches, chunks):
    wiring = wire_up(order_of("looped-bfs", ranks, microbatches, chunks))
    slots = get_schedule_ops("LoopedBFS", ranks, microbatches, chunks)
    at = {
        (rank, str(op)): number
        for rank, ops in enumerate(slots)
        for number, op in enumerate(ops)
        if op is not None
    }
    for rank, program in enumerate(write_hosts(wiring, Communication.SLOTS)):
        now = -1
        for step in program:
            if isinstance(step, tuple):
                now = at[rank, str(step[0])]
                continue
            assert step.waited
            for result in step.receives:
                kind, back = ("B", 1) if result.backward else ("F", -1)
                made = Action(result.stage + back, kind, result.microbatch)
                slot = at[wiring.source(result), str(made)]
                assert slot == now if step.sends else slot >= now
                now = slot


def test_an_order_that_cannot_finish_is_refused():
    backward_first = [
        [Action(0, "B", 0), Action(0, "F", 0)],
        [Action(1, "F", 0), Action(1, "B", 0)],
    ]
    with pytest.raises(ValueError, match="cannot finish"):
        lower_for_runtime(wire_up(backward_first))


def of_program(program, rank):
    """What a rank's host runs and posts, in its order, as the program has it."""
    passes, batches, messages = program.passes, program.batches, program.messages
    carried = {}
    for sent, received, producer in zip(
        messages.sent.tolist(), messages.received.tolist(), messages.producer.tolist(), strict=True
    ):
        stage, forward = int(passes.stage[producer]), passes.kind[producer] == PassKind.F
        result = (stage + (1 if forward else -1), not forward, int(passes.microbatch[producer]))
        carried.setdefault(sent, []).append(("send", result))
        carried.setdefault(received, []).append(("receive", result))
    mine = [row for row in range(len(batches)) if batches.place[row] == rank]
    after = {}
    for row in mine:
        after.setdefault(int(batches.after[row]), []).append(sorted(carried[row]))
    steps = after.get(-1, [])
    for row in (row for row in range(len(passes)) if passes.place[row] == rank):
        kind = PassKind(passes.kind[row]).name
        steps.append(f"{passes.stage[row]}{kind}{passes.microbatch[row]}")
        steps += after.get(row, [])
    return steps


def as_posted(step):
    if isinstance(step, Post):
        sends = [("send", tuple(result)) for result in step.sends]
        return [sorted(sends + [("receive", tuple(result)) for result in step.receives])]
    return [str(action) for action in step]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), [*SIZES, ("zb-h1", 4, 8, 1)])
def test_a_program_written_by_columns_is_the_one_written_step_by_step(
    name, ranks, microbatches, chunks
):
    order = order_of(name, ranks, microbatches, chunks)
    program = plan_program(order, Communication.RUNTIME)
    for rank, steps in enumerate(lower_for_runtime(wire_up(order))):
        assert of_program(program, rank) == [one for step in steps for one in as_posted(step)]
