"""A step as it was measured in → the program that it ran."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from debubble.costs.passes import data_parallel_of
from debubble.simulate.events import NEVER_NS
from debubble.simulate.host_calls import Hosts, find_syncs, find_waits
from debubble.simulate.lengths import Seen, measure_lengths
from debubble.simulate.program import (
    NONE,
    BatchTable,
    Lengths,
    MessageTable,
    PassTable,
    Program,
    Times,
)
from debubble.timeline.model import (
    I32,
    I64,
    NEVER_WAITED_NS,
    Passes,
    PassKind,
    RankTimeline,
    Timeline,
    Transfers,
)

Need = tuple[int, int, int]
"""Stage, direction (0 forward, 1 backward) and microbatch of a result."""


def link_messages(
    passes: PassTable, messages: MessageTable, batches: BatchTable
) -> tuple[I64, I64, int]:
    """Return the pass that made each message, the pass that needs it, and how many are left over.

    From one rank to another results go in the order in which they were made. Where a result goes in
    several messages, each pass has as many.
    """
    producer = np.full(len(messages), NONE)
    consumer = np.full(len(messages), NONE)
    takers = consumers_of(passes)
    made: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for row, result in enumerate(results_of(passes)):
        taker = takers.get(result) if result else None
        if taker is not None and passes.place[taker] != passes.place[row]:
            made[int(passes.place[row]), int(passes.place[taker])].append((row, taker))
    unlinked = 0
    source, destination = batches.place[messages.sent], batches.place[messages.received]
    for (here, there), pairs in made.items():
        rows = np.flatnonzero((source == here) & (destination == there))
        rows = rows[np.argsort(messages.sent[rows], kind="stable")]  # batches stand in their order
        if len(rows) % len(pairs):
            unlinked += len(rows)
        elif len(rows):
            each = len(rows) // len(pairs)
            producer[rows] = np.repeat([made_by for made_by, _ in pairs], each)
            consumer[rows] = np.repeat([taker for _, taker in pairs], each)
    return producer, consumer, unlinked


def results_of(passes: PassTable) -> list[Need | None]:
    """Return what each pass hands on to a neighbouring stage; a weight gradient nothing."""
    found: list[Need | None] = []
    for stage, kind, microbatch in _rows(passes):
        if kind == PassKind.W:
            found.append(None)
        elif kind == PassKind.F:
            found.append((stage + 1, 0, microbatch))
        else:
            found.append((stage - 1, 1, microbatch))
    return found


def consumers_of(passes: PassTable) -> dict[Need, int]:
    """Return the pass that each result is needed by.

    Where the input gradient of the first stage has no kernels, its weight gradient is all there is.
    """
    found: dict[Need, int] = {}
    for row, (stage, kind, microbatch) in enumerate(_rows(passes)):
        if kind == PassKind.W:
            found.setdefault((stage, 1, microbatch), row)
        else:
            found[stage, int(kind != PassKind.F), microbatch] = row
    return found


def inputs_of(passes: PassTable, messages: MessageTable) -> I64:
    """Return pairs of a pass and the pass whose result it needs, where no message tells of it."""
    told = set(zip(messages.consumer.tolist(), messages.producer.tolist(), strict=True))
    takers = consumers_of(passes)
    pairs = [
        (takers[result], row)
        for row, result in enumerate(results_of(passes))
        if result in takers and (takers[result], row) not in told
    ]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _rows(passes: PassTable) -> list[tuple[int, int, int]]:
    return list(
        zip(passes.stage.tolist(), passes.kind.tolist(), passes.microbatch.tolist(), strict=True)
    )


# A send whose receive begins so many sends later, and that lasts until then, was kept waiting:
# other sends of the recorded runs seldom last as long.
_KEPT_WAITING = 2.0
# Two kernels that start together are stamped so far apart at most; and so many pairs tell an order.
_SAME_START_NS, _OFTEN_ENOUGH = 20_000, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step as it ran. Times count from the start of its window."""

    number: int
    begin_ns: int
    """The window's start on the clock of the timeline."""
    program: Program
    times: Times
    lengths: Lengths
    seen: Seen
    """Of messages."""
    transfer_bytes: I64
    """Of each message of the program."""
    fused: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """Whether each message of the program shared its batch with one the other way."""
    data_gaps_ns: I64
    """Of what lies before each pass, a gather or reduction that it waited for."""
    on_host: bool
    """The host itself runs the passes, as on a CPU: it issues what it runs."""
    unlinked: int
    """Messages whose passes could not be told."""


def measure_step(timeline: Timeline, pipeline: int, step: int) -> MeasuredStep:
    """Rebuild a step of a pipeline as passes and messages that wait for each other."""
    ranks = timeline.ranks_of(pipeline)
    names = tuple(rank.rank for rank in ranks)
    passes, table = _passes_in_order(timeline.passes, names, step)
    begin = int(passes.start_ns.min())
    transfers = _transfers_among(timeline.transfers, names, step)
    messages, batches, batch_times = _gather(transfers, passes, table, ranks)
    producer, consumer, unlinked = link_messages(table, messages, batches)
    tied = MessageTable(
        sent=messages.sent,
        received=messages.received,
        producer=producer,
        consumer=consumer,
        rendezvous=messages.rendezvous,
    )
    issued = _issued(transfers, messages, len(batches))
    start, end = _one_after_the_other(passes, table)
    hosts = Hosts(
        passes=passes,
        table=table,
        batches=batches,
        batch_issued_ns=issued[0],
        batch_waited_ns=issued[1],
        batch_end_ns=batch_times[1],
        pass_start_ns=start,
        pass_end_ns=end,
    )
    syncs, sync_lengths = find_syncs(hosts, ranks, begin)
    program = Program(
        ranks=names,
        passes=table,
        batches=batches,
        messages=tied,
        needs=inputs_of(table, tied),
        waits=find_waits(hosts),
        syncs=syncs,
    )
    times = Times(
        pass_start=start - begin,
        pass_end=end - begin,
        batch_start=batch_times[0] - begin,
        batch_end=batch_times[1] - begin,
    )
    on_host = bool((passes.issued_ns == passes.start_ns).all())
    never = (np.full(len(table), NEVER_NS), np.full(len(batches), NEVER_NS))
    floors = never if on_host else _floors(ranks, (passes, table), (batches, issued[0]), begin)
    free = np.array([_free_from(rank, passes, begin) for rank in ranks], dtype=np.int64)
    exposed = tuple(data_parallel_of(rank) for rank in ranks)
    lengths, seen, beside = measure_lengths(
        program, times, floors=floors, free_ns=free, beside=exposed, begin_ns=begin
    )
    lengths = replace(lengths, **sync_lengths)
    return MeasuredStep(
        number=step,
        begin_ns=begin,
        program=program,
        times=times,
        lengths=lengths,
        seen=seen,
        transfer_bytes=transfers.message_bytes,
        fused=transfers.fused,
        data_gaps_ns=beside,
        on_host=on_host,
        unlinked=unlinked,
    )


def _passes_in_order(passes: Passes, names: tuple[int, ...], step: int) -> tuple[Passes, PassTable]:
    mine = passes.where((passes.step == step) & np.isin(passes.rank, names))
    place = _places(mine.rank, names)
    order = np.lexsort((mine.start_ns, place))
    mine, place = mine.where(order), place[order]
    before = np.arange(len(place)) - 1
    before[np.diff(place, prepend=-1) != 0] = NONE
    return mine, PassTable(
        place=place,
        stage=mine.stage,
        kind=mine.kind,
        microbatch=mine.microbatch,
        before=before,
    )


def _places(rank: I32, names: tuple[int, ...]) -> I32:
    sorted_names = np.argsort(names)
    found = np.searchsorted(np.array(names)[sorted_names], rank)
    return sorted_names[found].astype(np.int32)


def _transfers_among(transfers: Transfers, names: tuple[int, ...], step: int) -> Transfers:
    return transfers.where(
        (transfers.step == step)
        & np.isin(transfers.source, names)
        & np.isin(transfers.destination, names)
    )


def _gather(
    transfers: Transfers, passes: Passes, table: PassTable, ranks: tuple[RankTimeline, ...]
) -> tuple[MessageTable, BatchTable, tuple[I64, I64]]:
    """Put messages that one kernel carried on a rank into one batch."""
    count, names = len(transfers), tuple(rank.rank for rank in ranks)
    place = np.concatenate(
        (_places(transfers.source, names), _places(transfers.destination, names))
    )
    queue = np.concatenate((transfers.send_queue, transfers.receive_queue))
    start = np.concatenate((transfers.send_start_ns, transfers.receive_start_ns))
    end = np.concatenate((transfers.send_end_ns, transfers.receive_end_ns))
    issued = np.concatenate((transfers.send_issued_ns, transfers.receive_issued_ns))
    # What has no queue stands alone, unless it is one exchange by its times.
    alone = (queue < 0) & ~np.concatenate((transfers.fused, transfers.fused))
    identity = np.where(alone, np.arange(2 * count), NONE)
    keys = np.stack((place, queue, start, end, identity))
    unique, row = np.unique(keys, axis=1, return_inverse=True)
    row = row.reshape(-1)
    batches = unique.shape[1]
    issue = np.full(batches, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(issue, row, issued)
    # Rows are sorted by place, queue and start: a queue's batches follow each other.
    before = np.arange(batches) - 1
    changes = (np.diff(unique[0], prepend=-1) != 0) | (np.diff(unique[1], prepend=-2) != 0)
    before[changes | (unique[1] < 0)] = NONE
    messages = MessageTable(
        sent=row[:count],
        received=row[count:],
        producer=np.full(count, NONE),
        consumer=np.full(count, NONE),
        rendezvous=_meet(transfers, ranks),
    )
    table_of_batches = BatchTable(
        place=unique[0].astype(np.int32),
        before=before,
        after=_passes_before(unique[0], issue, passes, table),
        launched_after=_launched_after(unique[0], unique[1], unique[2], issue),
    )
    return messages, table_of_batches, (unique[2], unique[3])


def _meet(
    transfers: Transfers, ranks: tuple[RankTimeline, ...]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Tell messages whose sender waits: in an exchange, or on a hop that keeps its senders.

    Over a network a send ends in a buffer. One such send tells how its hop works, one that was kept
    waiting by its receiver, too. Where neither was seen, other hops of the kind tell: those inside
    a host, or those between hosts.
    """
    hop = transfers.source.astype(np.int64) << 32 | transfers.destination
    alone = ~transfers.fused
    early = alone & (transfers.send_end_ns < transfers.receive_start_ns)
    late_ns = transfers.receive_start_ns - transfers.send_start_ns
    sending_ns = (transfers.send_end_ns - transfers.send_start_ns)[alone & (early | (late_ns <= 0))]
    usual_ns = float(np.median(sending_ns)) if len(sending_ns) else 0.0
    kept = alone & ~early & (late_ns > _KEPT_WAITING * usual_ns)
    hosts = {rank.rank: rank.device[0] for rank in ranks}
    between = np.array(
        [
            hosts[here] != hosts[there]
            for here, there in zip(
                transfers.source.tolist(), transfers.destination.tolist(), strict=True
            )
        ],
        dtype=bool,
    )
    buffers = np.isin(hop, hop[early])
    buffers |= np.isin(between, between[early]) & ~np.isin(hop, hop[kept])
    return transfers.fused | ~buffers


def _launched_after(place: I64, queue: I64, start: I64, issued: I64) -> I64:
    """Return the batch launched before each on another queue of its rank, where starts keep order.

    A device with several queues starts a message while another one waits; one that takes all
    launches in their order does not. Seen often enough, and never otherwise, it is believed.
    """
    after = np.full(len(place), NONE)
    for here in np.unique(place).tolist():
        rows = np.flatnonzero((place == here) & (queue >= 0))
        rows = rows[np.argsort(issued[rows], kind="stable")]
        earlier, later = rows[:-1], rows[1:]
        across = queue[earlier] != queue[later]
        in_order = start[later] >= start[earlier] - _SAME_START_NS
        if across.sum() >= _OFTEN_ENOUGH and in_order.all():
            after[later[across]] = earlier[across]
    return after


def _passes_before(place: I64, issued: I64, passes: Passes, table: PassTable) -> I64:
    """Return the last pass of the same rank that was issued before each batch."""
    after = np.full(len(place), NONE)
    for here in np.unique(place).tolist():
        rows = np.flatnonzero(table.place == here)
        mine = place == here
        order = np.maximum.accumulate(passes.issued_ns[rows]) if len(rows) else rows
        found = np.searchsorted(order, issued[mine], side="left") - 1
        after[mine] = np.where(found >= 0, rows[np.maximum(found, 0)], NONE) if len(rows) else NONE
    return after


def _one_after_the_other(passes: Passes, table: PassTable) -> tuple[I64, I64]:
    """Return starts and ends; where two passes of a rank overlap, the later begins when it can."""
    start, end = passes.start_ns.copy(), passes.end_ns.copy()
    for here in np.unique(table.place).tolist():
        rows = np.flatnonzero(table.place == here)
        reach = np.maximum.accumulate(end[rows])
        start[rows[1:]] = np.maximum(start[rows[1:]], reach[:-1])
        end[rows] = reach
    return start, end


def _floors(
    ranks: tuple[RankTimeline, ...],
    passes: tuple[Passes, PassTable],
    batches: tuple[BatchTable, I64],
    begin: int,
) -> tuple[I64, I64]:
    """Return when hosts would have issued each pass and batch, had their queues never been full.

    A host that is far ahead waits for room in its device's queue: how late it issues then follows
    from the device, and holds nothing up.
    """
    moments = (passes[0].issued_ns.copy(), batches[1].copy())
    for place, rank in enumerate(ranks):
        held = rank.held_up
        if not len(held.start_ns):
            continue
        mine = (passes[1].place == place, batches[0].place == place)
        first = min(
            int(one[rows].min(initial=begin)) for one, rows in zip(moments, mine, strict=True)
        )
        for one, rows in zip(moments, mine, strict=True):
            for row in np.flatnonzero(rows).tolist():
                one[row] -= held.inside(first, int(one[row]))
    return moments[0] - begin, moments[1] - begin


def _issued(transfers: Transfers, messages: MessageTable, batches: int) -> tuple[I64, I64]:
    """Return when the host issued each batch, and from when on it let its work wait for it."""
    issued = np.full(batches, NEVER_NS)
    np.maximum.at(issued, messages.sent, transfers.send_issued_ns)
    np.maximum.at(issued, messages.received, transfers.receive_issued_ns)
    waited = np.full(batches, NEVER_WAITED_NS)
    np.minimum.at(waited, messages.sent, transfers.send_waited_ns)
    np.minimum.at(waited, messages.received, transfers.receive_waited_ns)
    return issued, waited


def _free_from(rank: RankTimeline, passes: Passes, begin: int) -> int:
    """Return when a rank was done with what it did before the step, such as the last optimizer."""
    mine = passes.start_ns[passes.rank == rank.rank]
    if not len(mine):
        return 0
    earlier = np.searchsorted(rank.busy.start_ns, int(mine.min()), side="left") - 1
    return max(0, int(rank.busy.end_ns[earlier]) - begin) if earlier >= 0 else 0
