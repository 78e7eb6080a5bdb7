"""Work without marks in → steps, by the pipeline's own rhythm.

A rank that trains has finished every microbatch it began only at the end of a step. What a second
of three ranks ran, in the order of its host, and how many microbatches were in flight after it:

    passes      F0 F1 B0 F2 B1 F3 B2 B3 │ F0 F1 B0 F2 B1 F3 B2 B3
    in flight    1  2  1  2  1  2  1  0 │  1  2  1  2  1  2  1  0
    →           step 0                  │ step 1

A step ends where as few are in flight as ever and a forward pass follows. Labels are clearer: they
restart, so a step begins with the first stage's forward pass of microbatch 0. A first rank that
does not train sends a batch and then takes one answer. The last rank may finish each microbatch at
once, B after F: it goes by the messages that it gets from the rank before it, and so its steps get
their numbers. Where nothing repeats, nothing is guessed.

docs/explanation/how-the-timeline-is-built.md ("Where no step is marked") tells why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from debubble.timeline.chain import Chain
from debubble.timeline.model import I32, I64, Flags, PassKind
from debubble.timeline.passes import Assignment, Label, Neighbours, parse_label
from debubble.timeline.steps import RankRecord, Steps
from debubble.timeline.transfers import find_shift
from debubble.timeline.work import BEFORE_CAPTURE, Messages, host_ranges

# Whatever was captured at all; work without a launch was issued before.
_BEGIN = int(BEFORE_CAPTURE) + 1
# What a rank sends to one and the same other rank is gradients, or it is not. A schedule that sends
# both ways both kinds labels its passes.
_UNCLEAR = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Beats:
    """When the host began each step; the first and the last may be cut by the capture."""

    begins_ns: I64
    cut: bool = False
    """Labels tell that the first one began before the capture."""
    first: int = 0
    """What the pipeline calls the first of them."""

    def steps(self, lift: int = 0) -> Steps:
        """Return them as windows that follow each other, their numbers raised by so much."""
        number = np.arange(len(self.begins_ns)) + self.first + lift
        end = np.append(self.begins_ns[1:], np.iinfo(np.int64).max)
        return Steps(number=number.astype(np.int32), start_ns=self.begins_ns, end_ns=end)


def infer_steps(
    ranks: Sequence[RankRecord], chain: Chain, assigned: Mapping[int, Assignment]
) -> dict[int, Steps] | None:
    """Return the steps of each rank of a pipeline; None where its rhythm cannot be told.

    The passes are assigned as if all were one step. Each rank tells by itself, or goes by the
    messages of the rank before it.
    """
    captured = sorted(ranks, key=lambda rank: chain.ranks.index(rank.rank))
    trains = any(bool(rank.work.backward.any()) for rank in captured)
    found: dict[int, Beats] = {}
    before: RankRecord | None = None
    for rank in captured:
        beside = chain.beside(rank.rank)
        beats = beats_of_labels(rank, trains=trains)
        if beats is None and trains and beside.next is not None:
            beats = beats_of_training(rank, beside, assigned[rank.rank])
        if beats is None and not trains and beside.previous is None:
            beats = beats_of_answers(rank, assigned[rank.rank], chain.ranks[-1])
        if before is not None:
            theirs = found[before.rank]
            if beats is None:
                beats = _follow(before, rank, theirs)
            else:
                beats = _number_alike(before, rank, theirs, beats)
        if beats is None:
            return None
        found[rank.rank] = beats
        before = rank
    lift = -min(beats.first for beats in found.values())
    return {rank: beats.steps(lift) for rank, beats in found.items()}


def beats_of_labels(rank: RankRecord, *, trains: bool) -> Beats | None:
    """Let a step begin with the first stage's forward pass of microbatch 0.

    Receives for it may have been posted since the pass before it. Batches of a single microbatch
    that nobody trains on are a server's.
    """
    annotations = rank.trace.annotations
    labels = [parse_label(name) for name in rank.trace.names]
    named = np.array([label is not None for label in labels] or [False])
    rows = [(row, labels[annotations.name[row]]) for row in host_ranges(rank.trace, named).tolist()]
    forward = {label.forward[1:] for _, label in rows if label is not None and label.forward}
    if not forward or (not trains and max(number for _, number in forward) == 0):
        return None
    first = min(forward)

    def begins_step(label: Label | None) -> bool:
        return label is not None and label.forward is not None and label.forward[1:] == first

    begins: list[int] = []
    reach = _BEGIN
    for row, label in rows:
        start = int(annotations.start_ns[row])
        if begins_step(label):
            if not begins and reach > _BEGIN:
                begins.append(_BEGIN)
            begins.append(_posted_since(rank, reach, start, trains=trains) if begins else _BEGIN)
        reach = max(reach, start + int(annotations.duration_ns[row]))
    return Beats(
        begins_ns=np.array(begins or [_BEGIN], dtype=np.int64), cut=not begins_step(rows[0][1])
    )


def _posted_since(rank: RankRecord, reach: int, start: int, *, trains: bool) -> int:
    """Return when the first receive for a pass was posted, after the last send of the one before.

    A first rank that does not train receives nothing but answers, and those end a step. A rank is
    first if it sends before it receives anything.
    """
    messages = rank.messages
    if not trains and (not len(messages) or messages.is_send[0]):
        return start
    here = (messages.issued_ns >= reach) & (messages.issued_ns < start)
    sent = messages.issued_ns[here & messages.is_send]
    after = int(sent[-1]) if len(sent) else reach
    received = messages.issued_ns[here & ~messages.is_send & (messages.issued_ns >= after)]
    return int(received[0]) if len(received) else start


def beats_of_training(rank: RankRecord, beside: Neighbours, assigned: Assignment) -> Beats | None:
    """Let a step end where as few microbatches as ever are in flight, and none is begun before.

    How many were in flight when the capture began is not known; but no moment has fewer than none.
    """
    rows = np.flatnonzero(assigned.kind >= 0)
    if not len(rows):
        return None
    # Passes in the order the host issued them: where each begins in its work, and its kind.
    changes = (np.diff(assigned.kind[rows]) != 0) | (np.diff(assigned.microbatch[rows]) != 0)
    first = rows[np.concatenate(([True], changes))]
    kind = assigned.kind[first]
    level = np.cumsum(np.where(kind == PassKind.F, 1, -1))
    lowest = min(int(level.min()), 0)
    ends = (level[:-1] == lowest) & (kind[:-1] != PassKind.F) & (kind[1:] == PassKind.F)
    starts = first[np.concatenate(([True], ends))]
    begins = [_first_message_or_work(rank, beside, assigned, row) for row in starts.tolist()]
    if kind[0] != PassKind.F or beside.previous is not None:
        begins[0] = _BEGIN
    return Beats(begins_ns=np.array(begins, dtype=np.int64))


def _first_message_or_work(
    rank: RankRecord, beside: Neighbours, assigned: Assignment, row: int
) -> int:
    """Return when the first pass of a step began on the host: its receive, or its own work.

    On the first rank nothing parts it from what was launched before it, an optimizer say: but all
    forward passes launch alike, as many pieces of work as most; the fewest where none is usual.
    """
    issued = rank.work.issued_ns
    if beside.previous is not None:
        messages = rank.messages
        since = issued[row - 1] if row else BEFORE_CAPTURE
        inputs = messages.issued_ns[~messages.is_send & (messages.peer == beside.previous)]
        inputs = inputs[(inputs > since) & (inputs <= issued[row])]
        return int(inputs[0]) if len(inputs) else int(issued[row])
    forward = np.flatnonzero(assigned.kind == PassKind.F)
    counts = np.unique(assigned.microbatch[forward], return_counts=True)[1]
    sizes, often = np.unique(counts, return_counts=True)
    size = int(sizes[often.argmax()]) if len(sizes) else 0
    mine = forward[assigned.microbatch[forward] == assigned.microbatch[row]]
    return int(issued[mine[-size]]) if 0 < size < len(mine) else int(issued[row])


def beats_of_answers(rank: RankRecord, assigned: Assignment, last: int) -> Beats | None:
    """Let a first rank's step begin with the first pass after it took the last rank's answer.

    A server's rank takes an answer for each batch that it sends; a batch has several microbatches,
    each as many: only the first and the last may be cut.
    """
    messages = rank.messages
    answers = messages.issued_ns[~messages.is_send & (messages.peer == last)]
    forward = np.flatnonzero(assigned.kind == PassKind.F)
    if not len(answers) or not len(forward):
        return None
    _, first = np.unique(assigned.microbatch[forward], return_index=True)
    issued = rank.work.issued_ns[forward[first]]
    turn = np.searchsorted(answers, issued)
    turns, counts = np.unique(turn, return_counts=True)
    whole = counts[1:-1] if len(counts) > 2 else counts[:1]
    if whole.min() < 2 or whole.min() < whole.max() or counts.max() > whole.max():
        return None
    begins = np.array([issued[turn == number][0] for number in turns], dtype=np.int64)
    begins[0] = _BEGIN
    return Beats(begins_ns=begins)


def _number_alike(
    before: RankRecord, rank: RankRecord, theirs: Beats, beats: Beats
) -> Beats | None:
    """Give steps the numbers that the rank before gives them, by the messages both know."""
    sends, receives, at = _hop(before, rank)
    if not len(sends) or not len(receives):
        return replace(beats, first=theirs.first)
    known = (at >= 0) & (at < len(sends))
    sent = theirs.steps().at(before.messages.issued_ns[sends[at[known]]])
    taken = beats.steps().at(rank.messages.issued_ns[receives[known]])
    differences = Counter((sent - taken).tolist())
    return replace(beats, first=differences.most_common(1)[0][0]) if differences else None


def _follow(before: RankRecord, rank: RankRecord, theirs: Beats) -> Beats | None:
    """Let a rank's steps begin with the first message of each step of the rank before it."""
    sends, receives, at = _hop(before, rank)
    if not len(sends) or not len(receives):
        return None
    step = _steps_of_sends(theirs.steps().at(before.messages.issued_ns[sends]), at)
    if step is None:
        return None
    begins = np.flatnonzero(np.diff(step, prepend=step[0] - 1))
    moments = rank.messages.issued_ns[receives[begins]]
    moments[0] = _BEGIN
    return Beats(begins_ns=moments, first=int(step[0]))


def _steps_of_sends(step: I32, at: I64) -> I64 | None:
    """Return the steps of sends by their rows; beyond what was captured, counted on."""
    first = np.flatnonzero(np.diff(step, prepend=step[0] - 1))
    known = (at >= 0) & (at < len(step))
    found: I64 = step[np.clip(at, 0, len(step) - 1)].astype(np.int64)
    if known.all() or len(first) < 2:
        return found
    sizes = np.diff(first)[1:] if len(first) > 2 else np.diff(first)
    size = max(int(sizes.max()), len(step) - int(first[-1]))
    if len(first) > 2 and int(sizes.min()) != size:
        return None
    counted = int(step[first[1]]) + (at - int(first[1])) // size
    return np.where(known, found, counted)


def _hop(before: RankRecord, rank: RankRecord) -> tuple[I64, I64, I64]:
    """Return the rows of sends and receives of a hop, and to which send each receive belongs."""
    posted = {before.rank: before.posted, rank.rank: rank.posted}
    sends = posted[before.rank].rows(rank.rank, is_send=True)
    receives = posted[rank.rank].rows(before.rank, is_send=False)
    cut_off = 0
    if len(sends) != len(receives) and len(sends) and len(receives):
        shift = find_shift(posted, before.rank, rank.rank)
        cut_off = shift.first if shift else len(sends)
    return sends, receives, np.arange(len(receives)) + cut_off


def leading(rank: RankRecord) -> Messages:
    """Return a rank's messages from the first one that goes the forward way.

    A capture may begin in the middle of a step. What is sent after work of autograd is a gradient.
    """
    messages, work = rank.messages, rank.work
    trains = bool(work.backward.any())
    labelled = beats_of_labels(rank, trains=trains)
    if labelled is not None:
        whole = len(labelled.begins_ns) > 1 and labelled.cut
        return messages.where(messages.issued_ns >= labelled.begins_ns[1]) if whole else messages
    if not len(messages) or not trains:
        return messages
    gradients = messages.is_send & _after_backward(rank)
    ahead, behind = _ways(messages, gradients)
    if behind is None and ahead is None:
        return messages
    if behind is None:
        wanted = messages.is_send & (messages.peer == ahead)
    else:
        wanted = ~messages.is_send & (messages.peer == behind)
    return messages.where(np.arange(len(messages)) >= int(wanted.argmax()))


def _after_backward(rank: RankRecord) -> Flags:
    """Tell before which messages autograd worked, since the message before them with any work."""
    until = np.searchsorted(rank.work.issued_ns, rank.messages.issued_ns)
    since = np.concatenate(([0], until[:-1]))
    before = np.concatenate(([0], np.cumsum(rank.work.backward)))
    found = before[until] > before[since]
    for row in range(1, len(found)):
        if until[row] == since[row]:
            found[row] = found[row - 1]
    return found


def _ways(messages: Messages, gradients: Flags) -> tuple[int | None, int | None]:
    """Return the rank that activations go to, and the one that gradients go to, where clear."""
    ways: dict[bool, int] = {}
    for peer in np.unique(messages.peer[messages.is_send]).tolist():
        share = float(gradients[messages.is_send & (messages.peer == peer)].mean())
        backward = share > 0.5
        if peer < 0 or _UNCLEAR < share < 1 - _UNCLEAR or backward in ways:
            return None, None
        ways[backward] = peer
    return ways.get(False), ways.get(True)
