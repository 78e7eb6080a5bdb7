"""A program and its measured times in → how long everything took of itself, waits left out."""

from __future__ import annotations

import numpy as np

from debubble.simulate.events import NEVER_NS
from debubble.simulate.program import Lengths, MessageTable, Program, Times
from debubble.timeline.model import I64, Flags


def measure_lengths(
    program: Program, times: Times, *, floors: tuple[I64, I64], free_ns: I64
) -> Lengths:
    """Take waits out of what was measured, so that a replay puts them back in."""
    passes, batches = program.passes, program.batches
    pass_floor, batch_floor = floors[0].copy(), floors[1].copy()
    first = passes.before < 0
    pass_floor[first] = np.maximum(pass_floor[first], free_ns[passes.place[first]])
    begins = batches.after < 0
    batch_floor[begins] = np.maximum(batch_floor[begins], free_ns[batches.place[begins]])
    hidden = _hidden(program, times)
    return Lengths(
        passes=times.pass_end - times.pass_start,
        pass_gaps=_typical(pass_gaps(program, times, pass_floor), passes.place, passes.kind),
        batch_gaps=_typical(batch_gaps(program, times, batch_floor), batches.place, batches.place),
        **_message_lengths(program, times, hidden),
        pass_floor=pass_floor,
        batch_floor=batch_floor,
    )


def pass_gaps(program: Program, times: Times, floor: I64) -> I64:
    """Return from when each pass could start to its start; below 0 where it did not wait."""
    passes, messages = program.passes, program.messages
    ready = floor.copy()
    follows = passes.before >= 0
    ready[follows] = np.maximum(ready[follows], times.pass_end[passes.before[follows]])
    used = messages.consumer >= 0
    np.maximum.at(ready, messages.consumer[used], times.batch_end[messages.received[used]])
    np.maximum.at(ready, program.needs[:, 0], times.pass_end[program.needs[:, 1]])
    return times.pass_start - ready


def batch_gaps(program: Program, times: Times, floor: I64) -> I64:
    """Return from when each batch could start to its start."""
    batches = program.batches
    ready = floor.copy()
    follows, queued = batches.after >= 0, batches.before >= 0
    ready[follows] = np.maximum(ready[follows], times.pass_end[batches.after[follows]])
    ready[queued] = np.maximum(ready[queued], times.batch_end[batches.before[queued]])
    return times.batch_start - ready


def _typical(gaps: I64, *classes: np.ndarray[tuple[int], np.dtype[np.integer]]) -> I64:
    """Return the median of each class, for all of its members: gaps are modelled, not copied."""
    typical = np.zeros(len(gaps), dtype=np.int64)
    keys = np.stack([one.astype(np.int64) for one in classes])
    _, group = np.unique(keys, axis=1, return_inverse=True)
    group = group.reshape(-1)
    known = gaps < -NEVER_NS // 2
    for number in range(int(group.max(initial=-1)) + 1):
        mine = group == number
        if (mine & known).any():
            typical[mine] = int(np.mean(np.maximum(gaps[mine & known], 0)))
    return typical


def _hidden(program: Program, times: Times) -> Flags:
    """Tell messages that may have come long before anybody asked: a pass ran while they did.

    A kernel ends when its message is there. Without one, only a host that waits sees it come.
    """
    messages, batches = program.messages, program.batches
    queued = batches.before[messages.received] >= 0
    begun = np.maximum(times.batch_start[messages.sent], times.batch_start[messages.received])
    hidden = np.zeros(len(messages), dtype=bool)
    for row in np.flatnonzero((messages.consumer >= 0) & ~queued).tolist():
        before = program.passes.before[messages.consumer[row]]
        hidden[row] = before >= 0 and times.pass_end[before] > begun[row]
    return hidden


def _message_lengths(program: Program, times: Times, hidden: Flags) -> dict[str, I64]:
    """Return what sending, wire and drain took of each message.

    Of a buffered message only one of wire and drain was seen; the other is its hop's median.
    """
    messages = program.messages
    send_start, send_end = times.batch_start[messages.sent], times.batch_end[messages.sent]
    start, end = times.batch_start[messages.received], times.batch_end[messages.received]
    both = np.maximum(send_start, start)
    # In a batch with several partners, a message ends at the earlier of its two ends.
    shared = _several_partners(messages)
    ends = np.where(shared, np.minimum(send_end, end), end)
    met = np.maximum(ends - both, 0)
    # In an exchange the sender's kernel may go on for the message that it receives.
    met_sender = np.maximum(np.minimum(send_end, end) - both, 0)
    there_before = hidden | (send_end <= start)
    waited = ~there_before & (start <= send_start)
    lengths = {
        "sending": np.where(messages.rendezvous, met_sender, send_end - send_start),
        "wire": np.where(messages.rendezvous, met, np.maximum(end - send_start, 0)),
        "drain": np.where(messages.rendezvous, met, np.maximum(end - start, 0)),
    }
    hop = hop_of(program)
    for number in np.unique(hop).tolist():
        mine = (hop == number) & ~messages.rendezvous
        _fill(lengths["wire"], mine & there_before, mine & waited)
        _fill(lengths["drain"], mine & (hidden | ~there_before), mine & there_before & ~hidden)
    return lengths


def _fill(column: I64, unseen: Flags, seen: Flags) -> None:
    """Give what was not seen the median of what was, but no more than it can have been."""
    typical = int(np.median(column[seen])) if seen.any() else 0
    column[unseen] = np.minimum(column[unseen], typical)


def hop_of(program: Program) -> I64:
    """Return a number for the hop of each message: of its sender's place and its receiver's."""
    places = program.batches.place.astype(np.int64)
    numbers: I64 = (
        places[program.messages.sent] * len(program.ranks) + places[program.messages.received]
    )
    return numbers


def _several_partners(messages: MessageTable) -> Flags:
    """Tell messages in a batch that meets more than one other."""
    pairs = np.unique(np.stack((messages.sent, messages.received)), axis=1)
    size = int(pairs.max(initial=-1)) + 1
    partners = np.bincount(pairs.reshape(-1), minlength=size)
    uneven: Flags = (partners[messages.sent] > 1) | (partners[messages.received] > 1)
    # Both ways between the same two batches is one exchange.
    back = np.isin(messages.sent * size + messages.received, pairs[1] * size + pairs[0])
    exchange = back & (partners[messages.sent] == 2) & (partners[messages.received] == 2)
    several: Flags = uneven & ~exchange
    return several
