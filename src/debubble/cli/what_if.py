"""Words about a change in → the change, checked against the run that it is of."""

from __future__ import annotations

import re
from dataclasses import dataclass

import click

from debubble.cli.flags import gathered
from debubble.cli.planning import parse_layers
from debubble.cli.tokens import Tokens, token_options
from debubble.errors import UsageError
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.plan.hop import Hop, set_hops
from debubble.plan.option import Idea
from debubble.plan.overlap import measure_slowdown, say_slowdown
from debubble.schedules import Order, state_schedule
from debubble.simulate.communication import WAITED, usual_communication
from debubble.timeline.model import Timeline
from debubble.units import counted, parse_rate

# Of a measured run's step many runs are drawn, which takes half a minute for so many.
MOST_PASSES = 50_000
_HOP = re.compile(r"([0-9]+):([0-9]+)=(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What was typed; None where nothing was."""

    microbatches: int | None
    hold: str | None
    schedule: str | None
    chunks: int | None
    split: str | None
    overlap: str | None
    recompute: str | None
    hops: tuple[str, ...]
    tokens: Tokens
    layers: str | None
    schedule_measured: str | None
    memory_limit: str | None


what_if_options = gathered(
    "said",
    Said,
    click.option("--microbatches", type=int, metavar="M", help="Microbatches in a step."),
    click.option(
        "--schedule", metavar="NAME|FILE", help="The schedule, or an order of your own as CSV."
    ),
    click.option("--chunks", type=click.IntRange(min=1), metavar="N", help="Stages a rank."),
    click.option(
        "--hold",
        type=click.Choice(["microbatch", "batch"]),
        help="What keeps its size when --microbatches changes.  [default: microbatch]",
    ),
    click.option("--split", metavar="N,N,...", help="Layers of each stage."),
    click.option("--overlap", type=click.Choice(["on", "off"]), help="Transfers beside compute."),
    click.option(
        "--recompute", type=click.Choice(["on", "off"]), help="Activations once more, not kept."
    ),
    click.option(
        "--hop",
        "hops",
        multiple=True,
        metavar="A:B=RATE",
        help="From rank A to B, such as 2:3=5GB/s.",
    ),
    token_options("Tokens a microbatch, or times as many: 2x."),
    click.option("--layers", metavar="N,N,...", help="Layers of each stage as it is, if not told."),
    click.option("--schedule-measured", metavar="NAME", help="The schedule that ran, if not told."),
    click.option("--memory-limit", metavar="SIZE", help="Of each rank, such as 80GiB."),
)


def what_to_ask(baseline: Baseline, timeline: Timeline, said: Said) -> Idea:
    """Make a change of what was said; what is as it was already is no change."""
    order = None if said.schedule is None else _order_of_file(baseline, said)
    schedule = said.schedule or baseline.schedule
    chunks, microbatches = said.chunks, said.microbatches
    if order is None and schedule == baseline.schedule:
        chunks = chunks or baseline.source.chunks
    same_order = (schedule, chunks) == (baseline.schedule, baseline.source.chunks)
    if order is not None:
        microbatches = 1 + max(action.microbatch for actions in order for action in actions)
    if said.hold is not None and microbatches is None:
        raise UsageError(
            "--hold says something of --microbatches only", hint="add --microbatches N"
        )
    if microbatches == baseline.source.microbatches:
        microbatches = None
    if microbatches is not None:
        if microbatches < 1:
            raise UsageError(f"{microbatches} microbatches make no step", hint="give 1 or more")
        _refuse_too_many(baseline, microbatches, chunks or 1)
    change = Change(
        split=None if said.split is None else _split(baseline, said.split),
        microbatches=microbatches,
        hold="batch" if said.hold == "batch" and microbatches else "microbatch",
        schedule=None if same_order else schedule,
        order=order,
        chunks=None if same_order else chunks,
        overlap=True if _overlaps(said.overlap, schedule, baseline.framework) else None,
        token_scale=said.tokens.scale(baseline),
        recompute=_recompute(said.recompute, baseline),
    )
    _refuse_other_kind(baseline, baseline.what_if(change).order)
    idea = Idea(lever="asked", change=change)
    if change.overlap:
        slowdown = measure_slowdown(timeline, baseline)
        idea = Idea(
            lever="asked",
            change=change,
            slowdown=slowdown or 1.0,
            assumptions=(say_slowdown(slowdown),),
        )
    rates = dict(_hop(text) for text in said.hops)
    return set_hops(baseline, idea, rates) if rates else idea


def _split(baseline: Baseline, text: str) -> tuple[int, ...] | None:
    split, known = parse_layers(text), baseline.source.split
    if known is not None and sum(split) != sum(known):
        now = ",".join(map(str, known))
        raise UsageError(
            f"the split {text} has {sum(split)} layers, the model has {sum(known)}",
            hint=f"now it is {now}",
        )
    return None if split == known else split


def _order_of_file(baseline: Baseline, said: Said) -> Order | None:
    statement = state_schedule(said.schedule or "", said.chunks)
    if statement.order is None:
        return None
    written = 1 + max(action.microbatch for actions in statement.order for action in actions)
    microbatches = written if said.microbatches is None else said.microbatches
    return statement.order_for(len(baseline.ranks), microbatches, 1)


def _refuse_too_many(baseline: Baseline, microbatches: int, chunks: int) -> None:
    if len(baseline.ranks) * microbatches * chunks > MOST_PASSES:
        raise UsageError(
            f"{counted(microbatches, 'microbatch', 'microbatches')} are more than can be simulated",
            hint=f"ranks x chunks x microbatches may be {MOST_PASSES:,}",
        )


def _refuse_other_kind(baseline: Baseline, order: Order) -> None:
    trains, would = _trains(baseline.order), _trains(order)
    if trains != would:
        kinds = "trains", "has forward passes alone"
        raise UsageError(
            f"the run {kinds[not trains]}, and this schedule {kinds[not would]}",
            hint="ask for a schedule of the same kind",
        )


def _recompute(said: str | None, baseline: Baseline) -> bool | None:
    """Read what is asked of recomputing; as it is already, it is no change."""
    if said is None or (said == "on") == baseline.ranks[0].recomputes:
        return None
    if not _trains(baseline.order):
        raise UsageError("nothing is recomputed without backward passes", hint="leave it out")
    return said == "on"


def _trains(order: Order) -> bool:
    return any(action.kind != "F" for actions in order for action in actions)


def _overlaps(overlap: str | None, schedule: str, framework: str | None) -> bool:
    """Tell whether overlap is asked for, of a schedule that has none."""
    if overlap is not None and usual_communication(schedule, framework) not in WAITED:
        whose = {"megatron": "Megatron"}.get(framework or "", "torch's runtime")
        raise UsageError(
            f"{whose} always lets transfers of {schedule} run beside compute",
            hint="--overlap is for 1f1b, gpipe and forward-only",
        )
    if overlap == "on" and framework == "megatron":
        raise UsageError(
            "Megatron overlaps transfers of interleaved schedules alone",
            hint="ask for --schedule interleaved-1f1b: there it does",
        )
    return overlap == "on"


def _hop(text: str) -> tuple[Hop, float]:
    read = _HOP.fullmatch(text.strip())
    if read is None:
        raise UsageError(f"{text!r} is no hop", hint="write it as 2:3=5GB/s, ranks and rate")
    return (int(read[1]), int(read[2])), parse_rate(read[3])
