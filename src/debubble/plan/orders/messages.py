"""An order in → its window with messages as torch's runtime posts them: one queue a rank.

A delay on each hop says nothing of messages that wait behind others. Here every rank has two rows,
its passes and its messages, each in the order in which the host issued them; both are followed as
far as they go, in turns. It is the simulator's own program with one length for each kind of pass
and message: what it leaves out is chance, and what passes and messages do to each other's lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

from debubble.plan.orders.pipeline import NAMES, Pipeline, Rows
from debubble.simulate.communication import Communication
from debubble.simulate.planned import plan_program
from debubble.simulate.program import Program
from debubble.timeline.model import PassKind

# All that is sent and received goes through one queue there.
ONE_QUEUE = frozenset({Communication.RUNTIME, Communication.DEFERRED})


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCosts:
    """What messages take, in nanoseconds, by the stage that sends and whether it is an F's."""

    communication: Communication
    rendezvous: bool
    """Senders wait for their receivers."""
    wire: dict[tuple[int, bool], int]
    sending: dict[tuple[int, bool], int]
    drain: dict[tuple[int, bool], int]
    batch_gap: int = 0


def window_of(pipeline: Pipeline, rows: Rows, costs: MessageCosts) -> int | None:
    """Return the window; None where messages wait for each other in a circle."""
    program = plan_program(pipeline.order(rows), costs.communication, rendezvous=costs.rendezvous)
    return follow(program, pipeline, costs)


def follow(program: Program, pipeline: Pipeline, costs: MessageCosts) -> int | None:  # noqa: C901, PLR0912, PLR0915 (one hot loop)
    """Run a program of one queue a rank, and return its window."""
    passes, batches, messages = program.passes, program.batches, program.messages
    names = {int(PassKind[name]): number for number, name in enumerate(NAMES)}
    stage, kind = passes.stage.tolist(), [names[k] for k in passes.kind.tolist()]
    block, count = pipeline.block, pipeline.microbatches
    length = [pipeline.lengths[k * block + s * count] for k, s in zip(kind, stage, strict=True)]
    place, after = batches.place.tolist(), batches.after.tolist()
    sends, partner = [False] * len(place), [0] * len(place)
    own, needs = [(0, 0, 0)] * len(place), [-1] * len(stage)
    meets = messages.rendezvous.tolist()
    tables = (messages.sent, messages.received, messages.producer, messages.consumer)
    waits_for_receiver = [False] * len(place)
    for number, (sent, received, producer, consumer) in enumerate(
        zip(*(table.tolist() for table in tables), strict=True)
    ):
        key = stage[producer], kind[producer] == 0
        taken = costs.wire[key], costs.sending[key], costs.drain[key]
        own[sent] = own[received] = taken
        partner[sent], partner[received], sends[sent] = received, sent, True
        waits_for_receiver[sent] = meets[number]
        needs[consumer] = received
    on_one_rank = dict(program.needs.tolist()) if len(program.needs) else {}
    ranks = len(program.ranks)
    rows: list[list[int]] = [[] for _ in range(ranks)]
    queues: list[list[int]] = [[] for _ in range(ranks)]
    for number, rank in enumerate(passes.place.tolist()):
        rows[rank].append(number)
    for number, rank in enumerate(place):
        queues[rank].append(number)
    started, ended = [-1] * len(place), [-1] * len(place)
    done = [-1] * len(stage)
    at, queued = [0] * ranks, [0] * ranks
    free, clear = [0] * ranks, [0] * ranks
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            row, queue = rows[rank], queues[rank]
            going = True
            while going:
                going = False
                while at[rank] < len(row):
                    number = row[at[rank]]
                    start, input_ = free[rank], needs[number]
                    if input_ >= 0:
                        if ended[input_] < 0:
                            break
                        start = max(start, ended[input_])
                    elif number in on_one_rank:
                        start = max(start, done[on_one_rank[number]])
                    free[rank] = done[number] = start + length[number]
                    at[rank] += 1
                    going = moved = True
                while queued[rank] < len(queue):
                    number = queue[queued[rank]]
                    if started[number] < 0:
                        start = clear[rank]
                        if after[number] >= 0:
                            if done[after[number]] < 0:
                                break
                            start = max(start, done[after[number]])
                        started[number] = start + costs.batch_gap
                        going = moved = True
                    wire, sending, drain = own[number]
                    other = started[partner[number]]
                    if sends[number]:
                        end = started[number] + sending
                        if waits_for_receiver[number]:
                            if other < 0:
                                break
                            end = max(end, other + sending)
                    else:
                        if other < 0:
                            break
                        end = max(started[number] + drain, other + wire)
                    ended[number] = clear[rank] = end
                    queued[rank] += 1
                    going = moved = True
    if any(at[rank] < len(rows[rank]) for rank in range(ranks)):
        return None
    return max(free)
