"""Ranks that hold several stages each, with no label at all in → which pass is which.

Messages that go around, from the last rank on to the first, show that stages do; they do not say
which stage a message is for. The order of passes does. Two ranks of two stages each, Megatron's
interleaved schedule, two microbatches; what the first rank's host launched between messages:

    seen     main    main    main    main    autograd autograd autograd autograd
    sends    to 1    to 1    to 1    to 1    to 1     to 1     nothing  nothing
    →        0F0     0F1     2F0     2F1     2B0      2B1      0B0      0B1

The number of messages gives microbatches and stages: six to the other rank are two microbatches of
two stages, their outputs and the gradients of the second. Of the schedules with these sizes one
runs forward and backward passes in the order seen on every rank, and sends after them what was
sent; it names them. Where none does, or several do, nothing is named.

docs/explanation/how-the-timeline-is-built.md ("Which work is which pass") tells why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from debubble.schedules import Action, Order, Shape, candidate_orders, place_stages
from debubble.timeline.model import I32, I64, UNKNOWN, Flags, PassKind
from debubble.timeline.passes import Assignment, Posts
from debubble.timeline.work import Work

# More than anyone gives a rank.
_MOST_CHUNKS = 16
_TRAINS = frozenset("FB")
_NO_WAITS: I64 = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the host of a rank issued."""

    rank: int
    work: Work
    step: I32
    """Of each piece of work."""
    posts: Posts
    sent_at_a_time: int
    """Messages that make one output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pieces:
    """The work of one rank in one step, cut where a pass may begin."""

    rows: I64
    """Where each piece begins in the rank's work, and behind the last one where it ends."""
    backward: Flags
    posted: I64
    """Messages posted before each."""
    action: I64
    """The pass of each piece as a row of the order; -1 where it is none."""


def holds_several(first: Host) -> bool:
    """Tell whether the first rank of a pipeline holds more than the first stage.

    It then passes gradients on: it sends right after a backward pass, and not only in one step.
    """
    messages = first.posts.messages
    sends = np.flatnonzero(messages.is_send & (messages.peer >= 0) & (first.posts.step >= 0))
    last = np.searchsorted(first.work.issued_ns, messages.issued_ns[sends]) - 1
    after_backward = first.work.backward[last[last >= 0]]
    return int(after_backward.sum()) > len(np.unique(first.posts.step))


def name_around(hosts: Sequence[Host]) -> dict[int, Assignment] | None:
    """Name the passes of ranks around which stages go; None where no one order explains them."""
    last = hosts[-1].posts.messages
    if not (last.is_send & (last.peer == hosts[0].rank)).any():
        return None  # the last rank passes nothing on to the first
    steps = sorted({step for host in hosts for step in np.unique(host.step).tolist() if step >= 0})
    found: list[list[_Pieces]] = []
    chosen: Order | None = None
    for step in steps:
        fitting = [fit for fit in _fits(hosts, step) if chosen is None or fit[0] == chosen]
        if chosen is None and len(fitting) > 1:
            return None
        if fitting:
            chosen, pieces = fitting[0]
            found.append(pieces)
    if chosen is None:
        return None
    return {
        host.rank: _assign(host, [pieces[position] for pieces in found], chosen[position])
        for position, host in enumerate(hosts)
    }


def count_pieces(host: Host, *, receives_first: bool) -> Assignment:
    """Count what lies between messages, forward and backward, where no more can be told.

    What the host launches itself after the last backward pass of a step is none of it.
    """
    columns = np.full((2, len(host.work)), UNKNOWN, dtype=np.int32)
    for step in np.unique(host.step[host.step >= 0]).tolist():
        pieces = _cut(host, step, _NO_WAITS, receives_first=receives_first)
        ended = np.flatnonzero(pieces.backward)
        counts = {PassKind.F: 0, PassKind.B: 0}
        for piece in range(int(ended[-1]) + 1 if len(ended) else 0):
            kind = PassKind.B if pieces.backward[piece] else PassKind.F
            here = slice(int(pieces.rows[piece]), int(pieces.rows[piece + 1]))
            columns[:, here] = np.array([[kind], [counts[kind]]])
            counts[kind] += 1
    stage = np.full(len(host.work), UNKNOWN, dtype=np.int32)
    return Assignment(kind=columns[0], stage=stage, microbatch=columns[1])


def _fits(hosts: Sequence[Host], step: int) -> Iterator[tuple[Order, list[_Pieces]]]:
    """Yield the orders that a step could have followed, and the pieces of each rank under them."""
    for order in _orders(hosts, step):
        known: list[_Pieces] = []
        for position, host in enumerate(hosts):
            fitted = _fit(host, step, order, position, hosts)
            if fitted is None:
                break
            known.append(fitted)
        else:
            yield order, known


def _orders(hosts: Sequence[Host], step: int) -> Iterator[Order]:
    """Yield the orders of all schedules that send as many messages as the first rank did.

    It sends each stage's output, and around two ranks the gradients of all but its first as well.
    """
    ranks, first = len(hosts), hosts[0]
    posts = first.posts.messages
    sends = posts.is_send & (posts.peer == hosts[1].rank) & (first.posts.step == step)
    outputs = int(sends.sum()) // first.sent_at_a_time
    for chunks in range(2, _MOST_CHUNKS + 1):
        sent = chunks if ranks > 2 else 2 * chunks - 1
        microbatches, rest = divmod(outputs, sent)
        if microbatches and not rest:
            placement = place_stages(Shape.LOOP, ranks, chunks)
            yield from (order for _, order in candidate_orders(placement, _TRAINS, microbatches))


def _fit(
    host: Host, step: int, order: Order, position: int, hosts: Sequence[Host]
) -> _Pieces | None:
    """Lay the work of a rank beside its part of an order; None where they differ.

    Messages part passes; where receives are posted ahead, only waits do.
    """
    actions = order[position]
    sends = _sends(order, position, [other.rank for other in hosts])
    for waits in (_NO_WAITS, host.posts.waits_ns):
        pieces = _cut(host, step, waits, receives_first=position > 0)
        taken = _align(pieces.backward.tolist(), [action.kind == "B" for action in actions])
        if taken is None:
            continue
        fitted = replace(pieces, action=taken)
        if _sends_agree(host, step, fitted, sends):
            return fitted
    return None


def _cut(host: Host, step: int, waits_ns: I64, *, receives_first: bool) -> _Pieces:
    rows = np.flatnonzero(host.step == step)
    messages = host.posts.messages
    issued = host.work.issued_ns[rows]
    posted = np.searchsorted(messages.issued_ns, issued)
    began = int(np.searchsorted(host.posts.step, step))
    backward = host.work.backward[rows]
    changes = (
        (np.diff(posted, prepend=-1) != 0)
        | (np.diff(backward.astype(np.int8), prepend=-1) != 0)
        | (np.diff(np.searchsorted(waits_ns, issued), prepend=-1) != 0)
    )
    first = np.flatnonzero(changes)
    if receives_first:
        first = first[posted[first] > began]
    return _Pieces(
        rows=np.append(rows[first], rows[-1] + 1 if len(rows) else 0),
        backward=backward[first],
        posted=posted[first].astype(np.int64),
        action=np.full(len(first), UNKNOWN, dtype=np.int64),
    )


def _align(backward: Sequence[bool], expected: Sequence[bool]) -> I64 | None:
    """Give each piece its pass. What the host launches where none is due, a loss, is no pass."""
    taken = np.full(len(backward), UNKNOWN, dtype=np.int64)
    due = 0
    for piece, is_backward in enumerate(backward):
        if due < len(expected) and expected[due] == is_backward:
            taken[piece] = due
            due += 1
        elif is_backward:
            return None
    return taken if due == len(expected) else None


def _sends(order: Order, position: int, ranks: Sequence[int]) -> dict[int, I64]:
    """Return for each peer how many outputs go to it before each pass of a rank, and in all."""
    home = {action.stage: number for number, mine in enumerate(order) for action in mine}
    targets = np.array(
        [
            home.get(action.stage + (1 if action.kind == "F" else -1), position)
            for action in order[position]
        ]
    )
    return {
        rank: np.concatenate(([0], np.cumsum(targets == number)))
        for number, rank in enumerate(ranks)
        if number != position
    }


def _sends_agree(host: Host, step: int, pieces: _Pieces, sends: Mapping[int, I64]) -> bool:
    """Tell whether each output was sent after its pass, at the latest after the next one."""
    messages = host.posts.messages
    begun = np.flatnonzero(pieces.action >= 0)
    due = pieces.action[begun]
    here = host.posts.step == step
    for peer, outputs in sends.items():
        running = np.concatenate(
            ([0], np.cumsum(here & messages.is_send & (messages.peer == peer)))
        )
        sent = running[pieces.posted[begun]]
        most = outputs[due] * host.sent_at_a_time
        least = outputs[np.maximum(due - 1, 0)] * host.sent_at_a_time
        whole = outputs[-1] * host.sent_at_a_time
        if running[-1] != whole or (sent > most).any() or (sent < least).any():
            return False
    return True


def _assign(host: Host, steps: Sequence[_Pieces], actions: Sequence[Action]) -> Assignment:
    """Name the pieces of a rank; what comes just before a backward pass, a loss say, is of that."""
    columns = np.full((3, len(host.work)), UNKNOWN, dtype=np.int32)
    for pieces in steps:
        for piece in range(len(pieces.action)):
            row = int(pieces.action[piece])
            if row < 0 and piece + 1 < len(pieces.action):
                following = piece + 1
                same = pieces.posted[piece] == pieces.posted[following]
                leads = pieces.backward[following] and same
                row = int(pieces.action[following]) if leads else UNKNOWN
            if row >= 0:
                action = actions[row]
                here = slice(int(pieces.rows[piece]), int(pieces.rows[piece + 1]))
                columns[:, here] = np.array(
                    [[PassKind[action.kind]], [action.stage], [action.microbatch]]
                )
    return Assignment(kind=columns[0], stage=columns[1], microbatch=columns[2])
