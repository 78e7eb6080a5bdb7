"""What `plan` and `simulate` share: a change in words and as data, and what it starts from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from debubble.analysis import Analysis
from debubble.errors import Code, Gap, UsageError
from debubble.plan.baseline import AlsoRun, Baseline
from debubble.plan.change import Change
from debubble.plan.lever import Refusal
from debubble.plan.levers import LEVERS
from debubble.plan.levers.order import OrderChoice
from debubble.plan.option import Headroom, Option
from debubble.plan.plan import Plan
from debubble.report.answers.base import Part
from debubble.simulate.communication import Communication
from debubble.timeline.job import RunBasis
from debubble.timeline.schedules import format_order
from debubble.units import NS_PER_S, PLAIN_NUMBER, counted, show_duration, show_gain, show_percent

_TOKENS = re.compile(rf"{PLAIN_NUMBER}(x?)")
# Beyond this nobody would believe a line through what was measured.
_MOST_TOKENS = 1000.0


class ChangePart(Part, frozen=True, kw_only=True, omit_defaults=True):
    """What is changed; what stays as it is, is left out."""

    paths: ClassVar = {"repaired_hops": "repaired"}

    microbatches: int | None = None
    hold: str | None = None
    split: list[int] | None = None
    schedule: str | None = None
    chunks: int | None = None
    overlap: bool | None = None
    defer_receives: bool | None = None
    recompute: bool | None = None
    recompute_stages: list[int] | None = None
    offload_stages: list[int] | None = None
    repaired_hops: list[list[int]] | None = None
    token_scale: float | None = None
    hops: list[str] | None = None
    """Rates, as they were given: `2:3=5GB/s`."""
    by_hand: str | None = None

    @classmethod
    def of(cls, source: object, **given: Any) -> Self:
        """Return a change as data; what is held says something of another number alone."""
        if not getattr(source, "microbatches", None):
            given |= {"microbatches": None, "hold": None}
        return super().of(source, **given)


class IntervalPart(Part, frozen=True, kw_only=True, omit_defaults=True):
    """What four of five runs should lie in: the low end and the high end."""

    paths: ClassVar = {
        "batch_latency_s": ("low_ns", "high_ns"),
        "throughput_gain_fraction": ("throughput_low", "throughput_high"),
    }

    batch_latency_s: list[float] | None = None
    throughput_gain_fraction: list[float] | None = None


class ProfilerPart(Part, frozen=True, kw_only=True):
    """What the profiler cost, by the job's own times; all times are without it."""

    overhead_fraction: float
    steps_timed: int
    sentence: str


def describe(change: Change) -> str:
    """Say a change in words."""
    parts = [said for lever in LEVERS if (said := lever.words(change))]
    if change.by_hand is not None:
        parts.append(change.by_hand)
    if change.token_scale is not None:
        parts.append(f"{change.token_scale:.3g} times as many tokens")
    return ", ".join(parts) or "nothing changed"


def say_gain(option: Option) -> str:
    """Write what an option gains in throughput, with its interval."""
    return show_gain(option.throughput_gain, option.throughput_low, option.throughput_high)


def describe_refused(refused: Refusal) -> str:
    """Say what is refused, also where nothing of it was found that could be described."""
    if refused.lever == "split" and refused.change.split is None:
        return "another split"
    without_change = {"order": "an order of its own", "kv_cache": "room for a KV cache"}
    return without_change.get(refused.lever) or describe(refused.change)


def headroom_bytes(ranks: Sequence[Headroom] | None) -> list[int | None] | None:
    """Return what each rank has left of its memory."""
    if ranks is None:
        return None
    return [None if rank.bytes is None else round(rank.bytes) for rank in ranks]


def peak_bytes(ranks: Sequence[Headroom] | None) -> list[int] | None:
    """Return the peak memory of each rank."""
    return None if ranks is None else [round(rank.peak_bytes) for rank in ranks]


def answer_profiler(run: Analysis, basis: RunBasis) -> ProfilerPart | None:
    """Say what the profiler cost that times are rid of; None where they are not by sidecars."""
    job = run.job
    if basis.source != "sidecars" or job.overhead_fraction is None:
        return None
    return ProfilerPart.of(
        job,
        sentence=f"times: unprofiled; the profiler cost {show_gain(job.overhead_fraction)} by the "
        f"job's own times ({counted(job.steps_timed, 'step')}), on all parts of a step alike",
    )


def say_basis(basis: str, profiler: ProfilerPart | None = None) -> str:
    """Say on which basis times are."""
    return profiler.sentence if profiler else f"times: {basis}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What was said of tokens a microbatch; None where nothing was."""

    asked: str | None = None
    """So many, or so many times as many: `2048`, `2x`."""
    measured: int | None = None
    also: int | None = None
    """In the other run."""

    def told_by(self, run: Analysis, also: Analysis | None) -> Tokens:
        """Return the same with what the jobs of both runs say where nothing was said."""
        other = also.tokens if also else None
        return replace(self, measured=self.measured or run.tokens, also=self.also or other)

    def of_run(self, baseline: Baseline) -> float | None:
        """Return the tokens of a microbatch as it is, where that was said of either run."""
        if self.measured is not None:
            return float(self.measured)
        if self.also is not None and baseline.pooled is not None:
            return self.also / baseline.pooled.token_ratio
        return None

    def scale(self, baseline: Baseline) -> float | None:
        """Return how many times as many tokens are asked for; None for as many as there are."""
        if self.asked is None:
            return None
        scale, is_count = self._read()
        if is_count:
            measured = self.of_run(baseline)
            if measured is None:
                raise UsageError(
                    "how many tokens a microbatch has as it is cannot be told",
                    hint="add --tokens-measured N, or ask for times as many: --tokens 2x",
                )
            scale /= measured
        _refuse_too_far(scale)
        return None if scale == 1.0 else scale

    def check(self, *, has_also: bool) -> None:
        """Refuse what is no number, too far away, or of no other run, before anything long."""
        if self.also is not None and not has_also:
            raise UsageError(
                "--tokens-measured names two runs, and there is one", hint="add --also TRACES"
            )
        if self.asked is None:
            return
        scale, is_count = self._read()
        if not is_count or self.measured is not None:
            _refuse_too_far(scale / (self.measured or 1) if is_count else scale)

    def _read(self) -> tuple[float, bool]:
        read = _TOKENS.fullmatch((self.asked or "").strip())
        if read is None or float(read[1]) <= 0:
            raise UsageError(
                f"{self.asked!r} is no number of tokens", hint="write it as 2048, or 2x"
            )
        return float(read[1]), not read[2]


def _refuse_too_far(scale: float) -> None:
    if not 1 / _MOST_TOKENS <= scale <= _MOST_TOKENS:
        raise UsageError(
            f"{scale:.3g} times as many tokens cannot be predicted from this run",
            hint="a run of about that length can tell",
        )


def start_from(  # noqa: PLR0913 (what the traces may not tell, one argument each)
    run: Analysis,
    also: Analysis | None,
    *,
    tokens: Tokens,
    layers: tuple[int, ...] | None,
    limit_bytes: float | None,
    schedule: str | None,
    latency_ns: float | None = None,
    communication: str | None = None,
) -> Baseline:
    """Fit the run, with another of its model where one was given."""
    other = None
    if also is not None:
        if also.pipeline.kind != run.pipeline.kind:
            raise UsageError(
                "one of the runs trains, and the other has forward passes alone",
                hint="--also takes another run of the same kind",
            )
        told = any(rank.layers for rank in also.pipeline.ranks)
        other = AlsoRun(
            timeline=also.timeline,
            figures=also.pipeline,
            layers=None if told else layers or also.job.split_for(also.pipeline),
            token_ratio=tokens.also / tokens.measured if tokens.also and tokens.measured else None,
        )
    return run.baseline(
        layers=layers,
        limit_bytes=limit_bytes,
        schedule=schedule,
        latency_ns=latency_ns,
        also=other,
        communication=None if communication is None else Communication(communication),
    )


def warnings_of(run: Analysis, also: Analysis | None, baseline: Baseline) -> tuple[Gap, ...]:
    """Return all warnings, each once: of the run, then those of what it is changed by."""
    gaps = [*run.warnings, *(also.warnings if also else ())]
    gaps += baseline.pooled.gaps if baseline.pooled else ()
    layers = {own.stage: own.layers for rank in run.pipeline.ranks for own in rank.layers}
    shown, stated = tuple(layers[stage] for stage in sorted(layers)), baseline.source.split
    if stated is not None and len(shown) == len(stated) and shown != tuple(stated):
        said, seen = (",".join(map(str, split)) for split in (stated, shown))
        gaps.append(
            Gap(
                code=Code.LAYERS_DIFFER,
                message=f"--layers says {said}, and the traces show {seen}",
                hint="leave --layers out, unless its layers are not alike",
            )
        )
    return tuple(dict.fromkeys(gaps))


class OrderPart(Part, frozen=True, kw_only=True):
    """What an order of its own buys beyond the best schedule with a name."""

    paths: ClassVar = {
        "named_latency_s": "named.window_ns",
        "beyond_named_fraction": "beyond_named",
        "rounds": "looked.found.rounds",
        "judged_rounds": "looked.found.judged_rounds",
        "orders_tried": "looked.found.tried",
    }

    option: int
    """Its place among all options."""
    named: str | None
    """None where none that has a name fits the memory of all ranks."""
    named_latency_s: float | None
    beyond_named_fraction: float | None
    """Of the latency of the best with a name."""
    lower_bound_s: float
    """No order of these stages can be under it, with messages as a delay a hop."""
    above_bound_fraction: float
    rounds: int
    judged_rounds: int
    """Rounds in which orders were judged by the simulator that prices all options."""
    orders_tried: int
    order: str
    """The passes of each rank, as CSV."""


def answer_order(plan: Plan, ordered: OrderChoice) -> OrderPart:
    """Say where it stands among the options, and how far it was looked for."""
    found, correction = ordered.looked.found, plan.baseline.correction
    return OrderPart.of(
        ordered,
        option=plan.options.index(ordered.option),
        named=None if ordered.named is None else ordered.named_as,
        lower_bound_s=found.bound * correction / NS_PER_S,
        above_bound_fraction=found.window / found.bound - 1,
        order=format_order(ordered.option.change.order or []),
    )


def say_order(ordered: OrderChoice) -> str:
    """Say what an order of its own buys beyond the best with a name, and how far it can go."""
    found = ordered.looked.found
    rounds = counted(found.rounds + found.judged_rounds, "round")
    above = show_percent(found.window / found.bound - 1)
    far = f"{rounds}; with messages as a delay a hop it is {above} above what no order can be under"
    took = show_duration(ordered.option.window_ns)
    if ordered.named is None:
        return f"No schedule with a name fits, recomputing or not; this order does: {took} ({far})."
    return (
        f"Beyond the best schedule with a name, {ordered.named_as}, an order of its own buys "
        f"{show_percent(ordered.beyond_named)}: {took} instead of "
        f"{show_duration(ordered.named.window_ns)} ({far})."
    )
