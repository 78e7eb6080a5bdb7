"""A `Ledger` in → the causes that matter by what removing them saves, and whose they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from debubble.ledger.causes import CAUSE_OF, Cause, RootKind
from debubble.ledger.ledger import MATTERS, Ledger
from debubble.ledger.savings import ALL, HEAD_OF_LINE, Remedies, Saving
from debubble.links.hop_times import Hop
from debubble.simulate.lengths import hop_of
from debubble.timeline.replicas import SlowWorker

# What buys less than a tenth of it is little.
LITTLE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MainCause:
    """A cause that matters, and whose it mostly is."""

    cause: str
    saving: Saving
    rank: int | None = None
    stage: int | None = None
    hop: Hop | None = None
    slow_hops: tuple[Hop, ...] = ()
    """All that are slow, the most expensive first."""
    workers: tuple[SlowWorker, ...] = ()
    """All devices that are slow, the one to look at first."""
    times_expected: float | None = None
    """How many times as long messages of the first hop mostly take as those of its peers, passes of
    the first device as those elsewhere, or the longest microbatch as most."""
    culprit_saved_ns: int | None = None
    """What putting right this culprit alone would save, where it can be put right alone; of data,
    what microbatches that all take what most do would save: with less work."""

    times_equal: float | None = None
    """Of a stage that is longer than others: how many times an equal share it takes."""
    slower_layers: float | None = None
    """Of a stage that is long because its layers are slow, and not because it has more of them or
    a head: how many times as long as layers of other stages they take. `culprit_saved_ns` is what
    layers as fast as those would save."""

    @property
    def buys_ns(self) -> int:
        """What is said that putting it right would save: of slow hops, their repair."""
        repair = self.culprit_saved_ns if self.slow_hops else None
        return self.saving.saved_ns if repair is None else repair


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What takes more of a step than all waiting does."""

    what: str
    """`compute`, `host`, `collective`, `gaps`, or what lies between steps, such as `optimizer`."""
    length_ns: int
    waits_ns: int
    """Waiting for each other, a step and rank."""


def name_causes(ledger: Ledger) -> tuple[MainCause, ...]:
    """Return the causes that matter, the largest saving first."""
    noise = max(MATTERS, abs(ledger.replay_error or 0.0))
    kept = [
        saving
        for saving in ledger.savings
        if saving.cause != ALL
        and max(saving.saved_fraction, _of_slow_hops(ledger, saving)) >= noise
    ]
    named = [_name(ledger, saving) for saving in kept]
    return tuple(sorted(named, key=lambda matter: -matter.buys_ns))


def _of_slow_hops(ledger: Ledger, saving: Saving) -> float:
    """Return what repairing slow hops would save, as a share: that is more than their tails."""
    if saving.cause != Cause.SLOW_LINK or ledger.links is None:
        return 0.0
    return (ledger.links.slow_cost_ns or 0) / max(saving.batch_latency_ns + saving.saved_ns, 1)


def _name(ledger: Ledger, saving: Saving) -> MainCause:
    if len(saving.causes) > 1:
        return MainCause(cause=saving.cause, saving=saving)
    if saving.cause in _OF_ALL_RANKS:
        return _OF_ALL_RANKS[saving.cause](ledger, saving)
    if _of_slow_hops(ledger, saving) >= MATTERS and ledger.links is not None:
        slow = ledger.links.slow
        return MainCause(
            cause=saving.cause,
            saving=saving,
            rank=slow[0].hop[0],
            hop=slow[0].hop,
            slow_hops=tuple(hop.hop for hop in slow),
            times_expected=slow[0].judgement.times,
            culprit_saved_ns=ledger.links.slow_cost_ns,
        )
    waits: defaultdict[tuple[int, int | None, Hop | None], int] = defaultdict(int)
    for culprit in ledger.culprits:
        if culprit.cause == saving.cause:
            waits[culprit.rank, culprit.stage, culprit.hop] += culprit.wait_ns
    if not waits:
        return MainCause(cause=saving.cause, saving=saving)
    rank, stage, hop = max(waits, key=lambda who: waits[who])
    if saving.cause == Cause.IMBALANCE and stage is not None:
        return _name_long_stage(ledger, saving, rank, stage)
    return MainCause(
        cause=saving.cause,
        saving=saving,
        rank=rank,
        stage=stage,
        hop=hop,
        culprit_saved_ns=_saved_alone(ledger, saving.cause, rank),
    )


def _name_long_stage(ledger: Ledger, saving: Saving, rank: int, stage: int) -> MainCause:
    costs = ledger.remedies[0].costs
    kinds = [key for key in costs.median if key[0] == stage]
    equal = sum(costs.equal[key] for key in kinds)
    slower, saved_ns = _slower_layers(ledger, stage), None
    if slower is not None:
        saved_ns = ledger.saved_by(lambda remedy: remedy.stage_faster(stage, slower))
    return MainCause(
        cause=saving.cause,
        saving=saving,
        rank=rank,
        stage=stage,
        culprit_saved_ns=saved_ns,
        times_equal=sum(costs.sound[key] for key in kinds) / max(equal, 1),
        slower_layers=slower,
    )


def _slower_layers(ledger: Ledger, stage: int) -> float | None:
    """Return how many times as long a stage's layers take, where that is why it is long.

    layers      4    4    4    4        layers      4    4    4    4 and a head
    a layer    2.0  2.0  4.1  2.0       a layer    2.0  2.0  2.0  2.0 and 3.0
    stage 2 is long: its layers are     stage 3 is long: it has a head
    """
    every = {layers.stage: layers for rank in ledger.ranks for layers in rank.layers}
    own_layers = every.pop(stage, None)
    others = [layers for layers in every.values() if layers.layers]
    if own_layers is None or not own_layers.layers or not others:
        return None
    usual_ns = median(layers.layer_ns for layers in others)
    slower_ns = own_layers.layers * (own_layers.layer_ns - usual_ns)
    more_ns = usual_ns * (own_layers.layers - median(layers.layers for layers in others))
    more_ns += own_layers.rest_ns - median(layers.rest_ns for layers in others)
    return own_layers.layer_ns / usual_ns if slower_ns > max(more_ns, 0) else None


def _name_collectives(ledger: Ledger, saving: Saving) -> MainCause:
    cause = CAUSE_OF[saving.cause]
    times = [ledger.causes(rank_index)[cause] for rank_index in range(len(ledger.ranks))]
    return MainCause(
        cause=saving.cause, saving=saving, rank=ledger.ranks[int(np.argmax(times))].rank
    )


def _name_queue(ledger: Ledger, saving: Saving) -> MainCause:
    """Name the hop whose messages others stood behind for longest."""
    waits: defaultdict[tuple[int, int], int] = defaultdict(int)
    for step, account in zip(ledger.steps, ledger.accounts, strict=True):
        hops, count = hop_of(step.program), len(step.program.ranks)
        behind = account.queued & (account.root_kind == RootKind.MESSAGE)
        for row in np.flatnonzero(behind).tolist():
            hop = int(hops[account.root[row]])
            names = step.program.ranks[hop // count], step.program.ranks[hop % count]
            waits[names] += int(account.end_ns[row] - account.start_ns[row])
    longest = max(waits, key=lambda hop: waits[hop]) if waits else None
    return MainCause(cause=saving.cause, saving=saving, hop=longest)


def _name_data(ledger: Ledger, saving: Saving) -> MainCause:
    longest = [max(remedy.costs.data.values(), default=1.0) for remedy in ledger.remedies]
    # Where now this pipeline is the slowest and now that, one without long data tells nothing.
    usual = ledger.saved_by(Remedies.usual_data)
    return MainCause(
        cause=saving.cause,
        saving=saving,
        times_expected=max(longest),
        culprit_saved_ns=usual if usual >= saving.saved_ns else None,
    )


def _name_workers(ledger: Ledger, saving: Saving) -> MainCause:
    """Name the slow devices, of this pipeline first: what drags the others is looked into."""
    own_layers = ledger.ranks[0].pipeline
    workers = sorted(
        ledger.job.workers.slow, key=lambda worker: (worker.pipeline != own_layers, -worker.times)
    )
    if not workers:
        return MainCause(cause=saving.cause, saving=saving)
    first, ranks = workers[0], [rank.rank for rank in ledger.ranks]
    alone = None
    if len(workers) > 1 and first.pipeline == own_layers:
        rank_index = ranks.index(first.rank)
        alone = ledger.saved_by(lambda remedy: remedy.sound_workers(rank_index))
    return MainCause(
        cause=saving.cause,
        saving=saving,
        rank=first.rank,
        stage=first.stages[0] if len(first.stages) == 1 else None,
        workers=tuple(workers),
        times_expected=first.times,
        culprit_saved_ns=alone,
    )


_OF_ALL_RANKS: dict[str, Callable[[Ledger, Saving], MainCause]] = {
    Cause.COLLECTIVE: _name_collectives,
    Cause.DATA_PARALLEL: _name_collectives,
    Cause.WORKER: _name_workers,
    Cause.DATA: _name_data,
    HEAD_OF_LINE: _name_queue,
}
"""Causes whose culprit is not simply whom ranks of the pipeline waited for longest."""


def _saved_alone(ledger: Ledger, cause: str, rank: int) -> int | None:
    """Replay with one culprit put right."""
    rank_index = [row.rank for row in ledger.ranks].index(rank)
    if cause == Cause.JITTER:
        return ledger.saved_by(lambda remedy: remedy.no_jitter(rank_index))
    if cause == Cause.HOST:
        return ledger.saved_by(lambda remedy: remedy.no_host(rank_index))
    return None


def find_bottleneck(ledger: Ledger, outside_ns: dict[str, int]) -> Bottleneck | None:
    """Return what takes more of a step than ranks wait for each other; None if nothing does.

    With ranks missing nothing can be said: waits for them look like gaps.
    """
    if ledger.absent:
        return None
    batch = ledger.batch_latency_ns
    mean = {cause: round(share * batch) for cause, share in ledger.shares().items()}
    others = {str(cause): length for cause, length in mean.items() if cause.about.bottleneck}
    # Of kernels inside passes timers show nothing: what they leave unexplained is a wait.
    timers = ledger.ranks[0].timers
    if not timers:
        others["gaps"] = mean[Cause.UNEXPLAINED]
    besides = {*others, Cause.COMPUTE} | (set() if timers else {Cause.UNEXPLAINED})
    waits = sum(length for cause, length in mean.items() if cause not in besides)
    largest = max((others | outside_ns).items(), key=lambda pair: pair[1])
    if largest[1] > waits:
        return Bottleneck(what=largest[0], length_ns=largest[1], waits_ns=waits)
    window = sum(mean.values())
    if waits < MATTERS * window:
        return Bottleneck(what="compute", length_ns=mean[Cause.COMPUTE], waits_ns=waits)
    return None
