"""One rank's trace in → its compute and its messages in the order the host issued them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

import numpy as np

from debubble.timeline.model import I32, I64, UNKNOWN, Flags, Intervals
from debubble.trace.busy import merge
from debubble.trace.columns import KernelKind, Operation, RankTrace

# On a CPU trace autograd runs on the thread that called it; its operators say so.
_BACKWARD_OPERATOR = "autograd::engine::evaluate_function"
_COMMUNICATION_OPERATOR = "c10d::"
_CARRIED_OUT = "gloo:"
_RING_OPERATORS = ("c10d::send", "c10d::recv")


BEFORE_CAPTURE = np.int64(np.iinfo(np.int64).min)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Compute and collectives, sorted by the moment the host issued them."""

    issued_ns: I64
    start_ns: I64
    end_ns: I64
    name: I32
    """Of the kernel or operator, as the trace numbers names."""
    backward: Flags
    """Issued by autograd."""
    collective: Flags

    def __len__(self) -> int:
        return len(self.issued_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Sends and receives, sorted by the moment the host issued them."""

    issued_ns: I64
    peer: I32
    is_send: Flags
    start_ns: I64
    end_ns: I64
    message_bytes: I64
    fused: Flags
    queue: I32
    """The stream that carried it; -1 where there is none."""
    tag: I32
    """What its sender called it; -1 where nothing tells."""
    timed: Flags
    """False: its kernel was not recorded, unlike others; only the host's call is known."""

    def __len__(self) -> int:
        return len(self.issued_ns)

    def where(self, kept: Flags) -> Messages:
        """Return a part of the rows."""
        return Messages(
            **{column.name: getattr(self, column.name)[kept] for column in fields(self)}
        )


def find_work(trace: RankTrace) -> Work:
    """List everything that computes: kernels by their launches, or operators of the CPU."""
    if not len(trace.kernels):
        return _cpu_work(trace)
    kernels, launches = trace.kernels, trace.launches
    kept = ~kernels.communication | (kernels.kind == KernelKind.COLLECTIVE)
    launch = kernels.launch[kept]
    known = launch >= 0
    row = np.where(known, launch, 0)
    start = kernels.start_ns[kept]
    # Without a launch in the trace it was issued before the capture began, and is of no step in it.
    issued = np.where(known, launches.start_ns[row], BEFORE_CAPTURE) if len(launches) else start
    caller = np.where(known, launches.thread[row], UNKNOWN) if len(launches) else launch
    main = main_thread(trace)
    order = np.lexsort((start, issued))
    return Work(
        issued_ns=issued[order],
        start_ns=start[order],
        end_ns=(start + kernels.duration_ns[kept])[order],
        name=kernels.name[kept][order],
        backward=((caller != main) & (caller >= 0))[order],
        collective=kernels.communication[kept][order],
    )


def _cpu_work(trace: RankTrace) -> Work:
    operators = trace.cpu_operators
    communicates = _names_that(trace, _COMMUNICATION_OPERATOR)
    backward = _names_that(trace, _BACKWARD_OPERATOR)
    kept = ~communicates[operators.name] if len(operators) else np.zeros(0, dtype=bool)
    issued, end, name = _cpu_collectives(trace)
    computes = np.zeros(int(kept.sum()), dtype=bool)
    start = np.concatenate((operators.start_ns[kept], issued))
    order = np.argsort(start, kind="stable")
    return Work(
        issued_ns=start[order],
        start_ns=start[order],
        end_ns=np.concatenate(((operators.start_ns + operators.duration_ns)[kept], end))[order],
        name=np.concatenate((operators.name[kept], name))[order],
        backward=np.concatenate((backward[operators.name[kept]], np.zeros(len(end), dtype=bool)))[
            order
        ],
        collective=np.concatenate((computes, np.ones(len(end), dtype=bool)))[order],
    )


def _cpu_collectives(trace: RankTrace) -> tuple[I64, I64, I32]:
    """Return when each collective was asked for, when it ended, and its name.

    Sends and receives around a ring are whole as they are.
    """
    operators = trace.operators
    around = (operators.operation == Operation.COLLECTIVE) & _names_of(trace, *_RING_OPERATORS)
    carried, issued = find_carried_out(trace)
    ends = operators.start_ns + operators.duration_ns
    return (
        np.concatenate((issued, operators.start_ns[around])),
        np.concatenate((ends[carried], ends[around])),
        np.concatenate((operators.name[carried], operators.name[around])),
    )


def find_carried_out(trace: RankTrace) -> tuple[Flags, I64]:
    """Return which operators are collectives that gloo carried out, and when each was asked for.

    gloo posts it as `c10d::allreduce_` and carries it out on a thread of its own, where its
    annotation ends with it. The caller waits meanwhile and leaves no mark.
    """
    operators = trace.operators
    collective = operators.operation == Operation.COLLECTIVE
    collective &= ~_names_of(trace, *_RING_OPERATORS)
    posted = operators.start_ns[collective & _names_of(trace, _COMMUNICATION_OPERATOR)]
    carried: Flags = collective & _names_of(trace, _CARRIED_OUT)
    start = operators.start_ns[carried]
    latest = np.searchsorted(posted, start, side="right") - 1
    known = latest >= 0
    issued = np.where(known, posted[np.maximum(latest, 0)], start) if len(posted) else start
    return carried, issued


def _names_of(trace: RankTrace, *begins: str) -> Flags:
    """Tell which communication operators have a name that begins so."""
    names = _names_that(trace, *begins)
    return names[trace.operators.name] if len(names) else np.zeros(0, dtype=bool)


def _names_that(trace: RankTrace, *begins: str) -> Flags:
    return np.array([name.startswith(begins) for name in trace.names], dtype=bool)


def main_thread(trace: RankTrace) -> int:
    """Return the thread that runs the schedule: it posts the messages, or marks the steps."""
    operators = trace.operators
    posts = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
    threads = operators.thread[posts & (operators.thread >= 0)].tolist()
    if not threads:
        marks = np.array([name.startswith("ProfilerStep#") for name in trace.names], dtype=bool)
        annotations = trace.annotations
        on_host = annotations.stream < 0
        threads = (
            annotations.thread[marks[annotations.name] & on_host].tolist() if len(marks) else []
        )
    return int(Counter(threads).most_common(1)[0][0]) if threads else UNKNOWN


def find_messages(trace: RankTrace) -> Messages:
    """List sends and receives with the time they took on the device, or on the wire of gloo."""
    operators, kernels = trace.operators, trace.kernels
    rows = np.flatnonzero(np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE)))
    kernel = operators.kernel[rows]
    start, end = operators.start_ns[rows].copy(), ends_of_posts(trace, rows)
    carried = kernel >= 0
    start[carried] = kernels.start_ns[kernel[carried]]
    end[carried] = start[carried] + kernels.duration_ns[kernel[carried]]
    is_send = operators.operation[rows] == Operation.SEND
    return Messages(
        issued_ns=operators.start_ns[rows],
        peer=operators.peer[rows],
        is_send=is_send,
        start_ns=start,
        end_ns=end,
        message_bytes=operators.message_bytes[rows],
        fused=_find_exchanges(kernel, operators.peer[rows], is_send),
        queue=np.where(carried, kernels.stream[kernel], UNKNOWN).astype(np.int32)
        if len(kernels)
        else np.full(len(rows), UNKNOWN, dtype=np.int32),
        tag=operators.tag[rows],
        timed=carried | (not carried.any()),
    )


def order_by_use(messages: Messages, step: I32) -> tuple[Messages, I32]:
    """Return gloo's messages, and their steps, as their rank used them: receives when waited for.

    They may be posted long ahead, and nothing but their end shows the wait.
    """
    used = np.where(messages.is_send, messages.issued_ns, messages.end_ns)
    order = np.argsort(used, kind="stable")
    columns = {one.name: getattr(messages, one.name)[order] for one in fields(messages)}
    return Messages(**columns | {"issued_ns": used[order]}), np.maximum.accumulate(step[order])


def _find_exchanges(kernel: I32, peer: I32, is_send: Flags) -> Flags:
    """Tell which messages share their kernel with one the other way, from or to the same peer.

    Two tensors that go the same way in one kernel are no exchange: each side ends when it is done.
    """
    keys = np.stack((kernel.astype(np.int64), peer.astype(np.int64)))
    _, group = np.unique(keys, axis=1, return_inverse=True)
    group = group.reshape(-1)
    groups = int(group.max(initial=-1)) + 1
    sends = np.bincount(group[is_send], minlength=groups)
    receives = np.bincount(group[~is_send], minlength=groups)
    both: Flags = (sends > 0) & (receives > 0)
    return both[group] & (kernel >= 0)


def find_waits(trace: RankTrace) -> I64:
    """List when the host waited for messages: its waits in the groups that they go through."""
    operators = trace.operators
    posts = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
    waits = operators.operation == Operation.WAIT
    moments: I64 = operators.start_ns[waits & np.isin(operators.group, operators.group[posts])]
    return moments


def ends_of_posts(trace: RankTrace, rows: np.ndarray[tuple[int], np.dtype[np.intp]]) -> I64:
    """Return when each receive was waited for: where its gloo annotation ends.

    A send's annotation ends when somebody asks for it, which says nothing of the message.
    """
    operators, annotations = trace.operators, trace.annotations
    end = operators.start_ns[rows] + operators.duration_ns[rows]
    lives = np.array(
        [name.startswith(("gloo:send", "gloo:recv")) for name in trace.names], dtype=bool
    )
    if not len(annotations) or not lives.any():
        return end
    alive = np.flatnonzero(lives[annotations.name] & (annotations.stream < 0))
    if not len(alive):
        return end
    after = np.searchsorted(annotations.start_ns[alive], operators.start_ns[rows])
    row = alive[np.minimum(after, len(alive) - 1)]
    inside = (after < len(alive)) & (annotations.start_ns[row] <= end)
    receives = operators.operation[rows] == Operation.RECEIVE
    waited_for = annotations.start_ns[row] + annotations.duration_ns[row]
    return np.where(inside & receives, waited_for, end)


def busy_of(work: Work) -> Intervals:
    """Return the union of all compute."""
    return _union(work, ~work.collective)


def _union(work: Work, kept: Flags) -> Intervals:
    order = np.argsort(work.start_ns[kept], kind="stable")
    start, end = merge(work.start_ns[kept][order], work.end_ns[kept][order])
    return Intervals(start_ns=start, end_ns=end)


def unissued_of(work: Work) -> Intervals:
    """Return when nothing ran because the host had not yet issued what runs next.

    Of a CPU trace that is all the time between two pieces of work: the host is the device.
    """
    order = np.argsort(work.start_ns, kind="stable")
    start, end = work.start_ns[order], work.end_ns[order]
    covered = np.maximum.accumulate(end)[:-1]
    issued = np.minimum(work.issued_ns[order][1:], start[1:])
    late = issued > covered
    return Intervals(start_ns=covered[late], end_ns=issued[late])


def occupied_of(work: Work, outside: Flags) -> Intervals:
    """Return the union of everything but what is known to lie outside of the passes."""
    return _union(work, ~outside)


def apparent_of(trace: RankTrace, work: Work) -> Intervals:
    """Return the union of everything a dashboard takes for work."""
    if not len(trace.kernels):
        return busy_of(work)
    start, end = merge(trace.kernels.start_ns, trace.kernels.start_ns + trace.kernels.duration_ns)
    return Intervals(start_ns=start, end_ns=end)
