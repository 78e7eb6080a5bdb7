"""What a user asks of a run, and says of it → the change to weigh, or how to plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from debubble.errors import Code, Gap, UsageError
from debubble.plan.baseline import AlsoRun, Baseline
from debubble.plan.change import Change, Hold
from debubble.plan.context_length import OtherLength
from debubble.plan.emit import EMITTERS
from debubble.plan.kv_cache import Cache
from debubble.plan.lever import OrderSearch
from debubble.plan.levers.overlap import say_slowdown
from debubble.plan.option import Idea
from debubble.plan.plan import Plan
from debubble.simulate.communication import WAITED, usual_communication
from debubble.simulate.costs.wire_pools import Hop
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import Timeline
from debubble.timeline.schedules import Order, state_schedule
from debubble.units import NS_PER_S, PLAIN_NUMBER, counted, parse_rate

ANY = "any"
"""Whom to plan for where no framework is to set limits."""
_TOKENS = re.compile(rf"{PLAIN_NUMBER}(x?)")
# Beyond this nobody would believe a line through what was measured.
_MOST_TOKENS = 1000.0
_HOP = re.compile(r"([0-9]+):([0-9]+)=(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What was said of tokens a microbatch; None where nothing was."""

    asked: str | None = None
    """So many, or so many times as many: `2048`, `2x`."""
    measured: int | None = None
    also: int | None = None
    """In the other run."""

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
                    "the tokens of a microbatch are unknown",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What is said of a run that its traces may not tell; None where nothing is."""

    tokens: Tokens = field(default_factory=Tokens)
    layers: tuple[int, ...] | None = None
    limit_bytes: float | None = None
    """What a rank may hold."""
    schedule: str | None = None
    communication: str | None = None
    """How messages of the run travel, where the way that is found does not fit."""
    latency_ns: float | None = None
    """Of a batch without the profiler."""


def also_run(
    timeline: Timeline, figures: PipelineFigures, split: tuple[int, ...] | None, stated: Stated
) -> AlsoRun:
    """Return another run of the model, whose layers its traces show, the user states or its job."""
    shown, tokens = any(rank.layers for rank in figures.ranks), stated.tokens
    return AlsoRun(
        timeline=timeline,
        figures=figures,
        layers=None if shown else stated.layers or split,
        token_ratio=tokens.also / tokens.measured if tokens.also and tokens.measured else None,
    )


def gaps_of(baseline: Baseline) -> Iterator[Gap]:
    """Yield what is wrong with what a run is changed by: another run, or layers as stated."""
    if baseline.pooled is not None:
        yield from baseline.pooled.gaps
    layers = {row.stage: row.layers for rank in baseline.ranks for row in rank.layers}
    shown, stated = tuple(layers[stage] for stage in sorted(layers)), baseline.source.split
    if stated is not None and len(shown) == len(stated) and shown != tuple(stated):
        stated_layers, seen = (",".join(map(str, split)) for split in (stated, shown))
        yield Gap(
            code=Code.LAYERS_DIFFER,
            message=f"--layers says {stated_layers}, and the traces show {seen}",
            hint="leave --layers out, unless its layers are not alike",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """How to plan."""

    stated: Stated = field(default_factory=Stated)
    most_microbatches: int | None = None
    hold: Hold | None = None
    """What stays where the number of microbatches changes: else the batch of a run that trains,
    with larger ones apart, and either where nothing is trained."""
    cache: Cache | None = None
    planned_for: str | None = None
    """The framework that must be able to run all options: else its own; `ANY` lifts that."""
    search: OrderSearch | None = None
    """Look for an order that has no name, too."""
    barred: frozenset[str] = frozenset()
    """Levers that may not be used, by their keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and what becomes of it with other tokens."""

    plan: Plan
    stated: Stated = field(default_factory=Stated)
    length: OtherLength | None = None
    """None where no other length was asked for, or nothing can be simulated."""

    @property
    def tokens(self) -> float | None:
        """Of a microbatch as it was measured."""
        return self.stated.tokens.of_run(self.plan.baseline)


def check_frameworks(*names: str | None) -> None:
    """Refuse the name of a framework that nothing can be written for."""
    for name in names:
        if name not in {None, ANY, *EMITTERS}:
            raise UsageError(
                f"no framework is called {name!r}", hint=f"one of {', '.join(EMITTERS)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRequest:
    """What to change in a measured run; None: as it is."""

    stated: Stated = field(default_factory=Stated)
    microbatches: int | None = None
    hold: Hold | None = None
    schedule: str | None = None
    """A name, or the path of an order as CSV."""
    chunks: int | None = None
    split: tuple[int, ...] | None = None
    overlap: bool | None = None
    recompute: bool | None = None
    hops: tuple[str, ...] = ()
    """`2:3=5GB/s`."""

    def idea(self, baseline: Baseline, token_scale: float | None) -> Idea:
        """Make a change of what is asked for; what is as it was already is no change."""
        order = None if self.schedule is None else self._order_of_file(baseline)
        schedule = self.schedule or baseline.schedule
        chunks, microbatches = self.chunks, self.microbatches
        if order is None and schedule == baseline.schedule:
            chunks = chunks or baseline.source.chunks
        same_order = (schedule, chunks) == (baseline.schedule, baseline.source.chunks)
        if order is not None:
            microbatches = 1 + max(action.microbatch for actions in order for action in actions)
        if self.hold is not None and microbatches is None:
            raise UsageError("--hold needs --microbatches", hint="add --microbatches N")
        if microbatches == baseline.source.microbatches:
            microbatches = None
        if microbatches is not None and microbatches < 1:
            raise UsageError(f"{microbatches} microbatches make no step", hint="give 1 or more")
        samples = (baseline.setting.microbatch_size or 0) * baseline.source.microbatches
        if self.hold == "batch" and samples and (microbatches or 0) > samples:
            raise UsageError(
                f"{counted(samples, 'sample')} of a batch do not cut into {microbatches} "
                "microbatches",
                hint="a microbatch has one sample or more",
            )
        change = Change(
            split=self._new_split(baseline),
            microbatches=microbatches,
            hold="batch" if self.hold == "batch" and microbatches else "microbatch",
            schedule=None if same_order else schedule,
            order=order,
            chunks=None if same_order else chunks,
            overlap=True if self._overlaps(schedule, baseline.framework) else None,
            token_scale=token_scale,
            recompute=None if self.recompute == baseline.ranks[0].recomputes else self.recompute,
        )
        trains, would = _trains(baseline.order), _trains(baseline.what_if(change).order)
        if change.recompute is not None and not trains:
            raise UsageError("nothing is recomputed without backward passes", hint="leave it out")
        if trains != would:
            kinds = "trains", "has forward passes alone"
            raise UsageError(
                f"the run {kinds[not trains]}, and this schedule {kinds[not would]}",
                hint="ask for a schedule of the same kind",
            )
        assumed = (say_slowdown(baseline),) if change.overlap else ()
        change = replace(change, hops_ns=_hops_ns(baseline, change, self.hops))
        return Idea(lever="asked", change=change, assumptions=assumed)

    def _new_split(self, baseline: Baseline) -> tuple[int, ...] | None:
        known = baseline.source.split
        if self.split is not None and known is not None and sum(self.split) != sum(known):
            asked, now = (",".join(map(str, layers)) for layers in (self.split, known))
            raise UsageError(
                f"the split {asked} has {sum(self.split)} layers, the model has {sum(known)}",
                hint=f"now it is {now}",
            )
        return None if self.split == known else self.split

    def _order_of_file(self, baseline: Baseline) -> Order | None:
        statement = state_schedule(self.schedule or "", self.chunks)
        if statement.order is None:
            return None
        written = 1 + max(action.microbatch for actions in statement.order for action in actions)
        microbatches = written if self.microbatches is None else self.microbatches
        return statement.order_for(len(baseline.ranks), microbatches, 1)

    def _overlaps(self, schedule: str, framework: str | None) -> bool:
        """Tell whether overlap is asked for, of a schedule that has none."""
        if self.overlap is not None and usual_communication(schedule, framework) not in WAITED:
            whose = {"megatron": "Megatron"}.get(framework or "", "torch's runtime")
            raise UsageError(
                f"{whose} always lets transfers of {schedule} run beside compute",
                hint="--overlap is for 1f1b, gpipe and forward-only",
            )
        if self.overlap and framework == "megatron":
            raise UsageError(
                "Megatron overlaps transfers of interleaved schedules alone",
                hint="ask for --schedule interleaved-1f1b: there it does",
            )
        return bool(self.overlap)


def _trains(order: Order) -> bool:
    return any(action.kind != "F" for actions in order for action in actions)


def _hops_ns(
    baseline: Baseline, change: Change, asked: Sequence[str]
) -> tuple[tuple[Hop, int], ...]:
    """Return what messages of some hops take at the rates that are asked for: `2:3=5GB/s`."""
    what_if = baseline.what_if(change)
    names = [rank.rank for rank in baseline.ranks]
    places = {name: place for place, name in enumerate(names)}
    hops = set(_hops_of(what_if.order))
    size = baseline.source.wires.message_bytes * what_if.token_scale
    if asked and size <= 0:
        hint = "record with record_shapes=True"
        if baseline.ranks[0].timers:
            hint = "give the table a column of bytes, in the rows of sends or receives"
        raise UsageError("the size of messages is unknown", hint=hint)
    found = {}
    for text in asked:
        read = _HOP.fullmatch(text.strip())
        if read is None:
            raise UsageError(f"{text!r} is no hop", hint="write it as 2:3=5GB/s, ranks and rate")
        hop = places.get(int(read[1]), -1), places.get(int(read[2]), -1)
        if hop not in hops:
            known = ", ".join(f"{names[here]}:{names[there]}" for here, there in sorted(hops))
            raise UsageError(
                f"no message goes from rank {int(read[1])} to rank {int(read[2])}",
                hint=f"hops are {known}",
            )
        found[hop] = round(size / parse_rate(read[3]) * NS_PER_S)
    return tuple(found.items())


def _hops_of(order: Order) -> Iterator[Hop]:
    """Yield the hops that messages of an order take, by positions in the pipeline."""
    holder = {
        action.stage: position for position, actions in enumerate(order) for action in actions
    }
    trains = any(action.kind != "F" for actions in order for action in actions)
    for stage, here in holder.items():
        ahead = holder.get(stage + 1, here)
        if ahead != here:
            yield here, ahead
            if trains:
                yield ahead, here
