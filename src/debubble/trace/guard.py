"""A rank's trace in → what in it cannot be: no figure is made of times that no device can show.

Four rules are physics. A stream runs what was launched on it, in that order, one after the other:

    host      launch a   launch b   launch c ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ cudaDeviceSynchronize ┤
    stream               ├─ a ─┤├──── b ────┤      ├ c ┤
                         a is not before its launch; b is not before a, nor beside it; none is
                         missing between two that are there; all have ended where the host waited

A capture that begins late lacks launches of its first kernels, and one that ends early lacks
kernels of its last launches; kernels of one CUDA graph share a launch, and run beside each other.
The rest is plausibility: a kernel whose successor is queued already is followed by it at once,
calls take microseconds, totals of memory are the sums of their changes.

On the 146 GPU ranks of our recordings and of those that others published, nothing of this is ever
broken, but for neighbours that overlap by 13 us at most (programmatic dependent launches).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from debubble.errors import Code, Gap
from debubble.trace.columns import (
    I64,
    STEP,
    UNKNOWN,
    KernelKind,
    Kernels,
    Memory,
    Operation,
    RankTrace,
    build,
    doubt_memory,
)
from debubble.trace.communication import impossible_groups, impossible_messages
from debubble.units import NS_PER_US, counted, show_duration

Flags = NDArray[np.bool_]
Positions = NDArray[np.intp]

# Stamps of host and device are laid together by the profiler; no kernel that we have seen begins
# less than 2 us after its launch. What is off by less moves no figure.
_STAMPS_NS = 200_000
# A kernel may begin before the one ahead has ended, if it was launched to do so: by 13 us at most
# in what we have seen. It never ends before it, and the one after it does not begin.
_OVERLAP_NS = 50_000
_LONGEST_OVERLAP_NS = 1_000_000
# A kernel that lasts 20 us and more, and whose successor on the stream has been queued since before
# it began, is followed at once: a quarter of such gaps are below 4 % of it in each of our
# recordings, and below 8 % in one that others thinned out.
_LASTS_NS = 20_000
_FEWEST_PAIRS = 40
_MOST_IDLE = 0.2
# A device takes as long from a kernel to the next that is queued after long ones as after short
# ones: 1 to 6 us for a quarter of them, on all devices seen. Durations that were made shorter or
# longer leave more or less after long ones alone: 2 % of what kernels of half a ms take are told.
_LONG_NS, _SHORT_NS, _FEWEST_LONG = 200_000, (3_000, 60_000), 20
_NEXT_AFTER_NS, _REACHES_INTO_NS = 10_000, 1_000
# For a half it is 10 us at most, and 70 us where others left kernels out on purpose.
_MISSING_BETWEEN_NS = 100_000
# Where a device has nothing else to run, it goes on to what is queued at once, messages as well:
# over 20 us later for 0.8 % of kernels at most, over 50 us for one, and 71 us at the latest, on
# each of 229 ranks. Older profilers, which write whole microseconds, leave some work out. A quarter
# of kernels comes over 7 us later there; where eight ranks share a device 12 us, and all is as much
# later.
_USUAL_IDLE_NS = 7_000
_IDLE_NS, _OFTEN_IDLE, _LAUNCHES = 20_000, 0.02, 500
_LONG_IDLE_NS, _FEW_IDLE, _LONGEST_IDLE_NS, _IDLES = 50_000, 2, 200_000, 0.001
# Compute kernels of each name come as often in one step as in the next, exactly so on 102 of 103
# recorded ranks. Losses of fewer move no figure.
_KERNELS_DIFFER = 0.01
_ENOUGH_ALIKE, _LONG_ALIKE_NS = 16, 10_000  # of one length: on none of 451 recorded ranks
# A launch takes the host 3 to 17 us in the middle; slow hosts and debuggers are allowed for.
_LAUNCH_TAKES_NS = (200, 2_000_000)
# No kernel that we have seen is shorter than 639 ns, on six kinds of device, and none that
# communicates than three microseconds. Devices to come are allowed for, but not that one kernel
# of a name is below all that was seen and a tenth of its like.
_SHORTEST_KERNEL_NS, _SHORTEST_TALK_NS = 100, 1_500
_SHORTEST_SEEN_NS, _TEN_TIMES = 600, 10
# Bytes or bandwidth of a copy may be damaged themselves; times are where many are contradicted.
_CONTRADICTED, _ROUNDING_NS = 0.1, 2
# A thread that launches kernels launches hundreds; those that launch two or three launch their own.
_FEW, _OFTEN = 3, 10
# Kernels of 336 recorded ranks run on seven streams at the most. Small captures are allowed for.
_MANY_STREAMS, _KERNELS_A_STREAM = 32, 2
# Ranges that began before the capture did are written as well: by half a minute in one of others.
_FAR_NS = 600_000_000_000

# Older traces of a CPU are written in whole microseconds.
_ROUNDED_NS = 2_000
_FEWEST_STEPS = 2
# Ranges of messages under way, which end after the call that began them.
_IN_BACKGROUND = re.compile(r"(?:nccl|gloo|mpi|ucc|xccl|hccl):")
_LAUNCHES_ONE = re.compile(r"^(?!.*(?:Graph|Multi)).*Launch(?!HostFunc)")
_DRIVER_OF_INTEL = re.compile(r"^ze[A-Z]")
_CAPTURES_GRAPH = re.compile(r"GraphInstantiate|GraphCreate|StreamEndCapture")
_WAITS_FOR_ALL = re.compile(r"(?:Device|Ctx)Synchronize")


def guard(trace: RankTrace) -> tuple[RankTrace | None, tuple[Gap, ...]]:
    """Return the trace, or what of it can be believed, and why the rest cannot.

    None: the rank is left out. Its file is named, and what is wrong with it.
    """
    wrong = tuple(_impossible(trace) if len(trace.kernels) else _impossible_on_host(trace))
    if wrong:
        message = f"left out, because it cannot be so: {'; '.join(wrong)}"
        return None, (
            *trace.gaps,
            Gap(
                code=Code.IMPOSSIBLE,
                message=message,
                hint="record the rank again; if events were lost, record fewer steps",
                file=trace.file,
                rank=trace.rank,
            ),
        )
    strange = _strange_threads(trace) if len(trace.launches) else 0
    uneven, memory = _uneven_steps(trace), doubt_memory(trace)
    streams = len(np.unique(trace.kernels.stream))
    scattered = max(_MANY_STREAMS, len(trace.kernels) // _KERNELS_A_STREAM) < streams
    doubts = (
        (
            Code.WRONG_FIELDS,
            f"{counted(strange, 'kernel')} launched by threads that do nothing else, though others "
            "launch all of their name: passes may be told wrong"
            if strange
            else "",
            "record the rank again",
        ),
        (
            Code.WRONG_FIELDS,
            f"{counted(len(trace.kernels), 'kernel')} on {streams} streams: none tells an order"
            if scattered
            else "",
            "record the rank again",
        ),
        (Code.BAD_TIMES, _of_one_length(trace), "record the rank again"),
        (
            Code.LOST_OPERATORS,
            f"{uneven}: some may have been lost" if uneven else "",
            "record the rank again; if the job does differ from step to step, all is well",
        ),
        (
            Code.IMPOSSIBLE,
            _idle_though_queued(trace) if len(trace.launches) and len(trace.kernels) else "",
            "record the rank again, on a device that nobody else computes on",
        ),
        (
            Code.WRONG_MEMORY,
            f"its memory is left out: {memory}" if memory else "",
            "record the rank again with profile_memory=True",
        ),
    )
    gaps = tuple(
        Gap(code=code, message=message, hint=hint, file=trace.file, rank=trace.rank)
        for code, message, hint in doubts
        if message
    )
    return replace(trace, memory=build(Memory, 0)) if memory else trace, gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Streams:
    """Kernels as each stream ran them: rows, and which of them follow one on the same stream."""

    rows: Positions
    follows: Flags

    def pairs(self, apart: int = 1) -> tuple[Positions, Positions]:
        """Return the rows of kernels that ran so many after each other on one stream."""
        together = self.follows[apart - 1 :].copy()
        for step in range(1, apart):
            together &= self.follows[apart - 1 - step : len(self.follows) - step]
        before, after = self.rows[:-apart], self.rows[apart:]
        return before[together], after[together]


def _in_streams(kernels: Kernels) -> _Streams:
    rows = np.lexsort((kernels.stream, kernels.device))  # stable, and kernels are sorted by start
    stream, device = kernels.stream[rows], kernels.device[rows]
    follows = (stream[1:] == stream[:-1]) & (device[1:] == device[:-1])
    return _Streams(rows=rows, follows=follows)


def _impossible(trace: RankTrace) -> Iterator[str]:
    """Yield what no device can have done, in words."""
    kernels, launches = trace.kernels, trace.launches
    streams = _in_streams(kernels)
    yield from impossible_groups(trace)
    if len(launches):
        yield from _of_launches(trace, streams)
        yield from _of_waits(trace)
        yield from _of_queues(trace, streams)
    yield from _of_streams(trace, streams)
    yield from _of_units(trace)
    yield from impossible_messages(trace)
    yield from _of_ranges(trace)


def _impossible_on_host(trace: RankTrace) -> Iterator[str]:
    """Yield what no thread can have done: operators and ranges nest, or follow each other.

    Neither is broken by a nanosecond on the 12 ranks of CPU traces that we have seen.
    """
    yield from impossible_groups(trace)
    operators = trace.cpu_operators
    rows = np.lexsort((operators.start_ns, operators.thread))
    start, thread = operators.start_ns[rows], operators.thread[rows]
    end = start + operators.duration_ns[rows]
    beside = (thread[1:] == thread[:-1]) & (end[:-1] - start[1:] > _ROUNDED_NS)
    if beside.any():
        count = counted(int(beside.sum()), "operator")
        yield f"{count} beside others on the same thread, neither inside the other"
    if len(operators):
        away = np.abs(start - np.median(start)) > _FAR_NS
        if away.any():
            yield f"{counted(int(away.sum()), 'operator')} minutes away from all others"
    yield from _of_ranges(trace)
    ranges = trace.annotations
    marks = _in_foreground(trace)
    for one in np.unique(ranges.thread[marks]).tolist():
        mine, own = marks[ranges.thread[marks] == one], thread == one
        if own.any():
            first, last = (
                _containing(start[own], end[own], moments)
                for moments in (
                    ranges.start_ns[mine],
                    ranges.start_ns[mine] + ranges.duration_ns[mine],
                )
            )
            if (first != last).any():
                yield "operators that begin inside a range of their thread and end outside it"
                return


def _containing(start: I64, end: I64, moments: I64) -> Positions:
    """Return which of some stretches, one after the other, holds each moment; -1: none."""
    row = np.searchsorted(start, moments - _ROUNDED_NS) - 1
    inside = (row >= 0) & (end[np.maximum(row, 0)] > moments + _ROUNDED_NS)
    return np.where(inside, row, UNKNOWN)


def _uneven_steps(trace: RankTrace) -> str:
    """Say where steps run other numbers of the same compute kernels, or operators of a CPU.

    On a CPU, the first and the last step may set up or clean up.
    """
    ranges, kernels, on_device = trace.annotations, trace.kernels, len(trace.kernels) > 0
    marks = [
        row
        for row in np.flatnonzero(ranges.stream < 0).tolist()
        if STEP.match(trace.names[ranges.name[row]])
    ]
    if len(marks) < (_FEWEST_STEPS if on_device else _FEWEST_STEPS + 2):
        return ""
    if on_device:
        launched = (kernels.kind == KernelKind.COMPUTE) & (kernels.launch >= 0)
        name, at_ns = kernels.name[launched], trace.launches.start_ns[kernels.launch[launched]]
    else:
        name, at_ns = trace.cpu_operators.name, trace.cpu_operators.start_ns
    begins = ranges.start_ns[marks]
    edges = np.append(begins, begins[-1] + ranges.duration_ns[marks[-1]])
    step = np.searchsorted(edges, at_ns, side="right") - 1
    counts = np.zeros((len(marks), len(trace.names)), dtype=np.int64)
    known = (step >= 0) & (step < len(marks))
    np.add.at(counts, (step[known], name[known]), 1)
    counts = counts[counts.any(axis=1)] if on_device else counts[1:-1]
    if not len(counts):
        return ""
    apart = np.ptp(counts, axis=0)
    allowed = _KERNELS_DIFFER * int(counts.sum(axis=1).max()) if on_device else 0
    if int(apart.sum()) <= allowed:
        return ""
    most = int(np.argmax(apart))
    what = "kernels" if on_device else "operators"
    numbers = f"{int(counts[:, most].min())} to {int(counts[:, most].max())}"
    return f"its steps run other numbers of the same {what} ({trace.names[most][:60]}: {numbers})"


def _of_launches(trace: RankTrace, streams: _Streams) -> Iterator[str]:
    """Yield launches without their kernel, kernels without their launch, or before it."""
    kernels, launches = trace.kernels, trace.launches
    joined = np.flatnonzero(kernels.launch >= 0)
    lost = _lost_kernels(trace)
    if lost:
        yield f"{counted(lost, 'kernel')} launched and not recorded, though later ones were"
    orphans = _orphans(trace, streams)
    if orphans:
        yield f"{counted(orphans, 'kernel')} without a launch, though earlier ones have theirs"
    called = kernels.launch[joined]
    several = int((np.bincount(called)[called] > 1)[_called(trace, _LAUNCHES_ONE)[called]].sum())
    if several:
        yield f"{counted(several, 'kernel')} that share the launch of one"
    early = launches.start_ns[called] - kernels.start_ns[joined]
    if early.max(initial=0) > _STAMPS_NS:
        yield (
            f"{counted(int((early > _STAMPS_NS).sum()), 'kernel')} before their launch, "
            f"by up to {show_duration(float(early.max()))}"
        )
    before, after = streams.pairs()
    before_call, after_call = kernels.launch[before], kernels.launch[after]
    known = (before_call >= 0) & (after_call >= 0)
    before_call, after_call = before_call[known], after_call[known]
    launched_ns = launches.start_ns[after_call] + launches.duration_ns[after_call]
    swapped = int((launched_ns < launches.start_ns[before_call]).sum())
    if swapped:
        yield f"{counted(swapped, 'kernel')} in another order than they were launched in"


def _lost_kernels(trace: RankTrace) -> int:
    """Count launches without a kernel, but for the last ones: their kernels may have run later.

    Where a graph is captured, calls launch nothing; they are not told from those that did. Intel's
    runtime launches by calls of its driver: of the two, one alone need have the kernel.
    """
    joined = trace.kernels.launch[trace.kernels.launch >= 0]
    expected = _called(trace, _LAUNCHES_ONE)
    expected[joined] = False
    driver = _called(trace, _DRIVER_OF_INTEL)
    if driver.any():
        expected &= driver == (2 * int(driver[joined].sum()) > len(joined))
    missing = np.flatnonzero(expected)
    if not len(missing) or not len(joined):
        return 0
    captured = np.flatnonzero(_called(trace, _CAPTURES_GRAPH))
    first = int(captured[-1]) if len(captured) else UNKNOWN
    return int(((missing < int(joined.max())) & (missing > first)).sum())


def _orphans(trace: RankTrace, streams: _Streams) -> int:
    """Count kernels without a launch that come after one of the same name with its own.

    What the profiler never sees a launch of, such as kernels that a library starts by calls of the
    driver, has none at all.
    """
    kernels = trace.kernels
    rows = streams.rows
    seen = kernels.launch[rows] >= 0
    if seen.all() or not seen.any():
        talks = np.isin(trace.operators.operation, (Operation.SEND, Operation.RECEIVE)).any()
        return len(rows) if not seen.any() and talks else 0
    number = np.concatenate(([0], np.cumsum(~streams.follows)))
    first_seen = np.full(int(number[-1]) + 1, len(rows))
    np.minimum.at(first_seen, number[seen], np.flatnonzero(seen))
    known = np.zeros(len(trace.names), dtype=bool)
    known[kernels.name[rows[seen]]] = True
    late = ~seen & (np.arange(len(rows)) > first_seen[number]) & known[kernels.name[rows]]
    return int(late.sum())


def _of_one_length(trace: RankTrace) -> str:
    """Say of a name that all its kernels last equally long: devices are not so even."""
    lasts = trace.kernels.duration_ns
    _, first, name, count = np.unique(trace.kernels.name, True, True, True)
    differ = np.bincount(name[lasts != lasts[first][name]], minlength=len(count))
    even = first[(differ == 0) & (count >= _ENOUGH_ALIKE) & (lasts[first] >= _LONG_ALIKE_NS)]
    if not len(even) or not (lasts % NS_PER_US).any():  # some clocks tell whole microseconds
        return ""
    called, each = trace.names[trace.kernels.name[even[0]]], show_duration(int(lasts[even[0]]))
    return f"all kernels called {called[:60]} last {each}, to the nanosecond"


def _of_waits(trace: RankTrace) -> Iterator[str]:
    """Yield kernels that end after the host has waited for all that was launched before."""
    kernels, launches = trace.kernels, trace.launches
    waits = np.flatnonzero(_called(trace, _WAITS_FOR_ALL))
    joined = np.flatnonzero(kernels.launch >= 0)
    if not len(waits) or not len(joined):
        return
    called = launches.start_ns[kernels.launch[joined]]
    order = np.argsort(called, kind="stable")
    end_ns = np.maximum.accumulate((kernels.start_ns + kernels.duration_ns)[joined[order]])
    ahead = np.searchsorted(called[order], launches.start_ns[waits])
    asked = ahead > 0
    returned = launches.start_ns[waits[asked]] + launches.duration_ns[waits[asked]]
    late = end_ns[ahead[asked] - 1] - returned
    if late.max(initial=0) > _STAMPS_NS:
        yield (
            "the host waited for the device, and kernels ended up to "
            f"{show_duration(float(late.max()))} later"
        )


def _of_streams(trace: RankTrace, streams: _Streams) -> Iterator[str]:
    """Yield overlaps on a stream, but for kernels of one graph and those launched to do so."""
    kernels = trace.kernels
    end_ns = kernels.start_ns + kernels.duration_ns
    before, after = streams.pairs()
    apart = _apart(kernels, before, after)
    before, after = before[apart], after[apart]
    beside = end_ns[before] - end_ns[after] > _OVERLAP_NS
    beside |= end_ns[before] - kernels.start_ns[after] > _LONGEST_OVERLAP_NS
    count = int(beside.sum())
    before, after = streams.pairs(apart=2)
    apart = _apart(kernels, before, after)
    count += int((end_ns[before] - kernels.start_ns[after] > _OVERLAP_NS)[apart].sum())
    if count:
        yield f"{counted(count, 'kernel')} beside others on the same stream"


def _apart(kernels: Kernels, before: Positions, after: Positions) -> Flags:
    """Tell kernels of different launches; those of a graph share one, where it is known."""
    same: Flags = kernels.launch[before] == kernels.launch[after]
    unknown = (kernels.launch[before] < 0) | (kernels.launch[after] < 0)
    graph = (kernels.graph[before] > 0) & (kernels.graph[before] == kernels.graph[after])
    return ~np.where(unknown, graph, same)


def _of_units(trace: RankTrace) -> Iterator[str]:
    """Yield durations that devices and hosts do not have."""
    kernels, launches = trace.kernels, trace.launches
    finely = (kernels.duration_ns % NS_PER_US > 0).any()
    runs = (kernels.kind != KernelKind.COPY) & (kernels.kind != KernelKind.MEMSET)
    least_ns = np.where(kernels.communication, _SHORTEST_TALK_NS, _SHORTEST_KERNEL_NS)
    too_short = runs & (kernels.duration_ns < least_ns)
    unseen = runs & (kernels.duration_ns < _SHORTEST_SEEN_NS)
    for name in np.unique(kernels.name[unseen]).tolist():
        like = kernels.name == name
        usual = float(np.median(kernels.duration_ns[like]))
        too_short |= unseen & like & (kernels.duration_ns * _TEN_TIMES < usual)
    short = int(too_short.sum())
    if short and finely:  # else 0 stands for less than one us
        yield f"{counted(short, 'kernel')} shorter than any can be"
    stated = kernels.stated_ns > 0
    # Exact to the nanosecond in every trace that states it; older ones write whole microseconds.
    rounding_ns = _ROUNDING_NS if finely else NS_PER_US
    off = np.abs(kernels.stated_ns - kernels.duration_ns) > rounding_ns + 1e-4 * kernels.stated_ns
    contradicted = int((stated & off).sum())
    if contradicted > _CONTRADICTED * int(stated.sum()):
        yield f"{counted(contradicted, 'copy', 'copies')} of another duration than their bandwidth"
    alike = np.unique(kernels.duration_ns[~runs])
    if len(alike) == 1 and finely and int((~runs).sum()) >= _FEWEST_PAIRS:
        yield f"all its copies take {alike[0] / NS_PER_US:g} us, to the nanosecond"
    if not len(launches):
        return
    single = _called(trace, _LAUNCHES_ONE)
    takes = float(np.median(launches.duration_ns[single])) if single.any() else 0.0
    least, most = _LAUNCH_TAKES_NS
    if int(single.sum()) >= _FEWEST_PAIRS and not least <= takes <= most:
        yield f"a launch takes {takes / NS_PER_US:g} us: not in the unit that it should be"


def _queued(trace: RankTrace, streams: _Streams) -> tuple[Positions, Positions]:
    """Return kernels, and those behind them on their stream that were launched before they began.

    None of either communicates, or shares a launch with the other.
    """
    kernels, launches = trace.kernels, trace.launches
    before, after = streams.pairs()
    known = (kernels.launch[before] >= 0) & (kernels.launch[after] >= 0)
    known &= _apart(kernels, before, after)
    known &= ~kernels.communication[before] & ~kernels.communication[after]
    before, after = before[known], after[known]
    call = kernels.launch[after]
    queued = launches.start_ns[call] + launches.duration_ns[call] < kernels.start_ns[before]
    return before[queued], after[queued]


def _idle_though_queued(trace: RankTrace) -> str:
    """Say where a device runs nothing at all for a while, though its next kernel is queued.

    Messages count as kernels do: what waits for a receive begins where the receive ends. Of what
    was launched before the capture began, not all is recorded: what follows it tells nothing.
    """
    kernels, launches = trace.kernels, trace.launches
    end_ns = kernels.start_ns + kernels.duration_ns
    began = np.searchsorted(kernels.start_ns, kernels.start_ns)  # kernels are sorted so
    seen = kernels.launch >= 0
    follows = np.flatnonzero(seen & seen[began - 1] & (began > 0))
    ended = np.maximum.accumulate(end_ns)[began[follows] - 1]
    call = kernels.launch[follows]
    called = launches.start_ns[call] + launches.duration_ns[call]
    idle_ns = kernels.start_ns[follows] - np.maximum(ended, called)
    waits = idle_ns[idle_ns > 0]
    slow = max(np.percentile(waits, 75) / _USUAL_IDLE_NS, 1.0) if len(waits) else 1.0
    often = int((idle_ns > slow * _IDLE_NS).sum())
    long_ns = idle_ns[idle_ns > slow * _LONG_IDLE_NS]
    lasts_ns = int(end_ns.max()) - int(kernels.start_ns[0])
    finely = (kernels.duration_ns % NS_PER_US > 0).any()
    many = often > _OFTEN_IDLE * max(len(follows), _LAUNCHES)
    beyond = len(long_ns) > 1 or idle_ns.max(initial=0) > slow * _LONGEST_IDLE_NS
    many |= len(long_ns) > _FEW_IDLE or (beyond and long_ns.sum() > _IDLES * lasts_ns)
    if not finely or not many:
        return ""
    return (
        f"its device runs nothing, {counted(often, 'time')} and for up to "
        f"{show_duration(float(idle_ns.max()))}, though kernels are queued: some were lost, or end "
        "too early, or others compute on it"
    )


def _of_queues(trace: RankTrace, streams: _Streams) -> Iterator[str]:
    """Yield kernels that end before, or after, the device goes on to what is queued behind them."""
    kernels = trace.kernels
    before, after = _queued(trace, streams)
    lasts_ns = kernels.duration_ns[before]
    idle_ns = kernels.start_ns[after] - kernels.start_ns[before] - lasts_ns
    lasts = lasts_ns >= _LASTS_NS
    if int(lasts.sum()) >= _FEWEST_PAIRS:
        idle = idle_ns[lasts] / lasts_ns[lasts]
        if float(np.percentile(idle, 25)) > _MOST_IDLE:
            yield "kernels end long before those begin that are queued behind them"
    least, most = _SHORT_NS
    after_long = idle_ns[lasts_ns >= _LONG_NS]
    after_short = idle_ns[(lasts_ns >= least) & (lasts_ns < most)]
    if min(len(after_long), len(after_short)) >= _FEWEST_LONG:
        quarter, half = np.percentile(after_long, (25, 50))
        late = quarter > max(_NEXT_AFTER_NS, 2 * np.percentile(after_short, 25))
        if late or half > _MISSING_BETWEEN_NS:
            yield "long kernels end before the device goes on, or others are missing between"
        elif half < -_REACHES_INTO_NS and np.median(after_short) > 0:
            yield "long kernels last into those that follow them"


def _of_ranges(trace: RankTrace) -> Iterator[str]:
    """Yield marks of steps that do not follow each other, and ranges far from all else."""
    ranges = trace.annotations
    numbers = np.full(len(trace.names), UNKNOWN)
    for name in np.unique(ranges.name).tolist():
        found = STEP.match(trace.names[name])
        numbers[name] = int(found[1]) if found else UNKNOWN
    rows = np.flatnonzero((numbers[ranges.name] >= 0) & (ranges.stream < 0))
    number, start = numbers[ranges.name[rows]], ranges.start_ns[rows]
    ended = (start + ranges.duration_ns[rows])[:-1]
    apart, step = start[1:] - ended, np.diff(number)
    # Nothing is launched between two marks, but for what the profiler itself does there; where it
    # leaves steps out, it records no launches either.
    calls = trace.launches.start_ns
    between = np.searchsorted(calls, start[1:]) - np.searchsorted(calls, ended)
    if (apart < -_STAMPS_NS).any() or (between > _FEW).any() or (step <= 0).any():
        yield "its steps do not follow each other"
    if _straddled(trace, _in_foreground(trace)):
        yield "its steps or ranges begin or end in the midst of a call of the host"
    if len(ranges) and len(trace.kernels):
        end_ns = trace.kernels.start_ns + trace.kernels.duration_ns
        early = int(trace.kernels.start_ns[0]) - int(ranges.start_ns[0])
        late = int((ranges.start_ns + ranges.duration_ns).max()) - int(end_ns.max())
        if max(early, late) > _FAR_NS:
            yield f"a range {show_duration(max(early, late))} away from all kernels"


def _in_foreground(trace: RankTrace) -> Positions:
    """Return the rows of ranges of the host, but for those of messages under way."""
    ranges = trace.annotations
    names = [_IN_BACKGROUND.match(name) is not None for name in trace.names]
    return np.flatnonzero((ranges.stream < 0) & ~np.array([*names, False])[ranges.name])


def _straddled(trace: RankTrace, marks: Positions) -> bool:
    """Tell whether a call of the host lasts on both sides of an end of a mark of its thread."""
    ranges, calls = trace.annotations, trace.launches
    for thread in np.unique(ranges.thread[marks]).tolist():
        mine = marks[ranges.thread[marks] == thread]
        begins = ranges.start_ns[mine]
        edges = np.sort(np.concatenate((begins, begins + ranges.duration_ns[mine])))
        own = calls.thread == thread
        start = calls.start_ns[own] + _ROUNDED_NS
        end = np.maximum(start, calls.start_ns[own] + calls.duration_ns[own] - _ROUNDED_NS)
        if (np.searchsorted(edges, end) > np.searchsorted(edges, start)).any():
            return True
    return False


def _strange_threads(trace: RankTrace) -> int:
    """Count kernels launched by threads that do nothing else, and whose names others launch.

    Passes are told by threads: torch runs backward passes on one of their own.
    """
    kernels, launches = trace.kernels, trace.launches
    joined = np.flatnonzero(kernels.launch >= 0)
    thread = launches.thread[kernels.launch[joined]]
    size = len(trace.threads) + 1
    often = np.bincount(thread, minlength=size)
    busy = np.bincount(launches.thread, minlength=size)
    known = {*trace.operators.thread.tolist(), *trace.annotations.thread.tolist()}
    few = [
        row
        for row in np.flatnonzero((often > 0) & (often <= _FEW) & (busy == often)).tolist()
        if row not in known
    ]
    if not few:
        return 0
    mine = np.isin(thread, few)
    elsewhere = np.bincount(kernels.name[joined[~mine]], minlength=len(trace.names))
    return int((elsewhere[kernels.name[joined[mine]]] >= _OFTEN).sum())


def _called(trace: RankTrace, pattern: re.Pattern[str]) -> Flags:
    """Tell which calls of the host have a name like that."""
    called = np.zeros(len(trace.names) + 1, dtype=bool)
    for number in np.unique(trace.launches.name).tolist():
        called[number] = pattern.search(trace.names[number]) is not None
    return called[trace.launches.name]
