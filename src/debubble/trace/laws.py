"""A rank's trace in → the same without what cannot be, and a doubt for whatever was left out.

Each law is one function with a drawing, and holds for any device: no number in it was measured.
What breaks one is left out, as few events as can be; all else is believed as it was written. The
last function answers a defect that profilers have: buffers that ran over, whose events are lost.

A launch queues its kernel some time between the call's start and its end, so two calls that overlap
queue in either order. Kernels of one graph share a launch, and have no order.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from debubble.errors import Code, Gap, Touch
from debubble.trace.columns import (
    I32,
    I64,
    STEP,
    UNKNOWN,
    KernelKind,
    Kernels,
    MemoryDevice,
    Operation,
    RankTrace,
)
from debubble.trace.communication import SENDS_BY_KERNELS
from debubble.units import counted, show_duration

Flags = NDArray[np.bool_]
Rows = NDArray[np.intp]

_LAUNCHES_KERNEL = re.compile(r"^(?!.*(?:Graph|Multi)).*Launch(?!HostFunc)")
_CAPTURES_GRAPH = re.compile(r"GraphInstantiate|GraphCreate|StreamEndCapture")
_WAITS_FOR_ALL = re.compile(r"DeviceSynchronize")
_NEVER = np.iinfo(np.int64).max
_AGAIN = "record the rank again; if events were lost, record fewer steps"


def hold_to_laws(trace: RankTrace) -> RankTrace:
    """Leave out what breaks a law; what was left out stands among the gaps of the trace."""
    laws: tuple[Callable[[RankTrace], tuple[RankTrace, Gap | None]], ...] = (
        end_with_the_file,
        keep_launch_order,
        keep_what_was_waited_for,
        keep_sums_of_memory,
        keep_steps_apart,
        doubt_lost_events,
    )
    gaps = list(trace.gaps)
    for law in laws:
        trace, gap = law(trace)
        gaps += [replace(gap, file=trace.file, rank=trace.rank)] if gap else []
    return replace(trace, gaps=tuple(gaps))


def end_with_the_file(trace: RankTrace) -> tuple[RankTrace, Gap | None]:
    """Leave out all from the first message on whose kernel a file lost that ends early.

    Where that is the first of all, no pass is known whole, and nothing of the device is kept.

    operators    send 0    send 1    send 2          all of them: they stand first in a file
    thread 1         ├ 0 ┤                           its calls and kernels, as far as the file goes
    thread 2     (nothing)                           the threads after it are lost from the start
                           ^ the rank is known up to here

    That the file ends early is said already. Messages of hosts alone, over gloo, name no group.
    """
    operators, kernels = trace.operators, trace.kernels
    moves = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
    moves &= operators.group >= 0
    lost = moves & (operators.kernel < 0)
    torn = any(gap.code is Code.TRUNCATED for gap in trace.gaps)
    if not torn or trace.header.backend not in SENDS_BY_KERNELS or not lost.any():
        return trace, None
    known_ns = operators.start_ns[lost].min()
    called_ns = np.append(trace.launches.start_ns, UNKNOWN)[kernels.launch]
    late = (kernels.launch >= 0) & (called_ns >= known_ns)
    late |= not (moves & (operators.start_ns < known_ns)).any()
    trace = _without_kernels(trace, late)
    kept = trace.operators.take(operators.start_ns < known_ns)
    return replace(trace, operators=kept), None


def keep_launch_order(trace: RankTrace) -> tuple[RankTrace, Gap | None]:
    """Leave out kernels that begin, or end, before one that was launched earlier on their stream.

    host       launch a   launch b   launch c
    stream 7              ├──── a ────┤ ├ c ┤ ├ b ┤     c before b: one of the two is wrong
    stream 7              ├──── a ────┤                 b may begin before a ends, if it was
                                    ├ b ┤               launched to (by us at most: PDL), but
                                                        never ends before it
    """
    kernels, launches = trace.kernels, trace.launches
    left_out = np.zeros(len(kernels), dtype=bool)
    known = np.flatnonzero(kernels.launch >= 0)
    order = known[np.lexsort((kernels.stream[known], kernels.device[known]))]
    changes = np.diff(kernels.stream[order]) | np.diff(kernels.device[order])
    rounding_ns = _rounding(trace)
    for rows in np.split(order, np.flatnonzero(changes) + 1):
        kept = rows
        for at_ns in (kernels.start_ns, kernels.start_ns + kernels.duration_ns):
            begins = launches.start_ns[kernels.launch[kept]]
            ends = begins + launches.duration_ns[kernels.launch[kept]]
            out = _out_of_order(begins, ends, at_ns[kept], rounding_ns)
            left_out[kept[out]] = True
            kept = kept[~out]
    if not left_out.any():
        return trace, None
    message = f"{_kernels(left_out)} in another order than on the host, left out"
    return _without_kernels(trace, left_out), _broken(message, trace, left_out)


def keep_what_was_waited_for(trace: RankTrace) -> tuple[RankTrace, Gap | None]:
    """Leave out kernels that end after the host had waited for them.

        host     launch a   cudaDeviceSynchronize ┤
        device                                         ├── a ──┤      it had ended before

    The device's clock may be ahead, by no more than its quickest launch took. Calls wait for the
    device of their thread, and no trace names it: those that most kernels outlast are of another.
    The last of a thread is the profiler's own.
    """
    kernels, launches = trace.kernels, trace.launches
    rows = np.flatnonzero(kernels.launch >= 0)
    if not len(rows):
        return trace, None
    calls = kernels.launch[rows]
    returned = launches.start_ns + launches.duration_ns
    end_ns = kernels.start_ns[rows] + kernels.duration_ns[rows]
    delay_ns = int((kernels.start_ns[rows] - launches.start_ns[calls]).min())
    latest_ns = 2 * _rounding(trace) + max(delay_ns, 0)
    waits = np.flatnonzero(_calls(trace, _WAITS_FOR_ALL))
    left_out = np.zeros(len(kernels), dtype=bool)
    for thread in np.unique(launches.thread[waits]).tolist():
        of_thread = waits[launches.thread[waits] == thread][:-1]
        following = np.searchsorted(launches.start_ns[of_thread], returned[calls])
        waited = np.flatnonzero(following < len(of_thread))
        late = end_ns[waited] - returned[of_thread[following[waited]]] > latest_ns
        if 2 * int(late.sum()) < len(waited):
            left_out[rows[waited[late]]] = True
    if not left_out.any():
        return trace, None
    message = f"{_kernels(left_out)} after the host had waited for it all, left out"
    return _without_kernels(trace, left_out), _broken(message, trace, left_out)


def keep_sums_of_memory(trace: RankTrace) -> tuple[RankTrace, Gap | None]:
    """Leave out totals of memory that are further from those beside them than any change reaches.

        change        +2   +3   +4   -3
        total     10  12   15  900  16         900 is no total: nothing of more than 4 came or went

    Threads that allocate at once may write theirs in another order, so that sums are not exact. A
    total of more than is reserved, or than the device has, is none either. Said where it was more
    than the peak that is left.
    """
    memory = trace.memory
    sizes = {device.index: device.memory_bytes for device in trace.header.devices}
    wrong = np.zeros(len(memory), dtype=bool)
    for device in np.unique(memory.device[memory.device_type == MemoryDevice.DEVICE]).tolist():
        rows = np.flatnonzero(
            (memory.device_type == MemoryDevice.DEVICE) & (memory.device == device)
        )
        total, reserved = memory.allocated_bytes[rows], memory.reserved_bytes[rows]
        reach = np.abs(memory.change_bytes[rows]).max()
        far = np.abs(np.diff(total)) > reach
        apart = np.append(far, True) & np.insert(far, 0, True) & (len(rows) > 1)
        most = np.where(reserved > 0, reserved, np.iinfo(np.int64).max)
        wrong[rows] = (total > np.minimum(most, sizes.get(device) or most)) | apart
    if not wrong.any() or (memory.allocated_bytes < 0).all():
        return trace, None
    kept = replace(trace, memory=memory.take(~wrong))
    on_device = memory.device_type == MemoryDevice.DEVICE
    highest = int(memory.allocated_bytes[on_device & ~wrong].max(initial=0))
    if int(memory.allocated_bytes[on_device].max()) <= highest:
        return kept, None
    message = (
        f"{counted(int(wrong.sum()), 'total')} of its device's memory left out: more than there "
        "is, or than what was allocated comes to"
    )
    return kept, Gap(
        code=Code.WRONG_MEMORY, message=message, hint="record again with profile_memory=True"
    )


def keep_steps_apart(trace: RankTrace) -> tuple[RankTrace, Gap | None]:
    """Leave out steps whose marks lie beside each other, or have one number.

    host     ├ ProfilerStep#3 ┤├ ProfilerStep#3 ┤      which of them is step 3, nothing tells
    """
    ranges = trace.annotations
    steps = {row: int(m[1]) for row, name in enumerate(trace.names) if (m := STEP.match(name))}
    marks = np.flatnonzero(np.isin(ranges.name, list(steps)) & (ranges.stream < 0))
    number = np.array([steps[name] for name in ranges.name[marks].tolist()], dtype=np.int64)
    start = ranges.start_ns[marks]
    ended = np.maximum.accumulate(start + ranges.duration_ns[marks])
    beside = np.append(start[1:] < ended[:-1] - 2 * _rounding(trace), False)
    wrong = beside | np.insert(beside[:-1], 0, False) if len(marks) else beside[:0]
    values, count = np.unique(number, return_counts=True)
    wrong |= np.isin(number, values[count > 1])
    if not wrong.any():
        return trace, None
    kept = np.ones(len(ranges), dtype=bool)
    kept[marks[wrong]] = False
    which = ", ".join(map(str, np.unique(number[wrong]).tolist()[:4]))
    message = f"step {which} left out: marks of steps lie beside each other, or have one number"
    gap = Gap(code=Code.UNEVEN_STEPS, message=message, hint="call prof.step() once a step")
    return replace(trace, annotations=ranges.take(kept)), gap


def doubt_lost_events(trace: RankTrace) -> tuple[RankTrace, Gap | None]:
    """Say how long what a full buffer lost may have run: launches and kernels without each other.

        host       launch a  launch b  launch c          b ran between a and c, for as long as that
        device     ├─ a ─┤              ├─ c ─┤          leaves: its device was busier by no more

    CUPTI drops events of full buffers, and Kineto writes what is left. Kernels before the first
    launch were launched before the capture, and calls that capture a graph launch nothing.
    """
    kernels = trace.kernels
    rows = np.flatnonzero(kernels.launch >= 0)
    if not len(rows):
        return trace, None
    streams = kernels.device.astype(np.int64) * (1 << 32) + kernels.stream
    called, first = np.unique(streams[rows], return_index=True)  # rows are sorted by start
    place = np.minimum(np.searchsorted(called, streams), len(called) - 1)
    began = np.where(called[place] == streams, kernels.start_ns[rows[first[place]]], _NEVER)
    orphans = (kernels.launch < 0) & (kernels.start_ns > began)
    orphans &= np.isin(kernels.name, kernels.name[rows])
    lost = _launches_without_kernel(trace)
    if not len(lost) and not orphans.any():
        return trace, None
    parts = (
        (len(lost), "kernel", "launched and not recorded"),
        (int(orphans.sum()), "kernel", "without a launch"),
    )
    moves_ns = int(kernels.duration_ns[orphans].sum()) + _room_ns(trace.kernels, lost)
    message = (
        " and ".join(f"{counted(count, noun)} {what}" for count, noun, what in parts if count)
        + f", as where a profiler's buffer ran over: {show_duration(moves_ns)} of work at most"
    )
    gap = Gap(code=Code.LOST_OPERATORS, message=message, hint=_AGAIN, moves_ns=moves_ns)
    return trace, gap


# What several laws need.


def _rounding(trace: RankTrace) -> int:
    """Return what all times of a file are whole numbers of, if that is more than 1 ns; else 1."""
    times = []
    for table in (trace.kernels, trace.launches):
        begin = table.start_ns[:1]
        times += [table.start_ns - begin if len(begin) else table.start_ns, table.duration_ns]
    return max((int(np.gcd.reduce(column)) for column in times if len(column)), default=1) or 1


def _out_of_order(begins: I64, ends: I64, at_ns: I64, rounding_ns: int) -> Flags:
    """Tell the fewest of some kernels without which all others keep the order of their launches."""
    order = np.lexsort((at_ns, begins))
    begins, ends, at_ns = begins[order], ends[order], at_ns[order]
    out = np.zeros(len(order), dtype=bool)
    if _against(begins, ends, at_ns, ~out, rounding_ns).any():
        kept = _longest_rise(at_ns.tolist())
        out[:] = True
        out[kept] = False
        out &= _against(begins, ends, at_ns, ~out, rounding_ns)
    result = np.zeros(len(order), dtype=bool)
    result[order[out]] = True
    return result


def _against(begins: I64, ends: I64, at_ns: I64, kept: Flags, rounding_ns: int) -> Flags:
    """Tell which kernels contradict one that is kept: launched earlier and later, or the reverse.

    Sorted by the launches' begins.
    """
    order = np.argsort(at_ns[kept], kind="stable")
    times = at_ns[kept][order]
    latest = np.maximum.accumulate(begins[kept][order])
    earliest = np.minimum.accumulate(ends[kept][order][::-1])[::-1]
    before = np.searchsorted(times, at_ns - 2 * rounding_ns) - 1
    after = np.searchsorted(times, at_ns + 2 * rounding_ns, side="right")
    overtaken = (before >= 0) & (latest[before] > ends)
    overtakes = (after < len(times)) & (earliest[np.minimum(after, len(times) - 1)] < begins)
    result: Flags = overtaken | overtakes
    return result


def _longest_rise(values: Sequence[int]) -> list[int]:
    """Return the places of a longest run of values that never fall."""
    tops: list[int] = []
    rows: list[int] = []
    previous = [UNKNOWN] * len(values)
    for row, value in enumerate(values):
        place = bisect_right(tops, value)
        previous[row] = rows[place - 1] if place else UNKNOWN
        tops[place : place + 1] = [value]
        rows[place : place + 1] = [row]
    row, rise = rows[-1] if rows else UNKNOWN, list[int]()
    while row >= 0:
        rise.append(row)
        row = previous[row]
    return rise[::-1]


def _launches_without_kernel(trace: RankTrace) -> Rows:
    """Return the calls whose kernel is missing, but for the last ones: theirs may have run later.

    Where a runtime launches by calls of its driver, one of the two has the kernel.
    """
    kernels, launches = trace.kernels, trace.launches
    joined = np.zeros(len(launches), dtype=bool)
    joined[kernels.launch[kernels.launch >= 0]] = True
    found = np.flatnonzero(joined)
    missing: Rows = np.flatnonzero(_calls(trace, _LAUNCHES_KERNEL) & ~joined)
    graphs = np.flatnonzero(_calls(trace, _CAPTURES_GRAPH))
    missing = missing[(missing > max(found[0], *graphs[-1:], UNKNOWN)) & (missing < found[-1])]
    for thread in np.unique(launches.thread[missing]).tolist():
        mine = found[launches.thread[found] == thread]
        begins, ends = launches.start_ns[mine], launches.start_ns[mine] + launches.duration_ns[mine]
        start = launches.start_ns[missing]
        end = start + launches.duration_ns[missing]
        beside = np.searchsorted(begins, end, side="right") > np.searchsorted(ends, start)
        beside |= np.isin(np.arange(len(end)), 1 + np.flatnonzero(start[1:] < end[:-1]))
        missing = missing[~(beside & (launches.thread[missing] == thread))]
    return missing


def _room_ns(kernels: Kernels, lost: NDArray[np.signedinteger]) -> int:
    """Return for how long the kernels of some launches can have run between those beside them."""
    rows = np.flatnonzero(kernels.launch >= 0)
    rows = rows[np.argsort(kernels.launch[rows], kind="stable")]
    after = np.unique(np.searchsorted(kernels.launch[rows], lost))
    after = after[(after > 0) & (after < len(rows))]
    before, following = rows[after - 1], rows[after]
    ended = kernels.start_ns[before] + kernels.duration_ns[before]
    return int(np.maximum(kernels.start_ns[following] - ended, 0).sum())


def _broken(message: str, trace: RankTrace, left_out: Flags) -> Gap:
    """Say what was left out, and how long it can have run beside what was kept."""
    kernels = trace.kernels
    calls = kernels.launch[left_out]
    kept = kernels.take(~left_out)
    moves_ns = _room_ns(kept, calls[~np.isin(calls, kept.launch)])
    talks = (kernels.kind[left_out] >= KernelKind.PEER).any()
    return Gap(
        code=Code.IMPOSSIBLE,
        message=f"{message}: {show_duration(moves_ns)} of work at most",
        hint=_AGAIN,
        moves_ns=moves_ns,
        only=frozenset({Touch.TIMES, *((Touch.MESSAGES,) if talks else ())}),
    )


def _kernels(left_out: Flags) -> str:
    return counted(int(left_out.sum()), "kernel")


def _calls(trace: RankTrace, pattern: re.Pattern[str]) -> Flags:
    """Tell which calls of the host have a name like that."""
    named = np.array([bool(pattern.search(name)) for name in trace.names] or [False], dtype=bool)
    return named[trace.launches.name]


def _without_kernels(trace: RankTrace, left_out: Flags) -> RankTrace:
    """Return the trace without some kernels and their launches; what they carried out has none."""
    kernels, launches, operators = trace.kernels.take(~left_out), trace.launches, trace.operators
    gone = np.setdiff1d(trace.kernels.launch[left_out], kernels.launch)
    called = ~np.isin(np.arange(len(launches)), gone)
    kernel, call = _renumbered(~left_out), _renumbered(called)
    return replace(
        trace,
        kernels=replace(kernels, launch=call[kernels.launch]),
        launches=launches.take(called),
        operators=replace(operators, kernel=kernel[operators.kernel]),
    )


def _renumbered(kept: Flags) -> I32:
    """Return the new number of each row that is kept; -1 of others, and of none."""
    return np.append(np.where(kept, np.cumsum(kept) - 1, UNKNOWN), UNKNOWN).astype(np.int32)
