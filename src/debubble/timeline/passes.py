"""Work in → which span is which pass of which microbatch: by labels, structure, or loops.

Labels name passes, they never time them: `Forward 3` includes the wait for its input.

The host issues a schedule in order: a pass is what it launches between two messages. Forward passes
come from its own thread, backward passes from autograd's. A forward pass needs an input that was
received, and on the first rank an output that is sent before anything else is launched; a backward
pass needs a gradient. What the host launches itself around a backward pass belongs to it. Recorded
of DeepSpeed's first rank, in the order of the host:

    main      36 kernels   forward pass 4, its tokens copied first
    receive, send          the gradient of 1, then the output of 4
    main      26 kernels   gradients made ready          ┐
    autograd 107 kernels                                 │ backward pass 1
    main      18 kernels   gradients added to a sum      ┘
    main      36 kernels   forward pass 5: launched alike in every microbatch

docs/explanation/how-the-timeline-is-built.md ("Which work is which pass") tells why.

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

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from debubble.timeline.model import I64, UNKNOWN, Flags, PassKind
from debubble.timeline.schedules import Action, Order, Shape, candidate_orders, place_stages
from debubble.timeline.work import Messages, Work, host_ranges
from debubble.trace.columns import RankTrace

_SIMPLE = re.compile(r"^(Forward|Backward) (\d{1,6})$")
_ACTION = re.compile(r"^(\d{1,5})([FBIW])(\d{1,6})$")
_OVERLAP = re.compile(r"^PP:\((.+);(.+)\)OVERLAP_F_B$")
# What follows a backward pass and is not the end of a step follows nearly all of them; an optimizer
# follows one in as many as a step has microbatches.
_OFTEN = 0.6
# So many kernels show how a forward pass begins.
_BEGINNING = 32
# A forward pass that begins less alike is taken as it is.
_ALIKE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One or two passes: torch may run a forward and a backward pass under one name."""

    forward: tuple[PassKind, int, int] | None = None
    """Kind, stage (-1 where the name tells none) and microbatch."""
    backward: tuple[PassKind, int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """The ranks before and after one in its pipeline; None at its ends."""

    previous: int | None
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the host of a rank issued: its work, and the messages and waits that part its passes."""

    rank: int
    work: Work
    messages: Messages
    waits_ns: I64
    inputs_each: int = 1
    """Messages that make one input: hidden states and residual may come apart."""
    gradients_each: int = 1
    outputs_each: int = 1

    def pieces(self, step: int, *, first: bool, waits: bool = False) -> list[_Piece]:
        """Cut the work of a step where a pass may begin; only a first rank needs no message."""
        host = self if waits else replace(self, waits_ns=self.waits_ns[:0])
        began = int(np.searchsorted(self.messages.step, step))
        pieces = [piece for piece in _cut(host) if piece.step == step]
        return [piece for piece in pieces if first or piece.posted > began]


@dataclass(slots=True, kw_only=True)
class _Piece:
    """What one thread launched between two messages or waits, rows `first` to `end` of the work."""

    first: int
    end: int
    posted: int
    """Messages posted before it."""
    backward: bool
    step: int
    kind: int = UNKNOWN
    stage: int = UNKNOWN
    microbatch: int = UNKNOWN

    def name(self, kind: int, stage: int, microbatch: int) -> None:
        """Say of which pass it is."""
        self.kind, self.stage, self.microbatch = kind, stage, microbatch

    def leads(self, other: _Piece) -> bool:
        """Tell whether no message parts two pieces."""
        return (self.posted, self.step) == (other.posted, other.step)

    def goes_on(self, other: _Piece) -> bool:
        """Tell whether only a wait parts two pieces."""
        return self.leads(other) and self.backward == other.backward


def parse_label(name: str) -> Label | None:
    """Read `Forward 3`, `PP:1F0`, `PP:(1F6;6B2)OVERLAP_F_B`; None for any other name."""
    simple = _SIMPLE.match(name)
    if simple:
        number = int(simple[2])
        if simple[1] == "Forward":
            return Label(forward=(PassKind.F, UNKNOWN, number))
        return Label(backward=(PassKind.B, UNKNOWN, number))
    both = _OVERLAP.match(name)
    parts = both.groups() if both else (name.removeprefix("PP:"),) if name.startswith("PP:") else ()
    actions = [
        (PassKind[found[2]], int(found[1]), int(found[3]))
        for part in parts
        if (found := _ACTION.match(part))
    ]
    if not actions or len(actions) < len(parts):
        return None
    forward = next((action for action in actions if action[0] is PassKind.F), None)
    backward = next((action for action in actions if action[0] is not PassKind.F), None)
    return Label(forward=forward, backward=backward)


def has_labels(trace: RankTrace) -> bool:
    """Tell whether the schedule names any pass."""
    return any(parse_label(name) for name in trace.names)


def assign_by_labels(trace: RankTrace, work: Work) -> Work | None:
    """Give work to the label whose window holds its launch; None where there are no labels.

    Work of all threads counts: a backward pass is launched by autograd's thread while the label
    stands on the schedule's own.
    """
    labels = [parse_label(name) for name in trace.names]
    named = np.array([label is not None for label in labels] or [False])
    annotations, rows = trace.annotations, host_ranges(trace, named)
    if not len(rows):
        return None
    nothing = (UNKNOWN, UNKNOWN, UNKNOWN)
    # Six numbers a name: the forward pass and the backward pass, -1 where there is none.
    numbers = np.array(
        [
            (*(label.forward or nothing), *(label.backward or nothing)) if label else nothing * 2
            for label in labels
        ],
        dtype=np.int64,
    )
    table = numbers[annotations.name[rows]]
    counts = table[:, 2::3][table[:, 2::3] >= 0]
    if len(counts) and counts.min() == 1:  # a loop of one's own may count from 1
        table[:, 2::3] -= table[:, 2::3] > 0
    starts = annotations.start_ns[rows]
    row = np.searchsorted(starts, work.issued_ns, side="right") - 1
    inside = (row >= 0) & (work.issued_ns < (starts + annotations.duration_ns[rows])[row])
    passes = table[np.maximum(row, 0)]
    has_forward, has_backward = passes[:, 0] >= 0, passes[:, 3] >= 0
    backward = np.where(has_forward & has_backward, work.backward, has_backward)
    chosen = np.where(backward[:, None], passes[:, 3:], passes[:, :3])
    chosen = np.where(inside[:, None], chosen, UNKNOWN).astype(np.int32)
    return replace(work, kind=chosen[:, 0], stage=chosen[:, 1], microbatch=chosen[:, 2])


def messages_a_pass(messages: Messages, work: Work, peer: int) -> int:
    """Return how many messages a rank sends to another at a time: no work lies between them."""
    sends = messages.issued_ns[messages.is_send & (messages.peer == peer)]
    _, runs = np.unique(np.searchsorted(work.issued_ns, sends), return_counts=True)
    return int(np.bincount(runs).argmax()) if len(runs) else 1


def assign_by_structure(host: Host, beside: Neighbours) -> Work:
    """Give each piece of work its pass, counting microbatches in order."""
    pieces = _cut(host)
    _tell_passes(pieces, host, beside)
    pieces = _part_forwards(pieces, host.work)
    _join_neighbours(pieces, host.work)
    return _assigned(host.work, pieces)


def _assigned(work: Work, pieces: Sequence[_Piece]) -> Work:
    """Return work with the pass of each piece."""
    columns = np.full((3, len(work)), UNKNOWN, dtype=np.int32)
    for piece in pieces:
        columns[:, piece.first : piece.end] = [[piece.kind], [piece.stage], [piece.microbatch]]
    return replace(work, kind=columns[0], stage=columns[1], microbatch=columns[2])


def _cut(host: Host) -> list[_Piece]:
    """Cut the work of a rank where a message, a wait, another thread or another step comes."""
    work = host.work
    if not len(work):
        return []
    posted = np.searchsorted(host.messages.issued_ns, work.issued_ns)
    changes = (
        (np.diff(posted, prepend=-1) != 0)
        | (np.diff(np.searchsorted(host.waits_ns, work.issued_ns), prepend=-1) != 0)
        | (np.diff(work.backward.astype(np.int8), prepend=-1) != 0)
        | (np.diff(work.step, prepend=-2) != 0)
    )
    first = np.flatnonzero(changes)
    columns = (first, np.append(first, len(work))[1:], posted[first])
    return [
        _Piece(first=begin, end=end, posted=before, backward=backward, step=step)
        for begin, end, before, backward, step in zip(
            *(column.tolist() for column in columns),
            work.backward[first].tolist(),
            work.step[first].tolist(),
            strict=True,
        )
    ]


def _tell_passes(pieces: list[_Piece], host: Host, beside: Neighbours) -> None:
    """Go through the pieces of a rank in the order of the host, and say which begin a pass."""
    messages = host.messages
    arrives = ~messages.is_send
    inputs = _running(arrives & (messages.peer == beside.previous))
    gradients = _running(arrives & (messages.peer == beside.next))
    outputs = _running(messages.is_send & (messages.peer == beside.next))
    forwards: Counter[int] = Counter()  # seen so far, by step
    backwards: Counter[int] = Counter()
    before: _Piece | None = None
    for number, piece in enumerate(pieces):
        step = piece.step
        if step < 0:
            continue
        first = int(np.searchsorted(messages.step, step))
        goes_on = before is not None and piece.goes_on(before)
        if piece.backward:
            if beside.next is not None:
                arrived = int(gradients[piece.posted] - gradients[first])
                begins = arrived // host.gradients_each > backwards[step]
            else:
                begins = not goes_on and forwards[step] > backwards[step]
            backwards[step] += begins
            if backwards[step]:
                piece.kind, piece.microbatch = PassKind.B, backwards[step] - 1
        else:
            if beside.previous is not None:
                arrived = int(inputs[piece.posted] - inputs[first])
                begins = arrived // host.inputs_each > forwards[step]
            else:
                following = _posted_after(pieces, number, messages)
                begins = not goes_on and bool(outputs[following] > outputs[piece.posted])
            if begins:
                piece.kind, piece.microbatch = PassKind.F, forwards[step]
                forwards[step] += 1
            elif goes_on and before is not None:
                piece.kind, piece.microbatch = before.kind, before.microbatch
        before = piece


def _posted_after(pieces: list[_Piece], number: int, messages: Messages) -> int:
    """Return how many messages of a piece's step were posted before anything else was launched."""
    piece = pieces[number]
    ended = int(np.searchsorted(messages.step, piece.step, side="right"))
    for row in range(number + 1, len(pieces)):
        other = pieces[row]
        if not other.goes_on(piece):
            return other.posted if other.step == piece.step else max(ended, piece.posted)
    return max(ended, piece.posted)


def _running(flags: Flags) -> I64:
    """Return how many came before each position, and after the last one."""
    return np.concatenate(([0], np.cumsum(flags)))


def _part_forwards(pieces: list[_Piece], work: Work) -> list[_Piece]:
    """Cut off what a host launches before a forward pass and no message parts from it.

    An optimizer, the gather of a first layer's parameters, sums of gradients: forward passes begin
    alike, so that each is taken to begin where it goes on most like the others.
    """
    forwards = [piece for piece in pieces if piece.kind == PassKind.F]
    computes = ~(work.collective | work.upload)
    launched = {
        piece.first: np.flatnonzero(computes[piece.first : piece.end]) + piece.first
        for piece in forwards
    }
    names = Counter(tuple(work.name[rows].tolist()) for rows in launched.values())
    several = [(-count, len(same), same) for same, count in names.items() if count > 1]
    usual = min(several, default=(0, 0, ()))[2][:_BEGINNING]
    if not usual:
        return pieces
    parted: list[_Piece] = []
    for piece in pieces:
        if piece.kind == PassKind.F:
            rows = launched[piece.first]
            begin = _begins_like(work.name[rows].tolist(), usual)
            if begin:
                lead = replace(piece, end=int(rows[begin]), kind=UNKNOWN, microbatch=UNKNOWN)
                parted.append(lead)
                piece.first = lead.end
        parted.append(piece)
    return parted


def _begins_like(names: list[int], usual: tuple[int, ...]) -> int:
    """Return from where some names go on most like the usual ones, others may lie between them."""
    if tuple(names[: len(usual)]) == usual:
        return 0
    likeness = []
    for begin in (place for place, name in enumerate(names) if name == usual[0]):
        alike, reach = 0, begin
        for place, name in enumerate(names[begin:], start=begin):
            if alike < len(usual) and name == usual[alike]:
                alike, reach = alike + 1, place
        likeness.append((-alike, reach - begin, begin))
    most, _, begin = min(likeness, default=(0, 0, 0))
    return begin if -most > _ALIKE * len(usual) else 0


def _join_neighbours(pieces: list[_Piece], work: Work) -> None:
    """Give what the host launches itself around a backward pass to that pass.

    Before it, a loss; after it, sums of gradients. After the last one of a step come norms and an
    optimizer, too: of that, only what comes after the others as well is the pass's.
    """
    for number in range(len(pieces) - 2, -1, -1):
        piece, following = pieces[number], pieces[number + 1]
        if piece.kind == UNKNOWN and following.kind == PassKind.B and piece.leads(following):
            piece.name(PassKind.B, UNKNOWN, following.microbatch)
    after = [
        (piece, before)
        for before, piece in pairwise(pieces)
        if before.kind == PassKind.B and piece.kind == UNKNOWN and not piece.backward
        if before.leads(piece)
    ]
    names = Counter(tuple(work.name[piece.first : piece.end].tolist()) for piece, _ in after)
    usual, count = max(names.items(), key=lambda named: named[1], default=((), 0))
    backwards = {(piece.step, piece.microbatch) for piece in pieces if piece.kind == PassKind.B}
    steps = {step for step, _ in backwards}
    if count <= _OFTEN * len(backwards) or count <= len(steps):
        return
    for piece, before in after:
        if tuple(work.name[piece.first : piece.first + len(usual)].tolist()) == usual:
            piece.end = piece.first + len(usual)  # what follows it is in no pass
            piece.kind, piece.microbatch = PassKind.B, before.microbatch


# More than anyone gives a rank.
_MOST_CHUNKS = 16
_TRAINS = frozenset("FB")


def holds_several(first: Host) -> bool:
    """Tell whether the first rank of a pipeline holds more than the first stage.

    It then passes gradients on: it sends right after a backward pass, and not only in one step.
    """
    messages = first.messages
    sends = np.flatnonzero(messages.is_send & (messages.peer >= 0) & (messages.step >= 0))
    last = np.searchsorted(first.work.issued_ns, messages.issued_ns[sends]) - 1
    after_backward = first.work.backward[last[last >= 0]]
    return int(after_backward.sum()) > len(np.unique(messages.step))


def name_around(hosts: Sequence[Host]) -> dict[int, Work] | None:
    """Name the passes of ranks around which stages go; None where no one order explains them."""
    last = hosts[-1].messages
    if not (last.is_send & (last.peer == hosts[0].rank)).any():
        return None  # the last rank passes nothing on to the first
    steps = sorted(
        {step for host in hosts for step in np.unique(host.work.step).tolist() if step >= 0}
    )
    named: dict[int, list[_Piece]] = {host.rank: [] for host in hosts}
    orders: list[Order] = []
    for step in steps:
        fitting = [
            (order, pieces)
            for order in orders or _orders(hosts, step)
            if (pieces := _fit_all(hosts, step, order)) is not None
        ]
        if len(fitting) > 1:
            return None
        for order, pieces in fitting:
            orders = [order]
            for rank, of_rank in pieces.items():
                named[rank] += of_rank
    return {host.rank: _assigned(host.work, named[host.rank]) for host in hosts if orders} or None


def count_pieces(host: Host, *, first: bool) -> Work:
    """Count what lies between messages, forward and backward, where no more can be told.

    What the host launches itself after the last backward pass of a step is none of it.
    """
    named: list[_Piece] = []
    for step in np.unique(host.work.step[host.work.step >= 0]).tolist():
        pieces = host.pieces(step, first=first)
        while pieces and not pieces[-1].backward:
            pieces.pop()
        counts: Counter[PassKind] = Counter()
        for piece in pieces:
            piece.kind = PassKind.B if piece.backward else PassKind.F
            piece.microbatch = counts[PassKind(piece.kind)]
            counts[PassKind(piece.kind)] += 1
        named += pieces
    return _assigned(host.work, named)


def _orders(hosts: Sequence[Host], step: int) -> Iterator[Order]:
    """Yield the orders of all schedules that send as many messages as the first rank did.

    It sends each stage's output, and around two ranks the gradients of all but its first as well.
    """
    ranks, first = len(hosts), hosts[0]
    sends = first.messages.rows(hosts[1].rank, is_send=True, step=step)
    outputs = len(sends) // first.outputs_each
    for chunks in range(2, _MOST_CHUNKS + 1):
        sent = chunks if ranks > 2 else 2 * chunks - 1
        microbatches, rest = divmod(outputs, sent)
        if microbatches and not rest:
            placement = place_stages(Shape.LOOP, ranks, chunks)
            yield from (order for _, order in candidate_orders(placement, _TRAINS, microbatches))


def _fit_all(hosts: Sequence[Host], step: int, order: Order) -> dict[int, list[_Piece]] | None:
    """Lay the work of all ranks beside an order; None where they differ."""
    fitted: dict[int, list[_Piece]] = {}
    for position, host in enumerate(hosts):
        sends = _sends(order, position, [other.rank for other in hosts])
        pieces = _fit(host, step, order[position], sends, first=position == 0)
        if pieces is None:
            return None
        fitted[host.rank] = pieces
    return fitted


def _fit(
    host: Host, step: int, actions: Sequence[Action], sends: Mapping[int, I64], *, first: bool
) -> list[_Piece] | None:
    """Lay the work of a rank beside its part of an order; None where they differ.

    Messages part passes; where receives are posted ahead, only waits do. What the host launches
    where no forward pass is due, a loss, is no pass: it is of the backward pass right behind it.
    """
    for waits in (False, True):
        pieces = host.pieces(step, first=first, waits=waits)
        due: list[_Piece] = []
        for piece in pieces:
            expected = actions[len(due)].kind == "B" if len(due) < len(actions) else None
            if piece.backward and not expected:
                break
            due += [piece] if expected is piece.backward else []
        else:
            if len(due) == len(actions) and _sends_agree(host, step, due, sends):
                for piece, action in zip(due, actions, strict=True):
                    piece.name(PassKind[action.kind], action.stage, action.microbatch)
                for piece, following in pairwise(pieces):
                    if piece.kind == UNKNOWN and following.backward and piece.leads(following):
                        piece.name(following.kind, following.stage, following.microbatch)
                return pieces
    return None


def _sends(order: Order, position: int, ranks: Sequence[int]) -> dict[int, I64]:
    """Return for each peer how many outputs go to it before each pass of a rank, and in all."""
    home = {action.stage: number for number, actions in enumerate(order) for action in actions}
    targets = np.array(
        [
            home.get(action.stage + (1 if action.kind == "F" else -1), position)
            for action in order[position]
        ]
    )
    return {
        rank: _running(targets == number) for number, rank in enumerate(ranks) if number != position
    }


def _sends_agree(host: Host, step: int, due: Sequence[_Piece], sends: Mapping[int, I64]) -> bool:
    """Tell whether each output was sent after its pass, at the latest after the next one."""
    messages = host.messages
    posted = [piece.posted for piece in due]
    here = (messages.step == step) & messages.is_send
    for peer, outputs in sends.items():
        running = _running(here & (messages.peer == peer))
        sent, most = running[posted], outputs * host.outputs_each
        least = np.concatenate(([0], most[:-2]))
        if running[-1] != most[-1] or (sent > most[:-1]).any() or (sent < least).any():
            return False
    return True
