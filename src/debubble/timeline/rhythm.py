"""Work without marks in → steps, by the pipeline's own rhythm.

Labels restart with each batch. Without labels, a rank that trains has finished every microbatch it
began only at the end of a step; a first rank that does not train sends a batch and then takes the
answer. The last rank of a pipeline may finish each microbatch at once: it goes by the messages that
it gets from the rank before it. Where nothing repeats, nothing is guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from debubble.timeline.chain import Chain
from debubble.timeline.model import I32, I64, Flags, PassKind
from debubble.timeline.passes import Assignment, Label, Neighbours, parse_label
from debubble.timeline.steps import Prepared, Steps
from debubble.timeline.transfers import Posted, find_shift
from debubble.timeline.work import BEFORE_CAPTURE, Messages

# Whatever was captured at all; work without a launch was issued before.
_BEGIN = int(BEFORE_CAPTURE) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Beats:
    """When the host began each step; the first and the last may be cut by the capture."""

    begins_ns: I64
    cut: bool = False
    """Labels tell that the first one began before the capture."""


def beats_of_labels(one: Prepared, *, trains: bool) -> Beats | None:
    """Let a step begin with the first stage's forward pass of microbatch 0.

    Receives for it may have been posted since the pass before it. Batches of a single microbatch
    that nobody trains on are a server's.
    """
    trace = one.trace
    annotations = trace.annotations
    labels = [parse_label(name) for name in trace.names]
    named = np.array([label is not None for label in labels] or [False])
    labelled = np.flatnonzero(named[annotations.name] & (annotations.stream < 0))
    rows = [(row, labels[annotations.name[row]]) for row in labelled.tolist()]
    forward = {label.forward[1:] for _, label in rows if label is not None and label.forward}
    if not forward or (not trains and max(number for _, number in forward) == 0):
        return None
    first = min(forward)
    begins: list[int] = []
    reach = _BEGIN
    cut = bool(rows) and not _begins_with(rows[0][1], first)
    for row, label in rows:
        start = int(annotations.start_ns[row])
        if _begins_with(label, first):
            if not begins and reach > _BEGIN:
                begins.append(_BEGIN)
            begins.append(_posted_since(one, reach, start, trains=trains) if begins else _BEGIN)
        reach = max(reach, start + int(annotations.duration_ns[row]))
    return Beats(begins_ns=np.array(begins or [_BEGIN], dtype=np.int64), cut=cut)


def _begins_with(label: Label | None, forward: tuple[int, int]) -> bool:
    return label is not None and label.forward is not None and label.forward[1:] == forward


def _posted_since(one: Prepared, reach: int, start: int, *, trains: bool) -> int:
    """Return when the first receive for a pass was posted, after the last send of the one before.

    A first rank that does not train receives nothing but answers, and those end a step.
    """
    messages = one.messages
    here = (messages.issued_ns >= reach) & (messages.issued_ns < start)
    if not trains and not _has_inputs(one):
        return start
    sent = messages.issued_ns[here & messages.is_send]
    after = int(sent[-1]) if len(sent) else reach
    received = messages.issued_ns[here & ~messages.is_send & (messages.issued_ns >= after)]
    return int(received[0]) if len(received) else start


def _has_inputs(one: Prepared) -> bool:
    """Tell a rank that receives before it first sends: it is not the first of its pipeline."""
    return len(one.messages) > 0 and not bool(one.messages.is_send[0])


def beats_of_training(one: Prepared, beside: Neighbours, assigned: Assignment) -> Beats | None:
    """Let a step end where as few microbatches as ever are in flight, and none is begun before.

    How many were in flight when the capture began is not known; but no moment has fewer than none.
    """
    passes = _in_host_order(assigned)
    if not passes:
        return None
    level = np.cumsum([1 if kind == PassKind.F else -1 for kind, _, _ in passes])
    lowest = min(int(level.min()), 0)
    starts = [0]
    starts += [
        place + 1
        for place, (now, following) in enumerate(pairwise(passes))
        if level[place] == lowest and now[0] != PassKind.F and following[0] == PassKind.F
    ]
    rows = [passes[start][1] for start in starts]
    begins = [_first_message_or_work(one, beside, assigned, row) for row in rows]
    if passes[0][0] != PassKind.F or beside.previous is not None:
        begins[0] = _BEGIN
    return Beats(begins_ns=np.array(begins, dtype=np.int64))


def beats_of_answers(one: Prepared, assigned: Assignment, last: int) -> Beats | None:
    """Let a first rank's step begin with the first pass after it took the last rank's answer.

    A server's rank takes an answer for each batch that it sends; a batch has several microbatches.
    """
    messages = one.messages
    answers = messages.issued_ns[~messages.is_send & (messages.peer == last)]
    forward = np.flatnonzero(assigned.kind == PassKind.F)
    if not len(answers) or not len(forward):
        return None
    _, first = np.unique(assigned.microbatch[forward], return_index=True)
    issued = one.work.issued_ns[forward[first]]
    turn = np.searchsorted(answers, issued)
    turns, counts = np.unique(turn, return_counts=True)
    whole = counts[1:-1] if len(counts) > 2 else counts[:1]
    if whole.min() < 2 or not _regular(counts.tolist()) or counts.max() > whole.max():
        return None
    begins = np.array([issued[turn == one_turn][0] for one_turn in turns], dtype=np.int64)
    begins[0] = _BEGIN
    return Beats(begins_ns=begins)


def _regular(counts: Sequence[int]) -> bool:
    """Tell whether steps have as many microbatches; the first and the last may be cut."""
    whole = counts[1:-1]
    most = max(whole, default=max(counts))
    return all(count == most for count in whole) and max(counts) <= most


def _in_host_order(assigned: Assignment) -> list[tuple[int, int, int]]:
    """Return the passes as (kind, first row, last row), in the order the host issued them."""
    rows = np.flatnonzero(assigned.kind >= 0)
    if not len(rows):
        return []
    kind, number = assigned.kind[rows], assigned.microbatch[rows]
    cuts = np.flatnonzero((np.diff(kind) != 0) | (np.diff(number) != 0)) + 1
    return [
        (int(assigned.kind[part[0]]), int(part[0]), int(part[-1])) for part in np.split(rows, cuts)
    ]


def _first_message_or_work(
    one: Prepared, beside: Neighbours, assigned: Assignment, row: int
) -> int:
    """Return when the first pass of a step began on the host: its receive, or its own work.

    On the first rank nothing parts it from what was launched before it, an optimizer say: but all
    forward passes launch alike.
    """
    issued = one.work.issued_ns
    if beside.previous is not None:
        messages = one.messages
        before = row - 1
        since = issued[before] if before >= 0 else BEFORE_CAPTURE
        inputs = messages.issued_ns[~messages.is_send & (messages.peer == beside.previous)]
        inputs = inputs[(inputs > since) & (inputs <= issued[row])]
        return int(inputs[0]) if len(inputs) else int(issued[row])
    size = _usual_size(assigned)
    number = assigned.microbatch[row]
    mine = np.flatnonzero((assigned.kind == PassKind.F) & (assigned.microbatch == number))
    return int(issued[mine[-size]]) if 0 < size < len(mine) else int(issued[row])


def _usual_size(assigned: Assignment) -> int:
    """Return how many pieces of work most forward passes launch; the fewest where none is usual."""
    forward = assigned.microbatch[assigned.kind == PassKind.F]
    counts = np.unique(forward, return_counts=True)[1]
    values, often = np.unique(counts, return_counts=True)
    return int(values[often.argmax()]) if len(values) else 0


# What a rank sends to one and the same other rank is gradients, or it is not. A schedule that sends
# both ways both kinds labels its passes.
_UNCLEAR = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbered:
    """The steps of one rank in the numbers of its pipeline."""

    beats: Beats
    first: int

    def of(self, moments_ns: I64) -> I32:
        return self.steps().at(moments_ns)

    def steps(self, lift: int = 0) -> Steps:
        begins = self.beats.begins_ns
        number = np.arange(len(begins)) + self.first + lift
        end = np.append(begins[1:], np.iinfo(np.int64).max)
        return Steps(number=number.astype(np.int32), start_ns=begins, end_ns=end)


def infer_steps(
    ranks: Sequence[Prepared], chain: Chain, assigned: Mapping[int, Assignment]
) -> dict[int, Steps] | None:
    """Return the steps of each rank of a pipeline; None where its rhythm cannot be told.

    The passes are assigned as if all were one step.
    """
    mine = [next((one for one in ranks if one.rank == rank), None) for rank in chain.ranks]
    captured = [one for one in mine if one is not None]
    trains = any(bool(one.work.backward.any()) for one in captured)
    numbered: dict[int, _Numbered] = {}
    before: Prepared | None = None
    for one in captured:
        beats = _own_beats(one, chain, assigned[one.rank], trains=trains)
        if beats is None and before is not None:
            found = _follow(before, one, numbered[before.rank])
        else:
            found = None if beats is None else _aligned(before, one, numbered, beats)
        if found is None:
            return None
        numbered[one.rank] = found
        before = one
    lift = -min(one.first for one in numbered.values())
    return {rank: one.steps(lift) for rank, one in numbered.items()}


def _own_beats(one: Prepared, chain: Chain, assigned: Assignment, *, trains: bool) -> Beats | None:
    """Return what a rank tells by itself."""
    labelled = beats_of_labels(one, trains=trains)
    if labelled is not None:
        return labelled
    beside = chain.beside(one.rank)
    if trains:
        return beats_of_training(one, beside, assigned) if beside.next is not None else None
    last = chain.ranks[-1]
    return beats_of_answers(one, assigned, last) if beside.previous is None else None


def _aligned(
    before: Prepared | None, one: Prepared, numbered: Mapping[int, _Numbered], beats: Beats
) -> _Numbered | None:
    """Give steps the numbers that the rank before gives them, by the messages both know."""
    if before is None:
        return _Numbered(beats=beats, first=0)
    theirs = numbered[before.rank]
    mine = _Numbered(beats=beats, first=0)
    sends, receives = _hop(before, one)
    if not len(sends) or not len(receives):
        return _Numbered(beats=beats, first=theirs.first)
    shift = _shift(before, one, sends, receives)
    at = np.arange(len(receives)) + shift
    known = (at >= 0) & (at < len(sends))
    sent = theirs.of(before.messages.issued_ns[sends[at[known]]])
    taken = mine.of(one.messages.issued_ns[receives[known]])
    differences = Counter((sent - taken).tolist())
    if not differences:
        return None
    return _Numbered(beats=beats, first=differences.most_common(1)[0][0])


def _follow(before: Prepared, one: Prepared, theirs: _Numbered) -> _Numbered | None:
    """Let a rank's steps begin with the first message of each step of the rank before it."""
    sends, receives = _hop(before, one)
    if not len(sends) or not len(receives):
        return None
    at = np.arange(len(receives)) + _shift(before, one, sends, receives)
    step = _steps_of_sends(theirs.of(before.messages.issued_ns[sends]), at)
    if step is None:
        return None
    begins = np.flatnonzero(np.diff(step, prepend=step[0] - 1))
    moments = one.messages.issued_ns[receives[begins]]
    moments[0] = BEFORE_CAPTURE + 1
    return _Numbered(beats=Beats(begins_ns=moments), first=int(step[0]))


def _steps_of_sends(step: I32, at: I64) -> I64 | None:
    """Return the steps of sends by their place; beyond what was captured, counted on."""
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


def _hop(before: Prepared, one: Prepared) -> tuple[I64, I64]:
    sends = before.messages.is_send & (before.messages.peer == one.rank)
    receives = ~one.messages.is_send & (one.messages.peer == before.rank)
    return np.flatnonzero(sends), np.flatnonzero(receives)


def _shift(before: Prepared, one: Prepared, sends: I64, receives: I64) -> int:
    """Return which send the first receive belongs to: 0 where nothing is cut off."""
    if len(sends) == len(receives):
        return 0
    posted = {
        each.rank: Posted(messages=each.messages, step=each.message_step) for each in (before, one)
    }
    return find_shift(posted, before.rank, one.rank)


def leading(one: Prepared) -> Messages:
    """Return a rank's messages from the first one that goes the forward way.

    A capture may begin in the middle of a step. What is sent after work of autograd is a gradient.
    """
    messages, work = one.messages, one.work
    trains = bool(work.backward.any())
    labelled = beats_of_labels(one, trains=trains)
    if labelled is not None:
        whole = len(labelled.begins_ns) > 1 and labelled.cut
        return messages.where(messages.issued_ns >= labelled.begins_ns[1]) if whole else messages
    if not len(messages) or not trains:
        return messages
    gradients = messages.is_send & _after_backward(one)
    ahead, behind = _ways(messages, gradients)
    if behind is None and ahead is None:
        return messages
    if behind is None:
        wanted = messages.is_send & (messages.peer == ahead)
    else:
        wanted = ~messages.is_send & (messages.peer == behind)
    return messages.where(np.arange(len(messages)) >= int(wanted.argmax()))


def _after_backward(one: Prepared) -> Flags:
    """Tell before which messages autograd worked, since the message before them with any work."""
    until = np.searchsorted(one.work.issued_ns, one.messages.issued_ns)
    since = np.concatenate(([0], until[:-1]))
    before = np.concatenate(([0], np.cumsum(one.work.backward)))
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
