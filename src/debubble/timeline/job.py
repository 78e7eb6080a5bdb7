"""Sidecars and a measured pipeline in → what the job said of itself, held against its traces.

What the traces show is believed; what they are silent on is taken from the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Literal, TypeVar

from debubble.errors import Code, Gap
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import FEWEST_STEPS, MemoryFigures, Timeline
from debubble.trace.sidecar import Sidecar, StepTimes
from debubble.units import NS_PER_S

_Value = TypeVar("_Value")

# Steps of a quiet machine differ by less: by so much quicker under the profiler, others were slow.
_FASTER = 0.05


class Basis(StrEnum):
    """Whether a time is of steps under a profiler."""

    PROFILED = "profiled"
    UNPROFILED = "unprofiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBasis:
    """On which basis a run is held against predictions and other runs: decided here, once."""

    name: Basis
    source: Literal["traces", "sidecars"]
    batch_latency_ns: int | None
    step_time_ns: int | None
    """None where it was not said on this basis."""

    @property
    def traced(self) -> Basis:
        """On which basis the times in the traces themselves are."""
        return self.name if self.source == "traces" else Basis.PROFILED


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What the ranks of a pipeline said alike; None or empty where they did not."""

    schedule: str | None = None
    microbatches: int | None = None
    split: tuple[int, ...] = ()
    """Layers of each stage."""
    tokens: int | None = None
    """Of a step, over all microbatches."""
    context_lengths: tuple[int, ...] = ()
    unprofiled_steps_s: tuple[float, ...] = ()
    """Steps without the profiler that all ranks timed: of each step the median over ranks."""
    profiled_step_s: float | None = None
    """The median over ranks of the median step under the profiler."""
    gaps: tuple[Gap, ...] = ()
    """Where it contradicts the traces, or one rank another."""

    @property
    def unprofiled_step_s(self) -> float | None:
        """The median step without the profiler."""
        return _middle(self.unprofiled_steps_s)

    @property
    def steps_timed(self) -> int:
        """How many steps without the profiler were timed."""
        return len(self.unprofiled_steps_s)

    @property
    def overhead_fraction(self) -> float | None:
        """By how much the profiler slowed a step."""
        unprofiled, profiled = self.unprofiled_step_s, self.profiled_step_s
        return profiled / unprofiled - 1 if unprofiled and profiled else None

    @property
    def steps_disturbed(self) -> bool:
        """Whether steps without the profiler were slowed by something else: it speeds up none."""
        return self.overhead_fraction is not None and self.overhead_fraction < -_FASTER

    def basis_for(self, figures: PipelineFigures) -> RunBasis:
        """Decide whether a run is held against others with or without the profiler.

        Without, where the job timed enough steps so: the profiler is taken to slow all parts of a
        step alike. Else as its traces are: those of a job's own timers have no profiler in them.
        """
        latency_ns, step_s = figures.batch_latency_ns, self.unprofiled_step_s
        timers = bool(figures.ranks) and all(rank.timers for rank in figures.ranks)
        traced = RunBasis(
            name=Basis.UNPROFILED if timers else Basis.PROFILED,
            source="traces",
            batch_latency_ns=latency_ns,
            step_time_ns=figures.step_time_ns,
        )
        if timers or self.steps_disturbed or self.steps_timed < FEWEST_STEPS:
            return traced
        if figures.stream is not None or not (latency_ns and step_s and self.profiled_step_s):
            return traced
        return RunBasis(
            name=Basis.UNPROFILED,
            source="sidecars",
            batch_latency_ns=round(latency_ns * step_s / self.profiled_step_s),
            step_time_ns=round(step_s * NS_PER_S),
        )

    def schedule_for(self, figures: PipelineFigures) -> str | None:
        """Return the schedule where the traces show none that is known."""
        return self.schedule if figures.schedule is None else None

    def split_for(self, figures: PipelineFigures) -> tuple[int, ...] | None:
        """Return the layers of each stage where the traces do not show them all."""
        stages = sum(len(rank.stages) for rank in figures.ranks)
        shown = sum(len(rank.layers) for rank in figures.ranks)
        return self.split if len(self.split) == stages > shown else None

    def tokens_of_microbatch(self, microbatches: int | None) -> int | None:
        """Return the tokens of one microbatch, where they come out whole."""
        if self.tokens is None or not microbatches or self.tokens % microbatches:
            return None
        return self.tokens // microbatches


def ask_job(sidecars: Iterable[Sidecar], figures: PipelineFigures) -> JobFacts:
    """Put the sidecars of a pipeline's ranks together, and hold them against its figures."""
    names = {rank.rank for rank in figures.ranks}
    mine = [sidecar for sidecar in sidecars if sidecar.rank in names]
    steps = [said.steps for said in mine]
    gaps: list[Gap] = []
    facts = JobFacts(
        schedule=_agreed(mine, "schedule", lambda said: said.schedule, gaps),
        microbatches=_agreed(mine, "microbatches", lambda said: said.microbatches, gaps),
        split=_agreed(mine, "split", lambda said: said.split, gaps) or (),
        tokens=_agreed(mine, "tokens", lambda said: said.tokens, gaps),
        context_lengths=_agreed(mine, "context lengths", lambda said: said.context_lengths, gaps)
        or (),
        unprofiled_steps_s=_steps_of_all(steps),
        profiled_step_s=_middle(median(times.profiled_s) for times in steps if times.profiled_s),
    )
    layers = {layer.stage: layer.layers for rank in figures.ranks for layer in rank.layers}
    claims: dict[str, tuple[object, object]] = {
        "schedule": (facts.schedule, figures.schedule),
        "microbatches": (facts.microbatches, figures.microbatches),
    }
    if len(layers) == len(facts.split) and set(layers) == set(range(len(layers))):
        claims["split"] = (facts.split, tuple(layers[stage] for stage in sorted(layers)))
    gaps += [
        _differs(f"{what}: the job says {_shown(said)}, its traces show {_shown(shown)}")
        for what, (said, shown) in claims.items()
        if said and shown and said != shown
    ]
    return replace(facts, gaps=tuple(gaps))


def tell_memory(timeline: Timeline, sidecars: Sequence[Sidecar]) -> Timeline:
    """Add what the jobs said of their devices' memory to what the traces show of it."""
    said = {sidecar.rank: sidecar for sidecar in sidecars}
    ranks = tuple(
        replace(rank, memory=_add_memory(rank.memory, said[rank.rank]))
        if rank.rank in said
        else rank
        for rank in timeline.ranks
    )
    return replace(timeline, ranks=ranks)


def _steps_of_all(ranks: Sequence[StepTimes]) -> tuple[float, ...]:
    """Return the unprofiled steps that all ranks timed, those next to the capture first to count.

    A job that is killed leaves some ranks with a step more than others.
    """
    before = min((len(times.before_s) for times in ranks), default=0)
    after = min((len(times.after_s) for times in ranks), default=0)
    each = [
        (*times.before_s[len(times.before_s) - before :], *times.after_s[:after]) for times in ranks
    ]
    return tuple(float(median(step)) for step in zip(*each, strict=True))


def _add_memory(known: MemoryFigures | None, said: Sidecar) -> MemoryFigures | None:
    if known is None:
        if said.max_allocated_bytes is None:
            return None
        known = MemoryFigures(
            peak_bytes=said.max_allocated_bytes,
            peak_reserved_bytes=said.max_reserved_bytes,
            static_bytes=None,
            per_microbatch_bytes=None,
            transient_bytes=None,
            most_in_flight=0,
            limit_bytes=None,
        )
    reserved = said.reserved_bytes if said.reserved_bytes is not None else said.max_reserved_bytes
    others = None  # what is taken on the device by others than this process's PyTorch
    if said.total_bytes is not None and said.free_bytes is not None and reserved is not None:
        others = max(0, said.total_bytes - said.free_bytes - reserved)
    return replace(
        known,
        limit_bytes=known.limit_bytes if known.limit_bytes is not None else said.total_bytes,
        job_peak_bytes=said.max_allocated_bytes,
        free_bytes=said.free_bytes,
        other_bytes=others,
    )


def _agreed(
    sidecars: Sequence[Sidecar],
    what: str,
    of: Callable[[Sidecar], _Value | None],
    gaps: list[Gap],
) -> _Value | None:
    """Return what all ranks that say anything say; where they differ, none of it is used."""
    said = {value: sidecar for sidecar in sidecars if (value := of(sidecar)) not in {None, ()}}
    if len(said) < 2:
        return next(iter(said), None)
    shown = " and ".join(_shown(value) for value in said)
    file = next(iter(said.values())).file
    gaps.append(_differs(f"ranks say different {what} of one run: {shown}", file=file))
    return None


def _differs(message: str, *, file: str = "") -> Gap:
    return Gap(
        code=Code.SIDECAR_DIFFERS,
        message=message,
        hint="what the traces show is used; are traces and sidecars of the same capture?",
        file=file,
    )


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(median(known)) if known else None
