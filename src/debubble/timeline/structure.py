"""Work and messages in → which pass is which, with no label at all.

The host issues a schedule in order: a pass is what it launches between two messages. Forward passes
come from its own thread, backward passes from autograd's. A forward pass needs an input that was
received (on the first rank: an output that is sent), a backward pass a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.timeline.labels import Assignment
from debubble.timeline.model import I32, I64, UNKNOWN, PassKind
from debubble.timeline.work import Messages, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """The ranks before and after one in its pipeline; None at its ends."""

    previous: int | None
    next: int | None


@dataclass(slots=True)
class _Count:
    """What a step has seen so far."""

    forwards: int = 0
    backwards: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Posts:
    """What parts the passes of a rank: its messages, and the waits for them."""

    messages: Messages
    step: I32
    """Of each message."""
    waits_ns: I64
    inputs_each: int = 1
    """Messages that make one input: hidden states and residual may come apart."""
    gradients_each: int = 1


def messages_a_pass(messages: Messages, work: Work, peer: int) -> int:
    """Return how many messages a rank sends to another at a time: no work lies between them."""
    sends = messages.issued_ns[messages.is_send & (messages.peer == peer)]
    _, runs = np.unique(np.searchsorted(work.issued_ns, sends), return_counts=True)
    return int(np.bincount(runs).argmax()) if len(runs) else 1


def assign_by_structure(work: Work, work_step: I32, posts: Posts, beside: Neighbours) -> Assignment:
    """Give each piece of work its pass, counting microbatches in order."""
    posted = np.searchsorted(posts.messages.issued_ns, work.issued_ns)
    changes = (
        (np.diff(posted, prepend=-1) != 0)
        | (np.diff(np.searchsorted(posts.waits_ns, work.issued_ns), prepend=-1) != 0)
        | (np.diff(work.backward.astype(np.int8), prepend=-1) != 0)
        | (np.diff(work_step, prepend=-2) != 0)
    )
    segment = np.cumsum(changes) - 1
    first = np.flatnonzero(changes)
    tells = _Teller(posts, beside)
    kinds, numbers = tells.passes_of(posted[first], work.backward[first], work_step[first])
    stage = np.full(len(work), UNKNOWN, dtype=np.int32)
    return Assignment(kind=kinds[segment], stage=stage, microbatch=numbers[segment])


class _Teller:
    """Goes through the segments of a rank in the order of the host."""

    def __init__(self, posts: Posts, beside: Neighbours) -> None:
        messages = posts.messages
        self._posts = posts
        self._step = posts.step
        self._beside = beside
        arrives = ~messages.is_send
        self._inputs = _running(arrives & (messages.peer == _rank(beside.previous)))
        self._gradients = _running(arrives & (messages.peer == _rank(beside.next)))
        self._is_output = messages.is_send & (messages.peer == _rank(beside.next))

    def passes_of(
        self, posted: I64, backward: np.ndarray[tuple[int], np.dtype[np.bool_]], step: I32
    ) -> tuple[I32, I32]:
        kinds = np.full(len(posted), UNKNOWN, dtype=np.int32)
        numbers = np.full(len(posted), UNKNOWN, dtype=np.int32)
        counts: dict[int, _Count] = {}
        last = None
        for row, here in enumerate(
            zip(posted.tolist(), backward.tolist(), step.tolist(), strict=True)
        ):
            before, is_backward, number = here
            if number < 0:
                continue
            count = counts.setdefault(number, _Count())
            began = int(np.searchsorted(self._step, number)) if len(self._step) else 0
            goes_on = here == last
            if is_backward:
                if self._has_gradient(before, began, count, goes_on=goes_on):
                    count.backwards += 1
                if count.backwards:
                    kinds[row], numbers[row] = PassKind.B, count.backwards - 1
            elif self._has_input(before, began, number, count, goes_on=goes_on):
                kinds[row], numbers[row] = PassKind.F, count.forwards
                count.forwards += 1
            elif goes_on:
                kinds[row], numbers[row] = kinds[row - 1], numbers[row - 1]
            last = here
        _join_preludes(kinds, numbers, posted, step)
        return kinds, numbers

    def _has_input(
        self, before: int, began: int, step: int, count: _Count, *, goes_on: bool
    ) -> bool:
        """Tell whether a forward pass begins. Where only a wait came, it must be for an input."""
        if self._beside.previous is not None:
            arrived = int(self._inputs[before] - self._inputs[began])
            return arrived // self._posts.inputs_each > count.forwards
        if goes_on:
            return False
        there = before < len(self._step) and self._step[before] == step
        return bool(there and self._is_output[before])

    def _has_gradient(self, before: int, began: int, count: _Count, *, goes_on: bool) -> bool:
        if self._beside.next is not None:
            arrived = int(self._gradients[before] - self._gradients[began])
            return arrived // self._posts.gradients_each > count.backwards
        return not goes_on and count.forwards > count.backwards


def _rank(neighbour: int | None) -> int:
    return -2 if neighbour is None else neighbour


def _running(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> I64:
    """Return how many came before each position, and after the last one."""
    return np.concatenate(([0], np.cumsum(flags)))


def _join_preludes(kinds: I32, numbers: I32, posted: I64, step: I32) -> None:
    """Give what the host launches itself just before a backward pass, a loss say, to that pass."""
    for row in range(len(kinds) - 2, -1, -1):
        same = posted[row] == posted[row + 1] and step[row] == step[row + 1]
        if kinds[row] == UNKNOWN and kinds[row + 1] == PassKind.B and same:
            kinds[row], numbers[row] = PassKind.B, numbers[row + 1]
