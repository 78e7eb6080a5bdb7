"""A run in → an order of passes made for it: its stages, its hops, its memory.

What passes and hops take on the mean of the run's own costs makes a pipeline that `orders` looks
through quickly; the simulator that all options are priced by judges what it finds. Where memory is
what keeps orders slow, stages that recompute or offload their activations are tried with it: what
was refused for memory becomes an option that has a price.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from debubble.errors import UsageError
from debubble.plan.baseline import Baseline
from debubble.plan.change import SEARCHED, Change
from debubble.plan.option import all_fit, headroom_after, quick_latency_s
from debubble.plan.orders.messages import ONE_QUEUE, MessageCosts, window_of
from debubble.plan.orders.pipeline import Pipeline, Rows, StageCosts, Times
from debubble.plan.orders.search import BestOrder, Search
from debubble.simulate.costs.memory import recomputed
from debubble.simulate.events import OrderCycle
from debubble.simulate.predict import mean_lengths
from debubble.timeline.model import PassKind
from debubble.timeline.schedules import (
    Action,
    Order,
    Placement,
    Shape,
    candidate_orders,
    place_stages,
)
from debubble.timeline.schedules.named import Kind
from debubble.units import NS_PER_S

# Of every way to place and cut stages so many quick rounds, before the best of them goes on.
_FIRST_ROUNDS = 6
# Rounds that tell whether a stage should recompute.
_KNOB_ROUNDS = 3
# Without limits of memory so much quicker: then they are what keeps orders slow.
_WORTH_A_KNOB = 1.02
# What another way to place stages must gain, judged by the same simulator.
_QUICK_SHARE = 0.7
# Passes of one kind up to which messages are run with every order, and `plan` judges moves.
_MOST_BY_PLAN = 160
_NEVER_ENDS = 2**62
# Of the limit, what orders leave: on a GPU one took 25 MiB more than the 4.7 GiB that
# it was made for.
_SPARED = 0.005
# Messages on queues take so many times as long to run as delays do.
_MESSAGES_COST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSearch:
    """How long to look for an order, and among what."""

    seconds: float | None = None
    rounds: int | None = None
    """Of each kind; for the same result on any machine."""
    seed: int = 0
    cuts_anew: bool = True
    """Whether stages may be cut and placed in another way."""
    schedules: frozenset[str] | None = None
    """Those that can be run by their names; None: all. Others are orders without a name."""
    offload_bytes_per_s: float | None = None
    """How quickly activations are copied to the host; None: they stay on the device."""
    clock: Callable[[], float] = field(default=time.monotonic, compare=False)
    progress: Callable[[int, int], None] = field(default=lambda _done, _all: None, compare=False)
    """Told how much is done, of how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search came to."""

    change: Change | None
    """The order, and how stages are cut for it; None where no order is better than named ones."""
    found: BestOrder
    pipeline: Pipeline


@dataclass(slots=True, kw_only=True)
class _Variant:
    """One way to place, cut and keep stages, with its search."""

    base: Change
    pipeline: Pipeline
    search: Search
    by_plan: Callable[[Rows], int | None]
    """What an order takes by the simulator that all options are priced by."""


def find_order(
    baseline: Baseline, looks: OrderSearch, split: tuple[int, ...] | None = None
) -> SearchResult | None:
    """Look for an order; None where none of this run's kind fits its memory.

    With `split` the layers may be cut so, too.
    """
    began = looks.clock()

    def stop(share: float) -> bool:
        if looks.seconds is None:
            return False
        spent = looks.clock() - began
        looks.progress(min(round(spent), round(looks.seconds)), round(looks.seconds))
        return spent > share * looks.seconds

    variants = [
        _variant(baseline, looks, base, placement)
        for base, placement in _bases(baseline, looks, split)
    ]
    # As layers are cut, and as they would best be: what stages keep goes with both.
    cut = [variant for variant in variants if variant.base.chunks is None]
    lighter = [_with_knobs(baseline, looks, variant, stop) for variant in cut]
    variants += [variant for variant in lighter if variant is not None]
    judged = []
    for number, variant in enumerate(variants):
        _begin(variant.search, looks)
        if (found := variant.search.found()) is not None:
            judged.append((variant.by_plan(found.rows) or _NEVER_ENDS, number))
    if not judged:
        return None
    best = variants[min(judged)[1]]
    _go_on(best.search, looks, stop)
    found = best.search.found()
    if found is None:
        return None
    order = best.pipeline.order(found.rows)
    named = found.name is not None and best.base == Change(schedule=SEARCHED)
    named &= looks.schedules is None or found.name in looks.schedules
    change = None if named else replace(best.base, order=order)
    return SearchResult(change=change, found=found, pipeline=best.pipeline)


def _begin(look: Search, looks: OrderSearch) -> None:
    """Run the first rounds of a way to place and cut stages, by which it is chosen or left."""
    for _ in range(min(_FIRST_ROUNDS, looks.rounds or _FIRST_ROUNDS)):
        if not look.go_on():
            break
    look.judge_on()
    look.judge_on()


def _go_on(look: Search, looks: OrderSearch, stop: Callable[[float], bool]) -> None:
    """Run the rounds that are left, the quick ones first."""
    while not stop(_QUICK_SHARE) and (looks.rounds is None or look.rounds < looks.rounds):
        if not look.go_on():
            break
    while not stop(1.0) and (looks.rounds is None or look.judged_rounds < looks.rounds):
        if not look.judge_on():
            break


def _bases(
    baseline: Baseline, looks: OrderSearch, split: tuple[int, ...] | None
) -> Iterator[tuple[Change, Placement]]:
    """Yield the ways to place and cut stages: as they are, and others where that is allowed."""
    ranks, chunks = len(baseline.ranks), baseline.source.chunks
    stages = tuple(tuple(sorted(rank.stages)) for rank in baseline.ranks)
    first = min(stage for own in stages for stage in own)
    now: Placement = tuple(tuple(stage - first for stage in own) for own in stages)
    yield Change(schedule=SEARCHED), now
    layers = baseline.source.split
    if not looks.cuts_anew or layers is None:
        return
    if split is not None and len(split) == len(layers) and split != tuple(layers):
        yield Change(schedule=SEARCHED, split=split), now
    for shape in (Shape.LOOP, Shape.V):
        for count in {1, 2} - {chunks}:
            if (shape is Shape.V) == (count > 1) and sum(layers) >= ranks * count:
                yield Change(schedule=SEARCHED, chunks=count), place_stages(shape, ranks, count)
    if chunks > 1 and sum(layers) >= 2 * ranks:
        for shape in (Shape.LOOP, Shape.V):
            placed = place_stages(shape, ranks, 2)
            if placed != now:
                yield Change(schedule=SEARCHED, chunks=2), placed


def _variant(
    baseline: Baseline, looks: OrderSearch, base: Change, placement: Placement
) -> _Variant:
    pipeline, sent = pipeline_of(baseline, base, placement)

    def by_messages(rows: Rows, _: Times | None = None) -> int:
        taken = None if sent is None else window_of(pipeline, rows, sent)
        return _NEVER_ENDS if taken is None else taken

    def by_plan(rows: Rows) -> int | None:
        change = replace(base, order=pipeline.order(rows))
        if all_fit(headroom_after(baseline, change)) is False:
            return None
        try:
            return round(quick_latency_s(baseline, change) * NS_PER_S)
        except OrderCycle:
            return None

    large = pipeline.block > _MOST_BY_PLAN
    return _Variant(
        base=base,
        pipeline=pipeline,
        search=Search(
            pipeline=pipeline,
            score=None if large or sent is None else by_messages,
            score_costs=1 if large or sent is None else _MESSAGES_COST,
            judge=by_messages if large and sent is not None else by_plan,
            seed=looks.seed,
        ),
        by_plan=by_plan,
    )


def _with_knobs(
    baseline: Baseline, looks: OrderSearch, variant: _Variant, stop: Callable[[float], bool]
) -> _Variant | None:
    """Let stages recompute or offload, one after the other, where memory keeps orders slow."""
    memory, pipeline = baseline.memory, variant.pipeline
    if memory is None or min(pipeline.limits) == inf or not baseline.trains:
        return None
    now = _quickest(pipeline)
    roomy = _quickest(replace(pipeline, limits=(inf,) * len(pipeline.limits)))
    if roomy is None or (now is not None and now <= _WORTH_A_KNOB * roomy):
        return None
    best: tuple[float, Change, Pipeline] | None = None
    chosen = variant.base
    left = set(range(len(pipeline.stages)))
    while left and not stop(_QUICK_SHARE):
        tries = []
        for stage in sorted(left):
            for base in _lightened(chosen, stage, looks.offload_bytes_per_s):
                lighter, _ = pipeline_of(baseline, base, pipeline.placement)
                taken = _quickest(lighter)
                # Nothing fits yet: go where the least is lacking.
                lacks = inf if taken is not None else -sum(min(0.0, x) for x in lighter.limits)
                tries.append((taken or inf, lacks, stage, base, lighter))
        taken_, _, stage, chosen, lighter = min(tries, key=lambda one: one[:3])
        left.discard(stage)
        reached = best[0] if best is not None else (now or inf)
        if taken_ < reached:
            best = (taken_, chosen, lighter)
        elif best is not None or now is not None:
            break
    if best is None:
        return None
    return _variant(baseline, looks, best[1], pipeline.placement)


def _lightened(base: Change, stage: int, rate: float | None) -> Iterator[Change]:
    """Yield a change in which one stage more recomputes, or offloads."""
    yield replace(base, recompute_stages=tuple(sorted((*(base.recompute_stages or ()), stage))))
    if rate is not None:
        stages = tuple(sorted((*(base.offload_stages or ()), stage)))
        yield replace(base, offload_stages=stages, offload_bytes_per_s=rate)


def _quickest(pipeline: Pipeline) -> int | None:
    """Return what the best order of a few rounds takes; None where none fits."""
    look = Search(pipeline=pipeline)
    for _ in range(_KNOB_ROUNDS):
        if not look.go_on():
            break
    found = look.found()
    return None if found is None else found.score


def pipeline_of(
    baseline: Baseline, base: Change, placement: Placement
) -> tuple[Pipeline, MessageCosts | None]:
    """Return what passes, hops and memory of a run cost with its stages placed and cut so.

    And its messages, where they share a queue: else they are as good as delays.
    """
    source = baseline.source
    count = base.microbatches or source.microbatches
    lengths: dict[tuple[int, int], list[int]] = {}
    tables: dict[str, dict[tuple[int, bool], list[int]]] = {
        name: {} for name in ("arrives", "wire", "sending", "drain")
    }
    orders = [_some_order(placement, count, kinds) for kinds in ("FB", "FIW")]
    gap = 0.0
    for order in orders:
        change = replace(base, order=order)
        engine, what_if = baseline.engine(change), baseline.what_if(change)
        found = mean_lengths(engine, source, what_if)
        passes, messages = engine.program.passes, engine.program.messages
        took = found.passes + found.pass_gaps
        for kind, stage, length in zip(passes.kind, passes.stage, took, strict=True):
            lengths.setdefault((int(kind), int(stage)), []).append(int(length))
        gap = float(found.batch_gaps.mean()) if len(found.batch_gaps) else 0.0
        columns = {
            "arrives": found.wire + found.batch_gaps[messages.sent],
            "wire": found.wire,
            "sending": found.sending,
            "drain": found.drain,
        }
        made = messages.producer
        keys = list(
            zip(
                passes.stage[made].tolist(),
                (passes.kind[made] == PassKind.F).tolist(),
                strict=True,
            )
        )
        for name, column in columns.items():
            for key, length in zip(keys, column.tolist(), strict=True):
                tables[name].setdefault(key, []).append(length)

    def mean(values: list[int] | None) -> int:
        return round(float(np.mean(values))) if values else 0

    stages = len([stage for own in placement for stage in own])
    costs = tuple(
        StageCosts(
            forward=mean(lengths[PassKind.F, stage]),
            input_gradient=mean(lengths[PassKind.I, stage]),
            weight_gradient=mean(lengths[PassKind.W, stage]),
            backward=mean(lengths[PassKind.B, stage]),
            held=0.0,
        )
        for stage in range(stages)
    )
    pipeline = Pipeline(
        placement,
        count,
        costs,
        tuple(mean(tables["arrives"].get((stage, True))) for stage in range(stages)),
        tuple(mean(tables["arrives"].get((stage, False))) for stage in range(stages)),
        (inf,) * len(placement),
        can_split=baseline.trains,
    )
    sent = None
    if what_if.communication in ONE_QUEUE:
        sent = MessageCosts(
            communication=what_if.communication,
            rendezvous=not source.wires.buffers,
            wire={key: mean(values) for key, values in tables["wire"].items()},
            sending={key: mean(values) for key, values in tables["sending"].items()},
            drain={key: mean(values) for key, values in tables["drain"].items()},
            batch_gap=round(gap),
        )
    return _with_memory(baseline, pipeline, replace(base, order=orders[1])), sent


def _with_memory(baseline: Baseline, pipeline: Pipeline, change: Change) -> Pipeline:
    """Add what microbatches hold, and what ranks have left for them beside all else."""
    memory = baseline.memory
    if memory is None or baseline.peaks(change) is None:
        return pipeline
    stages, scale = len(pipeline.stages), baseline.microbatch_scale(change)
    layers = baseline.split_of(change, stages) or (0,) * stages
    light = recomputed(memory).layer_activation_bytes
    costs = []
    for stage, cost in enumerate(pipeline.stages):
        layer, lighter = memory.layer_activation_bytes, True
        if stage in (change.offload_stages or ()):
            layer = 0.0
        elif stage in (change.recompute_stages or ()):
            layer = light
        else:
            lighter = False
        home = pipeline.home[stage]
        besides = memory.ranks[home].activation_bytes
        besides += memory.loss_activation_bytes * (stage == stages - 1)
        held = besides + layer * layers[stage]
        # From I to W it is all there, whatever waited for I.
        whole = besides + memory.layer_activation_bytes * layers[stage]
        leaves = stage > 0 and pipeline.home[stage - 1] != home
        costs.append(
            replace(
                cost,
                held=scale * held,
                halfway=scale * (whole * (1 + memory.halfway_share) - held),
                kept_forward=scale * memory.message_bytes * (stage == stages - 1),
                kept_input=scale * memory.message_bytes * leaves,
                # Torch would recompute, or copy back, for I and once more for each weight of W.
                can_split=not lighter,
            )
        )
    heavy = Pipeline(
        pipeline.placement,
        pipeline.microbatches,
        tuple(costs),
        pipeline.up,
        pipeline.down,
        pipeline.limits,
        can_split=pipeline.can_split,
    )
    rows = heavy.joined(heavy.rows(change.order or []))
    peaks = baseline.peaks(replace(change, order=heavy.order(rows))) or ()
    limits = tuple(
        inf if limit is None else limit * (1 - _SPARED) - (others or 0.0) - (peak.peak_bytes - most)
        for limit, others, peak, most in zip(
            baseline.limits, baseline.others, peaks, heavy.most_held(rows), strict=True
        )
    )
    return replace(heavy, limits=limits)


def _some_order(placement: Placement, microbatches: int, kinds: str) -> Order:
    """Return an order of these kinds: one that has a name, else the plainest there is."""
    known = list(candidate_orders(placement, frozenset(kinds), microbatches))
    if known:
        return known[-1 if kinds == "FB" else 0][1]
    backward: tuple[Kind, ...] = ("B",) if kinds == "FB" else ("I", "W")
    order: Order = []
    for own in placement:
        forwards = [Action(stage, "F", m) for stage in own for m in range(microbatches)]
        order.append(
            forwards
            + [
                Action(stage, kind, m)
                for stage in reversed(own)
                for m in range(microbatches)
                for kind in backward
            ]
        )
    return order


def check_search(looks: OrderSearch, baseline: Baseline) -> None:
    """Refuse to look for an order of a run that has none to be changed."""
    if not baseline.trains:
        raise UsageError(
            "forward passes alone have one order", hint="leave --search out: there is none to find"
        )
    if looks.seconds is None and looks.rounds is None:
        raise UsageError("a search has to end", hint="say how long: --search 10s")
