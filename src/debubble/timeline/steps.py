"""A rank's work in → its steps, what a trace tells of each, and which of them are measured.

Hosts run ahead of their devices. Work is of the step whose mark holds its launch, whenever it runs:

    host     ├ ProfilerStep#7: launches a, b ┤├ ProfilerStep#8: launches c ┤
    device                  a a a a a a a a a a a b b b b b b b c c c
    →        a and b are of step 7, though b runs while the host is in step 8

Where nothing is marked the pipeline's own rhythm tells steps. A rank that trains has finished every
microbatch it began only at the end of a step. What a second of three ranks ran, in the order of its
host, and how many microbatches were in flight after it:

    passes      F0 F1 B0 F2 B1 F3 B2 B3 │ F0 F1 B0 F2 B1 F3 B2 B3
    in flight    1  2  1  2  1  2  1  0 │  1  2  1  2  1  2  1  0
    →           step 0                  │ step 1

A step ends where as few are in flight as ever and a forward pass follows. Labels are clearer: they
restart, so a step begins with the first stage's forward pass of microbatch 0. The last rank may
finish each microbatch at once, B after F: it goes by the messages that it gets from the rank before
it, and so its steps get their numbers. Where nothing repeats, nothing is guessed.

docs/explanation/how-the-timeline-is-built.md ("Where no step is marked") tells why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import median

import numpy as np

from debubble.errors import Code, Gap
from debubble.timeline.model import (
    I32,
    I64,
    UNKNOWN,
    Flags,
    Passes,
    PassKind,
    RankTimeline,
    Timeline,
)
from debubble.timeline.passes import Label, Neighbours, parse_label
from debubble.timeline.transfers import Chain, find_shift
from debubble.timeline.work import (
    BEFORE_CAPTURE,
    Messages,
    Work,
    find_messages,
    find_waits,
    host_ranges,
    names_like,
    tell_waits,
    without_reading,
)
from debubble.trace.columns import STEP, RankTrace
from debubble.units import show_ranks

_QUEUES = re.compile(r"Launch|Memcpy.*Async|Memset.*Async")
# Shapes are some hundred bytes, activations megabytes.
_SMALL = 0.01
# Of so few steps none is left out for being cold: what is left would be too little to measure.
_ALWAYS_KEPT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Windows of the host, sorted. Work belongs to the step whose window holds its launch."""

    number: I32
    start_ns: I64
    end_ns: I64

    def at(self, moments_ns: I64) -> I32:
        """Return the step of each moment; -1 outside of all."""
        if not len(self.number):
            return np.full(len(moments_ns), UNKNOWN, dtype=np.int32)
        row = np.searchsorted(self.start_ns, moments_ns, side="right") - 1
        inside = (row >= 0) & (moments_ns < self.end_ns[row])
        return np.where(inside, self.number[row], UNKNOWN).astype(np.int32)


def whole_run() -> Steps:
    """Return the one step of a run that marks none: all of it, as number 0."""
    limits = np.iinfo(np.int64)
    return Steps(
        number=np.zeros(1, dtype=np.int32),
        start_ns=np.array([limits.min], dtype=np.int64),
        end_ns=np.array([limits.max], dtype=np.int64),
    )


def find_steps(trace: RankTrace) -> Steps:
    """Read the profiler's own marks; none of them: no steps."""
    numbers = np.array(
        [int(found[1]) if (found := STEP.match(name)) else UNKNOWN for name in trace.names] or [-1]
    )
    annotations, rows = trace.annotations, host_ranges(trace, numbers >= 0)
    start = annotations.start_ns[rows]
    return Steps(
        number=numbers[annotations.name[rows]].astype(np.int32),
        start_ns=start,
        end_ns=start + annotations.duration_ns[rows],
    )


def marks_steps(trace: RankTrace) -> bool:
    """Tell whether the profiler marked any step on this rank."""
    return bool(len(find_steps(trace).number))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """A rank whose passes are still to be told."""

    trace: RankTrace
    rank: int
    work: Work
    messages: Messages
    steps: Steps

    def in_steps(self, steps: Steps) -> RankRecord:
        """Return the same rank with other steps."""
        return replace(
            self,
            steps=steps,
            work=replace(self.work, step=steps.at(self.work.issued_ns)),
            messages=replace(self.messages, step=steps.at(self.messages.issued_ns)),
        )


def record_rank(trace: RankTrace, work: Work, steps: Steps) -> RankRecord:
    """List what a rank did, and in which step."""
    work = without_reading(work, trace)
    messages = tell_waits(find_messages(trace), work, find_waits(trace))
    rank = trace.rank if trace.rank is not None else UNKNOWN
    record = RankRecord(trace=trace, rank=rank, work=work, messages=messages, steps=steps)
    return record.in_steps(steps)


def find_set_up(rank: RankRecord) -> tuple[tuple[int, str], ...]:
    """Return the first steps if they hold more small messages than most: shapes sent ahead."""
    size, steps = rank.messages.message_bytes, rank.steps.number.tolist()
    small = (size >= 0) & (size < _SMALL * size.max(initial=0))
    counts = [int(small[rank.messages.step == step].sum()) for step in steps]
    ahead = list(takewhile(lambda row: counts[row] > median(counts), range(len(counts))))
    return tuple((steps[row], "small messages went ahead") for row in ahead)


def find_unfinished(rank: RankRecord) -> tuple[int, ...]:
    """Return the last step, where kernels of it were launched and not recorded, unlike before."""
    trace, steps = rank.trace, rank.steps
    if not len(trace.kernels) or not len(trace.launches) or not len(steps.number):
        return ()
    queues = names_like(trace, _QUEUES)[trace.launches.name]
    queues[trace.kernels.launch[trace.kernels.launch >= 0]] = False
    lost = set(steps.at(trace.launches.start_ns[queues]).tolist()) - {UNKNOWN}
    last = int(steps.number[-1])
    return (last,) if lost == {last} else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedStep:
    """A step that no figure is made of."""

    step: int
    why: Code


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """The steps of one pipeline."""

    kept: tuple[int, ...]
    left_out: tuple[SkippedStep, ...]
    partial: bool
    """No step is whole: the figures are of parts."""
    gaps: tuple[Gap, ...]


def choose_steps(timeline: Timeline, pipeline: int, asked: int | None = None) -> StepChoice:
    """Keep the steps that all ranks hold whole, without those in which set-up was seen.

    A step that was asked for is kept anyway, if all ranks hold some of it.
    """
    ranks = timeline.ranks_of(pipeline)
    names = {rank.rank for rank in ranks}
    passes = timeline.passes.where(np.isin(timeline.passes.rank, list(names)))
    holders = {step: set(passes.rank[passes.step == step].tolist()) for step in timeline.steps}
    absent = {step: names - held for step, held in holders.items() if held}
    common = [step for step, missing in absent.items() if not missing]
    cold = _cold(ranks, common)
    cut = {step: found for step in common if (found := _cut_on(passes, ranks, step))}
    if sum(step not in cut or step in cold for step in common) <= _ALWAYS_KEPT:
        cold = {}
    cut = {step: found for step, found in cut.items() if step not in cold}
    whole = [step for step in common if step not in cut]
    warm = [step for step in whole if step not in cold]
    kept = warm or whole or common
    if asked in common:
        kept = sorted({*kept, asked})
    uneven = {step: missing for step, missing in absent.items() if missing}
    reasons = ((uneven, Code.UNEVEN_STEPS), (cut, Code.CUT_STEPS), (cold, Code.COLD_STEPS))
    left_out = [
        SkippedStep(step=step, why=code)
        for steps, code in reasons
        for step in steps
        if step not in kept
    ]
    return StepChoice(
        kept=tuple(kept),
        left_out=tuple(sorted(left_out, key=lambda skipped: skipped.step)),
        partial=asked in cut or (bool(kept) and not whole),
        gaps=tuple(_gaps(uneven, cut, cold, kept)),
    )


def only_steps(timeline: Timeline, steps: Iterable[int]) -> Timeline:
    """Return a timeline that knows no other passes and transfers; its ranks stay as busy."""
    kept = tuple(steps)
    passes, transfers = timeline.passes, timeline.transfers
    return replace(
        timeline,
        steps=kept,
        passes=passes.where(np.isin(passes.step, kept)),
        transfers=transfers.where(np.isin(transfers.step, kept)),
    )


def _cold(ranks: Sequence[RankTimeline], steps: Sequence[int]) -> dict[int, str]:
    seen: dict[int, str] = {}
    for rank in ranks:
        for step, what in rank.set_up:
            if step in steps:
                seen.setdefault(step, f"{what} (rank {rank.rank})")
    return seen if len(seen) < len(steps) else {}


def _cut_on(passes: Passes, ranks: Sequence[RankTimeline], step: int) -> set[int]:
    """Return the ranks that hold only a part of a step.

    Every stage runs all microbatches forward, and each of them backward if it does so at all: the
    first stages of a model may be frozen, but none behind one that is not.
    """
    here = passes.where(passes.step == step)
    counts = {
        stage: np.bincount(here.kind[here.stage == stage], minlength=len(PassKind))
        for stage in np.unique(here.stage).tolist()
    }
    most = max(int(count.max()) for count in counts.values())
    # For so many microbatches all gradients were computed.
    backward = {
        stage: int(count[PassKind.B] + count[PassKind.W]) for stage, count in counts.items()
    }
    unfinished = {stage for stage, count in backward.items() if 0 < count < most}
    trained = min((stage for stage, count in backward.items() if count), default=max(backward))
    unfinished |= {stage for stage, count in backward.items() if not count and stage > trained}
    if unfinished:
        unfinished |= {stage for stage, count in backward.items() if count == 0}
    cut = {stage for stage, count in counts.items() if count[PassKind.F] < most} | unfinished
    return {rank.rank for rank in ranks if cut & set(rank.stages) or step in rank.unfinished}


def _gaps(
    uneven: Mapping[int, set[int]],
    cut: Mapping[int, set[int]],
    cold: Mapping[int, str],
    kept: Sequence[int],
) -> Iterable[Gap]:
    def steps(numbers: Iterable[int]) -> str:
        return numbered("step", sorted(numbers))

    def ranks(held: Mapping[int, set[int]]) -> str:
        return numbered("rank", sorted(set().union(*held.values())))

    if uneven:
        what = "it" if len(uneven) == 1 else "all of them"
        yield Gap(
            code=Code.UNEVEN_STEPS,
            message=f"{steps(uneven)} left out: {ranks(uneven)} did not capture {what}",
            hint="capture the same steps on all ranks",
        )
    if cut:
        parts = [step for step in cut if step in kept]
        yield Gap(
            code=Code.CUT_STEPS,
            message=f"{steps(cut)} captured in part by {ranks(cut)}; "
            + ("there is no whole one, so figures are of the part" if parts else "left out"),
            hint="let the capture begin and end between two steps",
        )
    if cold:
        step, what = next(iter(cold.items()))
        yield Gap(
            code=Code.COLD_STEPS,
            message=f"{steps(cold)} left out: set-up was seen in step {step}, {what}",
            hint="let the job run a few steps before the capture",
        )


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Say which ranks or steps are meant: `rank 3`, `steps 0-2`."""
    return f"{noun if len(numbers) == 1 else noun + 's'} {show_ranks(numbers)}"


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


def infer_steps(ranks: Sequence[RankRecord], chain: Chain) -> dict[int, Steps] | None:
    """Return the steps of each rank of a pipeline; None where its rhythm cannot be told.

    The passes of their work are told as if all were one step. Each rank tells by itself, or goes by
    the messages of the rank before it.
    """
    captured = sorted(ranks, key=lambda rank: chain.ranks.index(rank.rank))
    trains = any(bool(rank.work.backward.any()) for rank in captured)
    found: dict[int, Beats] = {}
    before: RankRecord | None = None
    for rank in captured:
        beside = chain.beside(rank.rank)
        beats = beats_of_labels(rank, trains=trains)
        if beats is None and trains and beside.next is not None:
            beats = beats_of_training(rank, beside)
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


def beats_of_training(rank: RankRecord, beside: Neighbours) -> Beats | None:
    """Let a step end where as few microbatches as ever are in flight, and none is begun before.

    How many were in flight when the capture began is not known; but no moment has fewer than none.
    """
    work = rank.work
    rows = np.flatnonzero(work.in_pass)
    if not len(rows):
        return None
    # Passes in the order the host issued them: where each begins in its work, and its kind.
    changes = (np.diff(work.kind[rows]) != 0) | (np.diff(work.microbatch[rows]) != 0)
    first = rows[np.concatenate(([True], changes))]
    kind = work.kind[first]
    level = np.cumsum(np.where(kind == PassKind.F, 1, -1))
    lowest = min(int(level.min()), 0)
    ends = (level[:-1] == lowest) & (kind[:-1] != PassKind.F) & (kind[1:] == PassKind.F)
    starts = first[np.concatenate(([True], ends))]
    begins = [_first_message_or_work(rank, beside, row) for row in starts.tolist()]
    if kind[0] != PassKind.F or beside.previous is not None:
        begins[0] = _BEGIN
    return Beats(begins_ns=np.array(begins, dtype=np.int64))


def _first_message_or_work(rank: RankRecord, beside: Neighbours, row: int) -> int:
    """Return when the first pass of a step began on the host: its receive, or its own work.

    On the first rank nothing parts it from what was launched before it, an optimizer say: but all
    forward passes launch alike, as many pieces of work as most; the fewest where none is usual.
    """
    issued, microbatch = rank.work.issued_ns, rank.work.microbatch
    if beside.previous is not None:
        messages = rank.messages
        since = issued[row - 1] if row else BEFORE_CAPTURE
        inputs = messages.issued_ns[~messages.is_send & (messages.peer == beside.previous)]
        inputs = inputs[(inputs > since) & (inputs <= issued[row])]
        return int(inputs[0]) if len(inputs) else int(issued[row])
    forward = np.flatnonzero(rank.work.kind == PassKind.F)
    counts = np.unique(microbatch[forward], return_counts=True)[1]
    sizes, often = np.unique(counts, return_counts=True)
    size = int(sizes[often.argmax()]) if len(sizes) else 0
    mine = forward[microbatch[forward] == microbatch[row]]
    return int(issued[mine[-size]]) if 0 < size < len(mine) else int(issued[row])


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
    posted = {before.rank: before.messages, rank.rank: rank.messages}
    sends = before.messages.rows(rank.rank, is_send=True)
    receives = rank.messages.rows(before.rank, is_send=False)
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
