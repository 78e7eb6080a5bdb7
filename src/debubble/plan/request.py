"""What a user asks of a run, and says of it → the change to weigh."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from debubble.errors import Code, Gap, UsageError
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change, Hold
from debubble.plan.emit import EMITTERS
from debubble.plan.levers.overlap import say_slowdown
from debubble.plan.option import Idea
from debubble.simulate.communication import WAITED, usual_communication
from debubble.simulate.costs.wire_pools import Hop
from debubble.timeline.schedules import Order, state_schedule
from debubble.units import NS_PER_S, PLAIN_NUMBER, counted, parse_rate

ANY = "any"
"""Whom to plan for where no framework is to set limits."""
_TOKENS = re.compile(rf"{PLAIN_NUMBER}(x?)")
# Beyond this nobody would believe a line through what was measured.
_MOST_TOKENS = 1000.0
_HOP = re.compile(r"([0-9]+):([0-9]+)=(.+)")


def token_scale(asked: str | None, measured: int | None) -> float | None:
    """Return how many times as many tokens a microbatch is to have; None for as many as it has.

    Asked for are so many, `2048`, where it is known how many were measured; or `2x`.
    """
    if asked is None:
        return None
    read = _TOKENS.fullmatch(asked.strip())
    if read is None or float(read[1]) <= 0:
        raise UsageError(f"{asked!r} is no number of tokens", hint="write it as 2048, or 2x")
    scale = float(read[1])
    if not read[2]:
        if measured is None:
            raise UsageError(
                "the tokens of a microbatch are unknown", hint="ask for times as many: --tokens 2x"
            )
        scale /= measured
    if not 1 / _MOST_TOKENS <= scale <= _MOST_TOKENS:
        raise UsageError(
            f"{scale:.3g} times as many tokens cannot be predicted from this run",
            hint="a run of about that length can tell",
        )
    return None if scale == 1.0 else scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What is said of a run that its traces may not tell; None where nothing is."""

    layers: tuple[int, ...] | None = None
    limit_bytes: float | None = None
    """What a rank may hold."""
    schedule: str | None = None


def layers_differ(baseline: Baseline) -> Iterator[Gap]:
    """Yield that layers were stated which the traces contradict."""
    layers = {row.stage: row.layers for rank in baseline.ranks for row in rank.layers}
    shown, stated = tuple(layers[stage] for stage in sorted(layers)), baseline.source.split
    if stated is not None and len(shown) == len(stated) and shown != tuple(stated):
        stated_layers, seen = (",".join(map(str, split)) for split in (stated, shown))
        yield Gap(
            code=Code.LAYERS_DIFFER,
            message=f"--layers says {stated_layers}, and the traces show {seen}",
            hint="leave --layers out, unless its layers are not alike",
        )


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
    tokens: str | None = None
    """Of a microbatch: `2048`, or times as many, `2x`."""

    def idea(self, baseline: Baseline, measured_tokens: int | None) -> Idea:
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
            token_scale=token_scale(self.tokens, measured_tokens),
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
