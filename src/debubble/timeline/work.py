"""A rank's kernels and operators in → what its host issued, in order.

Work and messages are sorted by the moment the host issued them: that order is the schedule's, and
all that names passes goes by it. Waits of the host and launches that were held up tell the rest.

What passes do not wait for is side work: no piece of a pass, of a window or of a bubble. Autograd
runs what follows a forward pass backwards on the streams of that pass, from threads of its own:

    stream 7    kernels of the main thread, and of autograd's      passes run here
    stream 20   kernels of autograd's threads alone                and here (sums of gradients)
    stream 99   copies of the main thread                          side work: a batch fetched ahead
    stream 98   kernels of a thread that launches none on 7        side work: a checkpoint
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from debubble.timeline.model import (
    AT_ONCE_NS,
    I32,
    I64,
    NEVER_WAITED_NS,
    UNKNOWN,
    Columns,
    Flags,
    Intervals,
    Synchronisations,
    union_of,
)
from debubble.trace.columns import (
    Annotations,
    KernelKind,
    Kernels,
    Launches,
    Operation,
    RankTrace,
    merge,
)

BEFORE_CAPTURE = np.int64(np.iinfo(np.int64).min)
# On a CPU trace autograd runs on the thread that called it; its operators say so.
_BACKWARD_OPERATOR = "autograd::engine::evaluate_function"
_COMMUNICATION_OPERATOR = "c10d::"
_TAKES_MEMORY = "aten::empty"
_CARRIED_OUT = "gloo:"
_UPLOAD = "Memcpy HtoD"
_RING_OPERATORS = ("c10d::send", "c10d::recv")
# Calls of CUDA and HIP that keep the host until the device, or one of its streams, is done.
_SYNCHRONISES = re.compile(r"(?:Device|Stream|Event)Synchronize")
_WHOLE_DEVICE = re.compile(r"DeviceSynchronize")
# A launch takes 5 to 30 us. Where a stage of five layers ran a hundred milliseconds behind its host
# (torchtitan, recorded), launches took 300 to 1,400 us, the device's pace.
_LONG_LAUNCH_NS = 200_000
# A message of so few integers holds sizes: no tensor has more dimensions, and tokens are more.
_MOST_SIZES = 8
_INTEGERS = frozenset({"long", "int", "short", "int64", "int32", "int16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Columns):
    """Compute and collectives, sorted by the moment the host issued them."""

    issued_ns: I64
    start_ns: I64
    end_ns: I64
    name: I32
    """Of the kernel or operator, as the trace numbers names."""
    backward: Flags
    """Issued by autograd."""
    collective: Flags
    group: I32
    """The process group of a collective, as the trace numbers them; -1 where nothing tells."""
    upload: Flags
    """Copied from the host: a batch, or what it is made of."""
    step: I32
    """In which the host issued it; -1 in none."""
    kind: I32
    """Of the pass that it is of, once that is told; -1 of none. So are stage and microbatch."""
    stage: I32
    microbatch: I32

    @property
    def in_pass(self) -> Flags:
        """Tell which is of a pass."""
        in_pass: Flags = self.kind >= 0
        return in_pass

    def union(self, kept: Flags) -> Intervals:
        """Return when any of some pieces ran."""
        return union_of(self.start_ns[kept], self.end_ns[kept])


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages(Columns):
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
    waited_ns: I64
    """When the host let what it issues from then on wait for it; `NEVER_WAITED_NS` if not known."""
    step: I32
    """In which the host issued it; -1 in none."""

    def rows(self, peer: int, *, is_send: bool, step: int | None = None) -> I64:
        """Return the rows that go to a peer, or come from it; of one step, or of all."""
        mine = (self.peer == peer) & (self.is_send == is_send)
        return np.flatnonzero(mine if step is None else mine & (self.step == step))


def of_no_pass(count: int) -> dict[str, I32]:
    """Return the columns of work whose step and pass are still to be told."""
    return {
        name: np.full(count, UNKNOWN, dtype=np.int32)
        for name in ("step", "kind", "stage", "microbatch")
    }


def find_work(trace: RankTrace) -> Work:
    """List everything that computes: kernels by their launches, or operators of the CPU."""
    if not len(trace.kernels):
        return _cpu_work(trace)
    kernels, launches, operators = trace.kernels, trace.launches, trace.operators
    kept = ~kernels.communication | (kernels.kind == KernelKind.COLLECTIVE)
    kept &= ~find_side_work(trace)
    launch = kernels.launch[kept]
    known = launch >= 0
    row = np.where(known, launch, 0)
    start = kernels.start_ns[kept]
    # Without a launch in the trace it was issued before the capture began, and is of no step in it.
    issued = np.where(known, launches.start_ns[row], BEFORE_CAPTURE) if len(launches) else start
    caller = np.where(known, launches.thread[row], UNKNOWN) if len(launches) else launch
    group = np.full(len(kernels), UNKNOWN, dtype=np.int32)
    # Blocks passed around a ring go between ranks of one stage, whatever else their group holds.
    carried = (operators.kernel >= 0) & ~_names_of(trace, *_RING_OPERATORS)
    group[operators.kernel[carried]] = operators.group[carried]
    order = np.lexsort((start, issued))
    main = _main_thread(trace)
    backward = (caller != main) & (caller >= 0)
    threads = _pass_threads(trace, main)
    if threads:  # what another thread puts between the kernels of a pass is of that pass
        told = np.isin(caller, threads)[order]
        last = np.maximum.accumulate(np.where(told, np.arange(len(order)), 0))
        backward[order] = backward[order][last]
    return Work(
        issued_ns=issued[order],
        start_ns=start[order],
        end_ns=(start + kernels.duration_ns[kept])[order],
        name=kernels.name[kept][order],
        backward=backward[order],
        collective=kernels.communication[kept][order],
        group=group[kept][order],
        upload=_names_that(trace, _UPLOAD)[kernels.name[kept]][order],
        **of_no_pass(len(order)),
    )


def find_side_work(trace: RankTrace) -> Flags:
    """Tell which kernels and copies run on streams that no pass computes on."""
    kernels, caller = trace.kernels, _callers(trace)
    threads = _pass_threads(trace, _main_thread(trace))
    computes = kernels.kind == KernelKind.COMPUTE
    computes &= (np.isin(caller, threads) | (caller < 0)) if threads else True
    streams = np.unique(_streams(trace)[computes])
    side: Flags = ~kernels.communication & ~np.isin(_streams(trace), streams)
    return side if computes.any() else np.zeros_like(side)


def _pass_threads(trace: RankTrace, main: int) -> list[int]:
    """Return the thread of the schedule, and those that compute on a stream that it computes on.

    None where the schedule's thread computes nothing.
    """
    computes, caller = trace.kernels.kind == KernelKind.COMPUTE, _callers(trace)
    streams = np.unique(_streams(trace)[computes & (caller == main)])
    beside = computes & np.isin(_streams(trace), streams) & (caller >= 0)
    return np.unique(caller[beside]).tolist() if main >= 0 else []


def _callers(trace: RankTrace) -> I32:
    """Return the thread that launched each kernel; -1 where nothing tells."""
    launch = trace.kernels.launch
    if not len(trace.launches):
        return np.full(len(launch), UNKNOWN, dtype=np.int32)
    return np.where(launch >= 0, trace.launches.thread[launch], UNKNOWN).astype(np.int32)


def _streams(trace: RankTrace) -> I64:
    """Return a number for each kernel's stream, whichever its device is."""
    return trace.kernels.device.astype(np.int64) * (1 << 32) + trace.kernels.stream


def _cpu_work(trace: RankTrace) -> Work:
    """List operators that compute, and collectives from when they were asked for to their end.

    Sends and receives around a ring are whole as they are.
    """
    computes, operators = trace.cpu_operators, trace.operators
    kept = np.zeros(0, dtype=bool)
    if len(computes):
        # Memory for the next message is taken before it is asked for: no work of a pass.
        kept = ~_names_that(trace, _COMMUNICATION_OPERATOR, _TAKES_MEMORY)[computes.name]
    around = (operators.operation == Operation.COLLECTIVE) & _names_of(trace, *_RING_OPERATORS)
    carried, asked = find_carried_out(trace)
    ends = operators.start_ns + operators.duration_ns
    backward = _names_that(trace, _BACKWARD_OPERATOR)[computes.name[kept]]
    count, others = len(backward), int(carried.sum() + around.sum())
    start = np.concatenate((computes.start_ns[kept], asked, operators.start_ns[around]))
    end = (computes.start_ns + computes.duration_ns)[kept]
    name = (computes.name[kept], operators.name[carried], operators.name[around])
    none = np.full(count, UNKNOWN, dtype=np.int32)
    order = np.argsort(start, kind="stable")
    return Work(
        issued_ns=start[order],
        start_ns=start[order],
        end_ns=np.concatenate((end, ends[carried], ends[around]))[order],
        name=np.concatenate(name)[order],
        backward=np.concatenate((backward, np.zeros(others, dtype=bool)))[order],
        collective=np.repeat([False, True], [count, others])[order],
        group=np.concatenate(
            (none, operators.group[carried], np.full(int(around.sum()), UNKNOWN, dtype=np.int32))
        )[order],
        upload=np.zeros(len(order), dtype=bool),
        **of_no_pass(len(order)),
    )


def _main_thread(trace: RankTrace) -> int:
    """Return the thread that runs the schedule: it posts the messages, or marks the steps."""
    operators, annotations = trace.operators, trace.annotations
    posts = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
    threads = operators.thread[posts & (operators.thread >= 0)].tolist()
    marks = _names_that(trace, "ProfilerStep#")
    if not threads and len(marks):
        threads = annotations.thread[host_ranges(trace, marks)].tolist()
    return int(Counter(threads).most_common(1)[0][0]) if threads else UNKNOWN


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


def find_messages(trace: RankTrace) -> Messages:
    """List sends and receives with the time they took on the device, or on the wire of gloo."""
    operators, kernels = trace.operators, trace.kernels
    posts = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
    if (posts & (operators.peer >= 0) & (operators.kernel >= 0)).any():
        posts &= (operators.peer >= 0) | (operators.kernel >= 0)  # the others go the host's way
    rows = np.flatnonzero(posts)
    kernel = operators.kernel[rows]
    start, end = operators.start_ns[rows].copy(), ends_of_posts(trace, rows)
    carried = kernel >= 0
    start[carried] = kernels.start_ns[kernel[carried]]
    end[carried] = start[carried] + kernels.duration_ns[kernel[carried]]
    is_send = operators.operation[rows] == Operation.SEND
    queue = np.full(len(rows), UNKNOWN, dtype=np.int32)
    queue[carried] = kernels.stream[kernel[carried]]
    messages = Messages(
        issued_ns=operators.start_ns[rows],
        peer=operators.peer[rows],
        is_send=is_send,
        start_ns=start,
        end_ns=end,
        message_bytes=operators.message_bytes[rows],
        fused=_find_exchanges(kernel, operators.peer[rows], is_send),
        queue=queue,
        tag=operators.tag[rows],
        timed=carried | (not carried.any()),
        waited_ns=np.full(len(rows), NEVER_WAITED_NS),
        step=np.full(len(rows), UNKNOWN, dtype=np.int32),
    )
    sizes, tensors = _sizes_ahead(trace)
    first, of = np.searchsorted(rows, sizes), np.searchsorted(rows, tensors)
    messages.issued_ns[of], messages.start_ns[of] = messages.issued_ns[first], start[first]
    kept = np.ones(len(rows), dtype=bool)
    kept[first] = False
    order = np.argsort(messages.issued_ns, kind="stable")
    return messages.where(order[kept[order]])


def _sizes_ahead(trace: RankTrace) -> tuple[I64, I64]:
    """Return operators that send or receive the sizes of a tensor, and those of the tensor itself.

    Where microbatches differ in length, Megatron's ranks tell each other how much will come, and
    wait there. Both are one message, from the first begin to the last end:

        rank 1    receive 3 sizes ………| host reads them |receive 512 x 1 x 4096|
    """
    operators = trace.operators
    integers = np.array([name.lower() in _INTEGERS for name in trace.names] or [False])
    few = (operators.elements > 0) & (operators.elements <= _MOST_SIZES) & (operators.dtype >= 0)
    sizes = few & integers[operators.dtype]
    found = [np.zeros((2, 0), dtype=np.int64)]
    for operation in (Operation.SEND, Operation.RECEIVE) if sizes.any() else ():
        for peer in np.unique(operators.peer[operators.operation == operation]).tolist():
            rows = np.flatnonzero((operators.operation == operation) & (operators.peer == peer))
            ahead = np.flatnonzero(sizes[rows][:-1] & ~sizes[rows][1:])
            found.append(np.stack((rows[ahead], rows[ahead + 1])))
    first, second = np.concatenate(found, axis=1)
    return first, second


def without_reading(work: Work, trace: RankTrace) -> Work:
    """Leave out what a host launches between the sizes of a tensor and the tensor: to read them."""
    starts = trace.operators.start_ns
    sizes, tensors = _sizes_ahead(trace)
    reading = union_of(starts[sizes], starts[tensors])
    row = np.searchsorted(reading.start_ns, work.issued_ns, side="right") - 1
    return work.where((row < 0) | (work.issued_ns >= np.append(reading.end_ns, 0)[row]))


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


def ends_of_posts(trace: RankTrace, rows: np.ndarray[tuple[int], np.dtype[np.intp]]) -> I64:
    """Return when each receive was waited for: where its gloo annotation ends.

    A send's annotation ends when somebody asks for it, which says nothing of the message.
    """
    operators, annotations = trace.operators, trace.annotations
    end = operators.start_ns[rows] + operators.duration_ns[rows]
    lives = _names_that(trace, "gloo:send", "gloo:recv")
    if not len(annotations) or not lives.any():
        return end
    alive = host_ranges(trace, lives)
    if not len(alive):
        return end
    after = np.searchsorted(annotations.start_ns[alive], operators.start_ns[rows])
    row = alive[np.minimum(after, len(alive) - 1)]
    inside = (after < len(alive)) & (annotations.start_ns[row] <= end)
    receives = operators.operation[rows] == Operation.RECEIVE
    waited_for = annotations.start_ns[row] + annotations.duration_ns[row]
    return np.where(inside & receives, waited_for, end)


def find_waits(trace: RankTrace) -> I64:
    """List when the host waited for messages: its waits in the groups that they go through."""
    operators = trace.operators
    posts = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
    waits = operators.operation == Operation.WAIT
    moments: I64 = operators.start_ns[waits & np.isin(operators.group, operators.group[posts])]
    return moments


def tell_waits(messages: Messages, work: Work, waits_ns: I64) -> Messages:
    """Say which message each wait of the host was for.

    A wait names no message; but nothing that is issued after it starts before its message is there.
    Of those that fit, the work that follows began with the end of one; then what is received is
    waited for first, then what was posted first. Messages of one kernel are waited for together.
    """
    waited = messages.waited_ns.copy()
    following = np.searchsorted(work.issued_ns, waits_ns, side="right")
    open_rows: list[int] = []
    posted = 0
    for moment, next_work in zip(waits_ns.tolist(), following.tolist(), strict=True):
        while posted < len(messages) and messages.issued_ns[posted] < moment:
            open_rows.append(posted)
            posted += 1
        begins = int(work.start_ns[next_work]) if next_work < len(work) else None
        fitting = [row for row in open_rows if begins is None or messages.end_ns[row] <= begins]
        if not fitting:
            continue
        chosen = min(
            fitting,
            key=lambda row: (
                begins is None or begins - int(messages.end_ns[row]) > AT_ONCE_NS,
                bool(messages.is_send[row]),
                row,
            ),
        )
        together = [
            row
            for row in open_rows
            if (messages.start_ns[row], messages.end_ns[row], messages.queue[row])
            == (messages.start_ns[chosen], messages.end_ns[chosen], messages.queue[chosen])
        ]
        waited[together] = moment
        open_rows = [row for row in open_rows if row not in together]
    return replace(messages, waited_ns=waited)


def order_by_use(messages: Messages) -> Messages:
    """Return gloo's messages as their rank used them: receives when waited for.

    They may be posted long ahead, and nothing but their end shows the wait.
    """
    used = np.where(messages.is_send, messages.issued_ns, messages.end_ns)
    order = np.argsort(used, kind="stable")
    step = np.maximum.accumulate(messages.step[order])
    return replace(messages.where(order), issued_ns=used[order], step=step)


def find_synchronisations(trace: RankTrace) -> Synchronisations:
    """List the calls that kept the host until work of its device was done."""
    launches = trace.launches
    rows = np.flatnonzero(_keeps_host(trace))
    start = launches.start_ns[rows]
    return Synchronisations(
        start_ns=start,
        end_ns=start + launches.duration_ns[rows],
        whole=names_like(trace, _WHOLE_DEVICE)[launches.name[rows]],
    )


def _keeps_host(trace: RankTrace) -> Flags:
    """Tell which calls return when the device is done: those that wait, and copies that block.

    A copy to pageable memory is called asynchronous, and returns when it has ended: a host that
    reads how many tokens went to each expert stands there as in a synchronisation.
    """
    launches, kernels = trace.launches, trace.kernels
    keeps: Flags = names_like(trace, _SYNCHRONISES)[launches.name]
    copies = np.flatnonzero((kernels.kind == KernelKind.COPY) & (kernels.launch >= 0))
    call = kernels.launch[copies]
    returned_ns = launches.start_ns[call] + launches.duration_ns[call]
    ended_ns = kernels.start_ns[copies] + kernels.duration_ns[copies]
    keeps[call[returned_ns >= ended_ns]] = True
    return keeps


def held_up_of(trace: RankTrace) -> Intervals:
    """Return when launches waited for room in the device's queue, which holds about a thousand."""
    launches = trace.launches
    long = launches.duration_ns > _LONG_LAUNCH_NS
    return spans_of(launches, long & ~_keeps_host(trace))


def synchronised_of(work: Work, calls: Synchronisations) -> Intervals:
    """Return when a host was in such a call, or had yet to issue the first thing after it."""
    row = np.searchsorted(work.issued_ns, calls.end_ns)
    issued = np.append(work.issued_ns, calls.end_ns.max(initial=0))[row]
    start, end = merge(calls.start_ns, np.maximum(issued, calls.end_ns))
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


def apparent_of(trace: RankTrace, work: Work) -> Intervals:
    """Return the union of everything a dashboard takes for work."""
    if not len(trace.kernels):
        return work.union(~work.collective)
    return spans_of(trace.kernels, np.ones(len(trace.kernels), dtype=bool))


def number_passes(work: Work) -> tuple[I64, I64]:
    """Return the passes as rows of (step, stage, kind, microbatch), and each piece's row.

    The four numbers are packed into one: sorting plain integers is ten times quicker than rows.
    """
    numbers = (work.step, work.stage, work.kind, work.microbatch)
    columns = [column.astype(np.int64) for column in numbers]
    lowest = [int(column.min(initial=0)) for column in columns]
    widths = [
        int(column.max(initial=0)) - low + 1 for column, low in zip(columns, lowest, strict=True)
    ]
    key = np.zeros(len(work), dtype=np.int64)
    for column, low, width in zip(columns, lowest, widths, strict=True):
        key = key * width + (column - low)
    packed, group = np.unique(key, return_inverse=True)
    rows = np.empty((4, len(packed)), dtype=np.int64)
    for row in (3, 2, 1, 0):
        packed, rest = np.divmod(packed, widths[row])
        rows[row] = rest + lowest[row]
    return rows, group.reshape(-1)


def host_ranges(trace: RankTrace, named: Flags) -> I64:
    """Return the rows of the host's annotations that have one of some names."""
    annotations = trace.annotations
    return np.flatnonzero(named[annotations.name] & (annotations.stream < 0))


def spans_of(table: Annotations | Kernels | Launches, rows: Flags | I64) -> Intervals:
    """Return when any of some rows of a table ran."""
    start = table.start_ns[rows]
    return union_of(start, start + table.duration_ns[rows])


def names_like(trace: RankTrace, pattern: re.Pattern[str]) -> Flags:
    """Tell which names of a trace a pattern is found in; one at least, to be looked up in."""
    return np.array([bool(pattern.search(name)) for name in trace.names] or [False], dtype=bool)


def _names_of(trace: RankTrace, *begins: str) -> Flags:
    """Tell which communication operators have a name that begins so."""
    names = _names_that(trace, *begins)
    return names[trace.operators.name] if len(names) else np.zeros(0, dtype=bool)


def _names_that(trace: RankTrace, *begins: str) -> Flags:
    return np.array([name.startswith(begins) for name in trace.names], dtype=bool)
