"""One rank in → when its steps begin, as far as it can tell by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from debubble.timeline.labels import Assignment, Label, parse_label
from debubble.timeline.model import I64, PassKind
from debubble.timeline.prepared import Prepared
from debubble.timeline.structure import Neighbours
from debubble.timeline.work import BEFORE_CAPTURE

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
