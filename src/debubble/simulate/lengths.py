"""A program and its measured times in → how long everything took of itself, waits left out.

    send      [send]             early: it ended before the receive began. What the receive
    receive            [recv]    lasts is the drain; the wire is not seen
    send             [send]      the receiver waited: from the send's start to the receive's
    receive   [recv········]     end is the wire; the drain is not seen
    send      [send·········]    rendezvous: from when both were there to the end is the wire;
    receive         [recv···]    what the send lasted before that is a wait

Which messages are buffered and which meet: `measured.py`. More in
docs/explanation/where-the-time-goes.md, "Wire or wait".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.simulate.events import NEVER_NS
from debubble.simulate.program import Lengths, MessageTable, Program, Times, in_exchange
from debubble.timeline.model import I32, I64, U8, Flags, Intervals

# Taking in what is there already against the wire, where no hop of a step shows both.
_DRAIN_OVER_WIRE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLengths:
    """Of which messages wire and drain were measured, and not inferred from others."""

    wire: Flags
    drain: Flags


def measure_lengths(  # noqa: PLR0913 (what hosts and collectives did besides)
    program: Program,
    times: Times,
    *,
    floors: tuple[I64, I64],
    free_ns: I64,
    beside: tuple[Intervals, ...] = (),
    begin_ns: int = 0,
) -> tuple[Lengths, SeenLengths, I64]:
    """Take waits out of what was measured, so that a replay puts them back in.

    Return also what passes waited, before they began, for what ran `beside` them: that stays with
    each.
    """
    passes, batches, calls = program.passes, program.batches, program.syncs
    pass_floor, batch_floor = floors[0].copy(), floors[1].copy()
    first, begins = passes.before < 0, batches.after < 0
    pass_floor[first] = np.maximum(pass_floor[first], free_ns[passes.place[first]])
    batch_floor[begins] = np.maximum(batch_floor[begins], free_ns[batches.place[begins]])
    gaps = pass_gaps(program, times, pass_floor)
    waited = np.zeros(len(gaps), dtype=np.int64)
    for place, exposed in enumerate(beside):
        if len(exposed.start_ns):
            for row in np.flatnonzero((passes.place == place) & (gaps > 0)).tolist():
                start = begin_ns + int(times.pass_start[row])
                ready = start - int(gaps[row]) if gaps[row] < -NEVER_NS // 2 else start
                waited[row] = exposed.inside(ready, start)
    of_messages, seen = _message_lengths(program, times)
    # What follows a call that keeps the host is issued when that lets it go.
    tied = calls.pass_call >= 0, calls.batch_call >= 0
    lengths = Lengths(
        passes=times.pass_end - times.pass_start,
        pass_gaps=_typical(gaps - waited, passes.place, passes.kind) + waited,
        batch_gaps=_typical(batch_gaps(program, times, batch_floor), batches.place, batches.place),
        **of_messages,
        pass_floor=np.where(tied[0] & ~first, NEVER_NS, pass_floor),
        batch_floor=np.where(tied[1], NEVER_NS, batch_floor),
    )
    return lengths, seen, waited


def pass_gaps(program: Program, times: Times, floor: I64) -> I64:
    """Return from when each pass could start to its start; below 0 where it did not wait."""
    passes, messages = program.passes, program.messages
    ready = floor.copy()
    follows = passes.before >= 0
    ready[follows] = np.maximum(ready[follows], times.pass_end[passes.before[follows]])
    used = messages.consumer >= 0
    np.maximum.at(ready, messages.consumer[used], times.batch_end[messages.received[used]])
    np.maximum.at(ready, program.needs[:, 0], times.pass_end[program.needs[:, 1]])
    np.maximum.at(ready, program.waits[:, 0], times.batch_end[program.waits[:, 1]])
    return times.pass_start - ready


def batch_gaps(program: Program, times: Times, floor: I64) -> I64:
    """Return from when each batch could start to its start."""
    batches = program.batches
    ready = floor.copy()
    follows, queued = batches.after >= 0, batches.before >= 0
    ready[follows] = np.maximum(ready[follows], times.pass_end[batches.after[follows]])
    ready[queued] = np.maximum(ready[queued], times.batch_end[batches.before[queued]])
    launched = batches.launched_after >= 0
    begun = times.batch_start[batches.launched_after[launched]]
    ready[launched] = np.maximum(ready[launched], begun)
    return times.batch_start - ready


def hop_of(program: Program) -> I64:
    """Return a number for the hop of each message: of its sender's place and its receiver's."""
    places = program.batches.place.astype(np.int64)
    numbers: I64 = (
        places[program.messages.sent] * len(program.ranks) + places[program.messages.received]
    )
    return numbers


def _typical(gaps: I64, *classes: I32 | U8) -> I64:
    """Return the mean of each class, for all of its members: gaps are modelled, not copied."""
    typical = np.zeros(len(gaps), dtype=np.int64)
    keys = np.stack([column.astype(np.int64) for column in classes])
    _, group = np.unique(keys, axis=1, return_inverse=True)
    group = group.reshape(-1)
    known = gaps < -NEVER_NS // 2
    for number in range(int(group.max(initial=-1)) + 1):
        mine = group == number
        if (mine & known).any():
            typical[mine] = int(np.mean(np.maximum(gaps[mine & known], 0)))
    return typical


def _message_lengths(program: Program, times: Times) -> tuple[dict[str, I64], SeenLengths]:
    """Return what sending, wire and drain took of each message, and which of these were seen.

    A receive ends when its message has travelled and has been taken in. Of a buffered message only
    the later of these two is seen; the other is what its hop's messages usually take.
    """
    messages = program.messages
    send_start, send_end = times.batch_start[messages.sent], times.batch_end[messages.sent]
    start, end = times.batch_start[messages.received], times.batch_end[messages.received]
    both = np.maximum(send_start, start)
    # In a batch with several partners, a message ends at the earlier of its two ends.
    ends = np.where(several_partners(messages), np.minimum(send_end, end), end)
    met = np.maximum(ends - both, 0)
    # In an exchange the sender's kernel may go on for the message that it receives.
    met_sender = np.maximum(np.minimum(send_end, end) - both, 0)
    buffered = ~messages.rendezvous
    whole, rest = np.maximum(end - send_start, 0), np.maximum(end - start, 0)
    known, early = buffered & ~_hidden(program, both, times), send_end <= start
    waited = ~early & (start <= send_start)
    # What wire and drain usually take on the hop of each buffered message. Where a hop shows but
    # one of them, the other is in proportion, as on hops that show both.
    hop = hop_of(program)
    found = {
        number: (_median(whole[mine & known & waited]), _median(rest[mine & known & early]))
        for number in np.unique(hop).tolist()
        for mine in [hop == number]
    }
    shares = [drain / wire for wire, drain in found.values() if wire and drain]
    share = float(np.median(shares)) if shares else _DRAIN_OVER_WIRE
    usual_wire, usual_drain = np.zeros(len(hop)), np.zeros(len(hop))
    for number, (wire, drain) in found.items():
        mine = hop == number
        either = wire or (drain / share if drain else _median(whole[mine & known]))
        # What is left of a message takes no longer than all of it.
        usual_wire[mine], usual_drain[mine] = either, min(drain or either * share, either)
    # Neither can have taken longer: the one that is nearer to what is usual was the later.
    wire_last = waited | (~early & (whole * usual_drain <= rest * usual_wire))
    wires = np.where(known & wire_last, whole, np.minimum(whole, np.rint(usual_wire)))
    drains = np.where(known & ~wire_last, rest, np.minimum(rest, np.rint(usual_drain)))
    lengths = {
        "sending": np.where(buffered, send_end - send_start, met_sender),
        "wire": np.where(buffered, wires, met).astype(np.int64),
        "drain": np.where(buffered, drains, met).astype(np.int64),
    }
    return lengths, SeenLengths(wire=~buffered | (known & wire_last), drain=known & ~wire_last)


def _hidden(program: Program, begun: I64, times: Times) -> Flags:
    """Tell messages that may have come long before anybody asked: a pass ran while they did.

    A kernel ends when its message is there. Without one, only a host that waits sees it come.
    """
    messages, batches = program.messages, program.batches
    queued = batches.before[messages.received] >= 0
    hidden = np.zeros(len(messages), dtype=bool)
    for row in np.flatnonzero((messages.consumer >= 0) & ~queued).tolist():
        before = program.passes.before[messages.consumer[row]]
        hidden[row] = before >= 0 and times.pass_end[before] > begun[row]
    return hidden


def _median(lengths: I64) -> float:
    return float(np.median(lengths)) if len(lengths) else 0.0


def several_partners(messages: MessageTable) -> Flags:
    """Tell messages in a batch that meets more than one other."""
    size = int(max(messages.sent.max(initial=-1), messages.received.max(initial=-1))) + 1
    pairs = np.unique(messages.sent * size + messages.received)
    partners = np.bincount(np.concatenate(np.divmod(pairs, size)), minlength=size)
    uneven: Flags = (partners[messages.sent] > 1) | (partners[messages.received] > 1)
    if not uneven.any():
        return uneven
    # Both ways between the same two batches is one exchange.
    back = in_exchange(messages.sent, messages.received)
    exchange = back & (partners[messages.sent] == 2) & (partners[messages.received] == 2)
    several: Flags = uneven & ~exchange
    return several
