"""Marks of a rank in → its steps, what a trace tells of each, and which of them are measured.

Hosts run ahead of their devices. Work is of the step whose mark holds its launch, whenever it runs:

    host     ├ ProfilerStep#7: launches a, b ┤├ ProfilerStep#8: launches c ┤
    device                  a a a a a a a a a a a b b b b b b b c c c
    →        a and b are of step 7, though b runs while the host is in step 8

Set-up is what only a job's first steps do. A step that is slow, and nothing else, shows none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
from debubble.timeline.transfers import RankMessages
from debubble.timeline.work import (
    Messages,
    Work,
    find_messages,
    find_waits,
    host_ranges,
    names_like,
    tell_waits,
    without_reading,
)
from debubble.trace.columns import STEP, MemoryDevice, RankTrace
from debubble.units import show_ranks

# NCCL's own ranges, torch's calls, RCCL's: a communicator is made at its first use.
_COMMUNICATORS = re.compile(
    r"(?:n|r)cclComm(?:Init|Split)|initNCCLComm|init_process_group|new_group|eager_connect"
)
# torch's pipelines send shapes along at the first step; `_shape_inference` needs `with_stack`.
_SHAPES = re.compile(r"_shape_inference|_prepare_forward_infra")
_QUEUES = re.compile(r"Launch|Memcpy.*Async|Memset.*Async")
# A cache that grows by less has found its size; allocations are rounded to 2 MiB.
_GROWTH = 0.02
# Shapes are some hundred bytes, activations megabytes.
_SMALL = 0.01
# What shows that a rank was still setting up.
COMMUNICATORS, SHAPES = "communicators were made", "shapes were sent along"
ALLOCATOR, MESSAGES = "the allocator took its memory", "small messages went ahead"
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
    work_step: I32
    message_step: I32
    steps: Steps

    @property
    def posted(self) -> RankMessages:
        """Its messages, and the step of each."""
        return RankMessages(messages=self.messages, step=self.message_step)

    def in_steps(self, steps: Steps) -> RankRecord:
        """Return the same rank with other steps."""
        return replace(
            self,
            steps=steps,
            work_step=steps.at(self.work.issued_ns),
            message_step=steps.at(self.messages.issued_ns),
        )


def record_rank(trace: RankTrace, work: Work, steps: Steps) -> RankRecord:
    """List what a rank did, and in which step."""
    work = without_reading(work, trace)
    messages = tell_waits(find_messages(trace), work, find_waits(trace))
    return RankRecord(
        trace=trace,
        rank=trace.rank if trace.rank is not None else UNKNOWN,
        work=work,
        messages=messages,
        work_step=steps.at(work.issued_ns),
        message_step=steps.at(messages.issued_ns),
        steps=steps,
    )


def find_set_up(rank: RankRecord) -> tuple[tuple[int, str], ...]:
    """Return the steps in which a rank was still setting up, each with what showed it."""
    if not len(rank.steps.number):
        return ()
    signs = (
        (ALLOCATOR, _leading(rank.steps, _growing(rank))),
        (MESSAGES, _leading(rank.steps, _talkative(rank))),
        (SHAPES, _steps_with(rank, _SHAPES)),
        (COMMUNICATORS, _steps_with(rank, _COMMUNICATORS)),
    )
    seen = {step: what for what, steps in signs for step in steps}  # the last sign is the clearest
    return tuple(sorted(seen.items()))


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


def _steps_with(rank: RankRecord, pattern: re.Pattern[str]) -> list[int]:
    trace, named = rank.trace, names_like(rank.trace, pattern)
    if not named.any():
        return []
    tables = (trace.annotations, trace.operators, trace.cpu_operators)
    found = rank.steps.at(np.concatenate([t.start_ns[named[t.name]] for t in tables]))
    return sorted(set(found[found >= 0].tolist()))


def _talkative(rank: RankRecord) -> Flags:
    """Tell which steps hold more small messages than most: shapes travel ahead of activations."""
    size, at = rank.messages.message_bytes, rank.message_step
    small = (size >= 0) & (size < _SMALL * size.max(initial=0))
    counts = np.array([int(small[at == step].sum()) for step in rank.steps.number.tolist()])
    more: Flags = counts > np.median(counts)
    return more


def _growing(rank: RankRecord) -> Flags:
    """Tell in which steps the allocator asked the device for more memory."""
    memory, steps = rank.trace.memory, rank.steps
    on_device = memory.device_type == MemoryDevice.DEVICE
    reserved, at = memory.reserved_bytes[on_device], steps.at(memory.start_ns[on_device])
    grown = np.zeros(len(steps.number), dtype=bool)
    for row, step in enumerate(steps.number.tolist()):
        mine = reserved[at == step]
        if len(mine):
            grown[row] = mine.max() > mine[0] * (1 + _GROWTH)
    return grown


def _leading(steps: Steps, flags: Flags) -> list[int]:
    """Return the steps flagged from the first one on: what comes later is no set-up."""
    count = len(flags) if flags.all() else int(flags.argmin())
    return [] if count == len(flags) else steps.number[:count].tolist()


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
        lacking: dict[tuple[int, ...], list[int]] = {}
        for step, without in sorted(uneven.items()):
            lacking.setdefault(tuple(sorted(without)), []).append(step)
        each = [f"{numbered('rank', who)} did not capture {steps(what)}"
                for who, what in lacking.items()]  # fmt: skip
        alike = f"{ranks(uneven)} did not capture {'it' if len(uneven) == 1 else 'all of them'}"
        yield Gap(
            code=Code.UNEVEN_STEPS,
            message=f"{steps(uneven)} left out: "
            + (", ".join(each) if 1 < len(each) <= _ALWAYS_KEPT else alike),
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
