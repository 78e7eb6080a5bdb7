"""A step as it was measured in → the program that it ran.

A host that runs ahead issues at times of its own. One that synchronises follows its device: what it
issues next is tied to the work that the call waited for. Recorded of Megatron, whose hosts do so
after every exchange (`batch_p2p_sync`), in milliseconds:

    38.3  send and receive issued     on the device from 40.5 to 92.1
    38.6  cudaDeviceSynchronize       returns at 92.1
    93.1  first kernel of B issued    1.0 after the call, whenever that returns

What is concluded: the call waits for that batch (it is over when the call returns), so in a replay
it ends when the batch does; B is issued 1.0 after it, not at 93.1. Had the batch ended at 60, B
would have been issued at 61. Times copied from the trace would hold the device to what was
measured: docs/explanation/where-the-time-goes.md, "Hosts take part".

rank 0   compute  [ F 0 ][ F 1 ]               [ B 0 ]
             queue           [send] [recv·········]
    rank 1   queue    [recv·······]          [send]
             compute               [F 0][B 0]

Rank 0's host issued F 0, send, F 1, recv, B 0. What is concluded: one kernel on a queue is one
batch, whatever it carries, and follows the batch before it there; the send was issued after F 0 and
waits for it, the receive for F 1; the first message from rank 0 to rank 1 is the first result that
rank 1 needs, so F 0 there waits for it; its receive had begun and spun, so what it lasted is a wait
until the send starts, and wire from then on. A send that ends before its receive begins would tell
that its hop buffers: then its sender waits for nobody.

Why a step is rebuilt, and how each rule was found: docs/explanation/where-the-time-goes.md ("What
it would buy"); what a changed run takes from it: docs/explanation/how-predictions-are-made.md.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from debubble.simulate.costs.passes import data_parallel_of
from debubble.simulate.events import NEVER_NS
from debubble.simulate.lengths import SeenLengths, measure_lengths
from debubble.simulate.program import (
    NONE,
    BatchTable,
    Lengths,
    MessageTable,
    PassTable,
    Program,
    SyncTable,
    Times,
    no_syncs,
)
from debubble.timeline.model import (
    I32,
    I64,
    NEVER_WAITED_NS,
    Flags,
    Passes,
    PassKind,
    RankTimeline,
    Timeline,
    Transfers,
)
from debubble.timeline.transfers import known_to_leave

# Stamps of host and device are laid together to about so much; a call returns as late as that.
_STAMPS_NS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Passes and batches of a step with the times of host and device, on one clock."""

    passes: Passes
    table: PassTable
    batches: BatchTable
    batch_issued_ns: I64
    batch_waited_ns: I64
    batch_end_ns: I64
    pass_start_ns: I64
    pass_end_ns: I64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call that kept a host: what it waited for, and how long things took around it."""

    after: int
    """The pass that it waited for; -1 for none."""
    inside: bool
    batches: tuple[int, ...]
    host_ns: int
    tail_ns: int
    start_ns: int
    end_ns: int


def find_waits(hosts: Hosts) -> I64:
    """Return the first pass issued after each wait for a batch, and that batch."""
    pairs = []
    for place in np.unique(hosts.table.place).tolist():
        rows = _in_order(hosts.table.place == place, hosts.passes.issued_ns)
        mine = np.flatnonzero(
            (hosts.batches.place == place) & (hosts.batch_waited_ns < NEVER_WAITED_NS // 2)
        )
        after = np.searchsorted(hosts.passes.issued_ns[rows], hosts.batch_waited_ns[mine])
        pairs += [
            (int(rows[number]), batch)
            for number, batch in zip(after.tolist(), mine.tolist(), strict=True)
            if number < len(rows) and hosts.batch_end_ns[batch] <= hosts.pass_start_ns[rows[number]]
        ]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def find_syncs(
    hosts: Hosts, ranks: tuple[RankTimeline, ...], begin_ns: int
) -> tuple[SyncTable, dict[str, I64]]:
    """Return the calls that kept hosts during a step, and the lengths that go with them.

    Of a pass or batch that follows a call, the moment of its issue counts from that call's end;
    others keep theirs.
    """
    none = no_syncs(len(hosts.passes), len(hosts.batches))
    pass_call, batch_call = none.pass_call, none.batch_call
    calls: list[_Call] = []
    place: list[int] = []
    before: list[int] = []
    for here, rank in enumerate(ranks):
        rows = _in_order(hosts.table.place == here, hosts.passes.issued_ns)
        mine = _in_order(hosts.batches.place == here, hosts.batch_issued_ns)
        found = _calls_of(hosts, rank, rows, mine)
        if not found:
            continue
        begun = np.array([call.start_ns for call in found])
        numbers = len(calls) + np.arange(len(found))
        for targets, called, issued in (
            (rows, pass_call, hosts.passes.issued_ns[rows]),
            (mine, batch_call, hosts.batch_issued_ns[mine]),
        ):
            latest = np.searchsorted(begun, issued) - 1
            called[targets] = np.where(latest >= 0, numbers[np.maximum(latest, 0)], NONE)
        before += [NONE, *numbers[:-1].tolist()]
        place += [here] * len(found)
        calls += found
    if not calls:
        return none, {}
    waits = [(number, batch) for number, call in enumerate(calls) for batch in call.batches]
    table = SyncTable(
        place=np.array(place, dtype=np.int32),
        before=np.array(before, dtype=np.int64),
        after=np.array([call.after for call in calls], dtype=np.int64),
        inside=np.array([call.inside for call in calls], dtype=bool),
        batches=np.array(waits, dtype=np.int64).reshape(-1, 2),
        pass_call=pass_call,
        batch_call=batch_call,
    )
    start, end, host, tail = np.array(
        [(call.start_ns, call.end_ns, call.host_ns, call.tail_ns) for call in calls], dtype=np.int64
    ).T
    return table, {
        "pass_lag": np.where(pass_call >= 0, hosts.passes.issued_ns - end[pass_call], NEVER_NS),
        "batch_lag": np.where(batch_call >= 0, hosts.batch_issued_ns - end[batch_call], NEVER_NS),
        "sync_host": host,
        "sync_tail": tail,
        "sync_floor": np.where(table.before < 0, start - begin_ns, NEVER_NS),
    }


def _in_order(mine: Flags, issued_ns: I64) -> I64:
    rows = np.flatnonzero(mine)
    return rows[np.argsort(issued_ns[rows], kind="stable")]


def _calls_of(hosts: Hosts, rank: RankTimeline, rows: I64, mine: I64) -> list[_Call]:
    """List the calls of one rank between the first and the last thing that it issued in the step.

    A call waits for the last pass issued before it: to its end, or, where it lies in the midst of
    that pass, to what had been launched of it. One for the whole device waits for messages as well.
    """
    passes_ns, batches_ns = hosts.passes.issued_ns[rows], hosts.batch_issued_ns[mine]
    if not len(rows):
        return []
    first = min(int(passes_ns[0]), int(batches_ns.min(initial=passes_ns[0])))
    last = max(int(passes_ns[-1]), int(batches_ns.max(initial=passes_ns[-1])))
    calls = rank.synchronisations
    found: list[_Call] = []
    reached = 0
    for call in np.flatnonzero((calls.start_ns > first) & (calls.start_ns < last)).tolist():
        start, end = int(calls.start_ns[call]), int(calls.end_ns[call])
        number = int(np.searchsorted(passes_ns, start)) - 1
        waited = int(rows[number]) if number >= 0 else NONE
        if waited >= 0 and hosts.pass_start_ns[waited] > end:
            waited = NONE  # another stream's call: it returned before that pass began
        inside = waited >= 0 and bool(hosts.pass_end_ns[waited] > end + _STAMPS_NS)
        done = start
        if waited >= 0:
            done = int((hosts.pass_start_ns if inside else hosts.pass_end_ns)[waited])
        batches: tuple[int, ...] = ()
        if calls.whole[call] and not inside:
            until = int(np.searchsorted(batches_ns, start))
            over = hosts.batch_end_ns[mine[reached:until]] <= end + _STAMPS_NS
            batches = tuple(mine[reached:until][over].tolist())
            done = max([done, *hosts.batch_end_ns[list(batches)].tolist()])
            reached = until
        held = inside or done > start
        since = found[-1].end_ns if found else start
        found.append(
            _Call(
                after=waited,
                inside=inside,
                batches=batches,
                host_ns=start - since + (0 if held else end - start),
                tail_ns=max(0, end - done) if held else 0,
                start_ns=start,
                end_ns=end,
            )
        )
    return found


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
    seen: SeenLengths
    """Of messages."""
    transfer_bytes: I64
    """Of each message of the program."""
    fused: Flags
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
    transfers = timeline.transfers
    transfers = transfers.where(
        (transfers.step == step)
        & np.isin(transfers.source, names)
        & np.isin(transfers.destination, names)
    )
    messages, batches, kernels = _gather(transfers, passes, table, ranks)
    batch_start, batch_end, batch_issued, batch_waited = kernels
    messages, needs, unlinked = _link(table, messages, batches)
    start, end = _one_after_the_other(passes, table)
    hosts = Hosts(
        passes=passes,
        table=table,
        batches=batches,
        batch_issued_ns=batch_issued,
        batch_waited_ns=batch_waited,
        batch_end_ns=batch_end,
        pass_start_ns=start,
        pass_end_ns=end,
    )
    syncs, sync_lengths = find_syncs(hosts, ranks, begin)
    program = Program(
        ranks=names,
        passes=table,
        batches=batches,
        messages=messages,
        needs=needs,
        waits=find_waits(hosts),
        syncs=syncs,
    )
    times = Times(
        pass_start=start - begin,
        pass_end=end - begin,
        batch_start=batch_start - begin,
        batch_end=batch_end - begin,
    )
    on_host = bool((passes.issued_ns == passes.start_ns).all())
    never = (np.full(len(table), NEVER_NS), np.full(len(batches), NEVER_NS))
    lengths, seen, data_gaps = measure_lengths(
        program,
        times,
        floors=never if on_host else _floors(hosts, ranks, begin),
        free_ns=np.array([_free_from(rank, passes, begin) for rank in ranks], dtype=np.int64),
        beside=tuple(data_parallel_of(rank) for rank in ranks),
        begin_ns=begin,
    )
    known = known_to_leave(transfers)
    return MeasuredStep(
        number=step,
        begin_ns=begin,
        program=program,
        times=times,
        lengths=replace(lengths, **sync_lengths),
        seen=SeenLengths(wire=seen.wire & known, drain=seen.drain & known),
        transfer_bytes=transfers.message_bytes,
        fused=transfers.fused,
        data_gaps_ns=data_gaps,
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


def _gather(
    transfers: Transfers, passes: Passes, table: PassTable, ranks: tuple[RankTimeline, ...]
) -> tuple[MessageTable, BatchTable, tuple[I64, I64, I64, I64]]:
    """Put messages that one kernel carried on a rank into one batch.

    Return with the tables when each batch started and ended, when its host issued it, and from when
    on it let its work wait for it. Which passes a message belongs to is not known yet.
    """
    count, names = len(transfers), tuple(rank.rank for rank in ranks)
    sides = (_places(transfers.source, names), _places(transfers.destination, names))
    queue = np.concatenate((transfers.send_queue, transfers.receive_queue))
    start = np.concatenate((transfers.send_start_ns, transfers.receive_start_ns))
    end = np.concatenate((transfers.send_end_ns, transfers.receive_end_ns))
    issued = np.concatenate((transfers.send_issued_ns, transfers.receive_issued_ns))
    waited = np.concatenate((transfers.send_waited_ns, transfers.receive_waited_ns))
    # What has no queue stands alone, unless it is one exchange by its times.
    alone = (queue < 0) & ~np.concatenate((transfers.fused, transfers.fused))
    identity = np.where(alone, np.arange(2 * count), NONE)
    keys = np.stack((np.concatenate(sides), queue, start, end, identity))
    unique, row = np.unique(keys, axis=1, return_inverse=True)
    row = row.reshape(-1)
    place, queue, start, end, _ = unique
    batches = len(place)
    first_issued = np.full(batches, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(first_issued, row, issued)
    last_issued, first_waited = np.full(batches, NEVER_NS), np.full(batches, NEVER_WAITED_NS)
    np.maximum.at(last_issued, row, issued)
    np.minimum.at(first_waited, row, waited)
    # Rows are sorted by place, queue and start: a queue's batches follow each other.
    before = np.arange(batches) - 1
    changes = (np.diff(place, prepend=-1) != 0) | (np.diff(queue, prepend=-2) != 0)
    before[changes | (queue < 0)] = NONE
    messages = MessageTable(
        sent=row[:count],
        received=row[count:],
        producer=np.full(count, NONE),
        consumer=np.full(count, NONE),
        rendezvous=_meet(transfers, ranks),
    )
    table_of_batches = BatchTable(
        place=place.astype(np.int32),
        before=before,
        after=_passes_before(place, first_issued, passes, table),
        launched_after=_launched_after(place, queue, start, first_issued),
    )
    return messages, table_of_batches, (start, end, last_issued, first_waited)


def _meet(transfers: Transfers, ranks: tuple[RankTimeline, ...]) -> Flags:
    """Tell messages whose sender waits: in an exchange, or on a hop that keeps its senders.

    Over a network a send ends in a buffer. One such send tells how its hop works, one that was kept
    waiting by its receiver, too. Where neither was seen, other hops of the kind tell: those inside
    a host, or those between hosts.
    """
    hop = transfers.source.astype(np.int64) << 32 | transfers.destination
    alone = ~transfers.fused
    early = transfers.buffered
    late_ns = transfers.receive_start_ns - transfers.send_start_ns
    sending_ns = transfers.send_end_ns - transfers.send_start_ns
    awaited = alone & (early | (late_ns <= 0))
    usual_ns = float(np.median(sending_ns[awaited])) if awaited.any() else 0.0
    kept = alone & ~early & (late_ns > _KEPT_WAITING * usual_ns)
    for here in np.unique(hop[kept]).tolist():
        # On a slow wire sends last long by themselves: those that nobody let wait as long as these.
        own = sending_ns[awaited & (hop == here)]
        if len(own):
            kept &= (hop != here) | (sending_ns > np.median(own) + late_ns / 2)
    hosts = {rank.rank: rank.device[0] for rank in ranks}
    ends = zip(transfers.source.tolist(), transfers.destination.tolist(), strict=True)
    between = np.array([hosts[here] != hosts[there] for here, there in ends], dtype=bool)
    buffers = np.isin(hop, hop[early])
    buffers |= np.isin(between, between[early]) & ~np.isin(hop, hop[kept])
    return transfers.fused | ~buffers


def _passes_before(place: I64, issued: I64, passes: Passes, table: PassTable) -> I64:
    """Return the last pass of the same rank that was issued before each batch."""
    after = np.full(len(place), NONE)
    for here in np.unique(place).tolist():
        rows, mine = np.flatnonzero(table.place == here), place == here
        if len(rows):
            order = np.maximum.accumulate(passes.issued_ns[rows])
            found = np.searchsorted(order, issued[mine], side="left") - 1
            after[mine] = np.where(found >= 0, rows[np.maximum(found, 0)], NONE)
    return after


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


def _link(
    passes: PassTable, messages: MessageTable, batches: BatchTable
) -> tuple[MessageTable, I64, int]:
    """Tell the pass that made each message and the pass that needs it, and count what is left over.

    From one rank to another results go in the order in which they were made. Where a result goes in
    several messages, each pass has as many. Return also pairs of a pass and the pass whose result
    it needs, where no message tells of it.
    """
    made_by: list[tuple[int, tuple[int, bool, int]]] = []
    taker: dict[tuple[int, bool, int], int] = {}
    columns = (passes.stage.tolist(), passes.kind.tolist(), passes.microbatch.tolist())
    for row, (stage, kind, microbatch) in enumerate(zip(*columns, strict=True)):
        if kind == PassKind.W:
            # Hands nothing on. Where the input gradient of the first stage has no kernels, its
            # weight gradient is all there is.
            taker.setdefault((stage, True, microbatch), row)
        else:
            backward = kind != PassKind.F
            taker[stage, backward, microbatch] = row
            made_by.append((row, (stage + (-1 if backward else 1), backward, microbatch)))
    pairs = [(row, taker[result]) for row, result in made_by if result in taker]
    between: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for row, needing in pairs:
        here, there = int(passes.place[row]), int(passes.place[needing])
        if here != there:
            between[here, there].append((row, needing))
    producer, consumer = messages.producer.copy(), messages.consumer.copy()
    unlinked = 0
    source, destination = batches.place[messages.sent], batches.place[messages.received]
    for (here, there), made in between.items():
        rows = np.flatnonzero((source == here) & (destination == there))
        rows = rows[np.argsort(messages.sent[rows], kind="stable")]  # batches stand in their order
        if len(rows) % len(made):
            unlinked += len(rows)
        elif len(rows):
            producer[rows], consumer[rows] = np.repeat(made, len(rows) // len(made), axis=0).T
    told = set(zip(producer.tolist(), consumer.tolist(), strict=True))
    needs = [(needing, row) for row, needing in pairs if (row, needing) not in told]
    tied = replace(messages, producer=producer, consumer=consumer)
    return tied, np.array(needs, dtype=np.int64).reshape(-1, 2), unlinked


def _one_after_the_other(passes: Passes, table: PassTable) -> tuple[I64, I64]:
    """Return starts and ends; where two passes of a rank overlap, the later begins when it can."""
    start, end = passes.start_ns.copy(), passes.end_ns.copy()
    for here in np.unique(table.place).tolist():
        rows = np.flatnonzero(table.place == here)
        reach = np.maximum.accumulate(end[rows])
        start[rows[1:]] = np.maximum(start[rows[1:]], reach[:-1])
        end[rows] = reach
    return start, end


def _floors(hosts: Hosts, ranks: tuple[RankTimeline, ...], begin: int) -> tuple[I64, I64]:
    """Return when hosts would have issued each pass and batch, had their queues never been full.

    A host that is far ahead waits for room in its device's queue: how late it issues then follows
    from the device, and holds nothing up.
    """
    passes, batches = hosts.passes.issued_ns.copy(), hosts.batch_issued_ns.copy()
    for place, rank in enumerate(ranks):
        if not len(rank.held_up.start_ns):
            continue
        of_rank = (passes, hosts.table.place == place), (batches, hosts.batches.place == place)
        first = min(int(issued[mine].min(initial=begin)) for issued, mine in of_rank)
        for issued, mine in of_rank:
            for row in np.flatnonzero(mine).tolist():
                issued[row] -= rank.held_up.inside(first, int(issued[row]))
    return passes - begin, batches - begin


def _free_from(rank: RankTimeline, passes: Passes, begin: int) -> int:
    """Return when a rank was done with what it did before the step, such as the last optimizer."""
    mine = passes.start_ns[passes.rank == rank.rank]
    if not len(mine):
        return 0
    earlier = np.searchsorted(rank.busy.start_ns, int(mine.min()), side="left") - 1
    return max(0, int(rank.busy.end_ns[earlier]) - begin) if earlier >= 0 else 0
