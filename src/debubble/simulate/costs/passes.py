"""Steps of a timeline in → what passes take: by rank, by layer, beside others' work, by tokens.

Two answers. `measure_passes` gives medians by stage and kind, for what a run was. `fit_passes`
gives a model, for what a changed run would be:

    time = (layers + extra) x exp(base(kind, rank) + slope x ranks at work) x slowed(share)

An embedding on the first stage and a head on the last are extra, in layers, forward and backward
each its own. The slope is 0 unless ranks share a device (`shared_device.py`). The base of a step's
first backward passes is its own: they have no gradients to add theirs to. The share is that of the
pass beside which the rank sends or receives:

    compute   [   F 1   ][   F 2   ]    a message's kernel spins on multiprocessors until it is
    messages     [recv·········]        done, waiting or not: compute has fewer meanwhile. Half of
                                        F 1 lies beside it, three quarters of F 2

So a schedule that overlaps has longer passes than one that does not, by the same layers.

With more or fewer tokens passes grow as tokens do; adding to gradients that are there does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from debubble.simulate.costs.uneven_data import UNEVEN, Slot, compare_microbatches, held_by_forward
from debubble.simulate.overlap import share_under
from debubble.simulate.shared_device import BESIDE, SLOPE, trailing_activity
from debubble.timeline.model import (
    F64,
    I64,
    Intervals,
    Passes,
    PassKind,
    RankTimeline,
    Timeline,
    Transfers,
    surely_share,
    without,
)

# A run tells it itself where 2.5 of its own standard errors are at most a tenth, and not one or two
# passes say so: the share of a rank's first pass often differs from all others. However alike a few
# passes are, they are taken to vary by a hundredth.
_TELLS, _PASSES_VARY, _FEWEST_TELL = 0.04, 0.01, 4
# Rounds until what messages add, which bends with the share beside them, stays as it is.
_ROUNDS = 8
# Less than this of a layer is what lies between layers, not an embedding or a head.
_LEAST_EXTRA = 0.1
# How unsure growth is, of the logarithm of a time, for each e-fold of tokens: with half the tokens
# of a pass some 4 % may stay and a message take 0.55 to 0.65 of its time; attention adds what one
# run does not show. Recorded pairs of two sizes are off by as much.
GROWTH_SPREAD = 0.15
# Whole backward passes of a first stage that is written as a weight gradient alone.
WHOLE = 4
# These do not add to gradients.
_NO_GRADIENTS = frozenset({int(PassKind.F), int(PassKind.I)})

Key = tuple[int, int]
"""Stage and kind of a pass."""
Kind = tuple[int, bool]
"""Kind of pass, and whether of the first microbatch."""
Class = tuple[int, bool, int]
"""Kind of pass (or `WHOLE`), whether of the first microbatch, place of the rank."""
Bases = Mapping[Class, float]
"""Logarithms of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCosts:
    """Nanoseconds of a pass by stage and kind, collectives inside it left out."""

    median: dict[Key, int]
    equal: dict[Key, int]
    """The same if every stage took as long as any other."""
    first: dict[Key, int]
    """Of a step's first microbatch: it has no gradients to add its own to."""
    sound: dict[Key, int]
    """What the median would be with a device, and data, as in most replicas; else the median."""
    heavy: float
    """How many times as long as in most replicas all microbatches take, by their data."""
    data: dict[Slot, float]
    """The same of each microbatch; empty where all are alike."""

    def typical(self, key: Key, microbatch: int) -> int:
        """Return what such a pass takes."""
        return self.first.get(key, self.median[key]) if microbatch == 0 else self.median[key]

    def with_data(self, heavy: float) -> PassCosts:
        """Return the same, so many times as long as in most replicas by the data alone."""
        sound = {key: max(round(length / heavy), 1) for key, length in self.sound.items()}
        data = {slot: times * heavy for slot, times in self.data.items()}
        return replace(self, equal=equal_stages(sound), sound=sound, heavy=heavy, data=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassModel:
    """Logarithms of nanoseconds per layer."""

    base: dict[Class, float]
    residuals: F64
    slope: float
    """What one more rank at work adds; 0 where ranks have devices of their own."""
    layers: tuple[float, ...]
    """Of each stage, by what they take; 1 each where they could not be told."""
    extras: dict[int, tuple[float, float]]
    """By kind, what first and last stage have besides their layers, in layers."""
    beside: float
    """What a message's kernel adds to the compute beside it, of the logarithm."""
    tells_beside: bool
    """Whether the run shows that itself."""
    stays: dict[Kind, float]
    """The share of passes of each kind that does not grow with tokens: additions to gradients."""
    weight_shares: dict[int, float] = field(default_factory=dict)
    """By place of the rank: what W takes of B, where B's kernels tell."""
    prices: tuple[float, ...] = ()
    """Of each layer of the model, in order, against the mean; nothing where all are alike."""

    @property
    def splits_backward(self) -> bool:
        """Whether input and weight gradients were measured apart."""
        return any(kind == PassKind.I for kind, _, _ in self.base)

    def weight_share(self, place: int) -> float | None:
        """Return what W takes of B on a rank, else on the mean of others; None: nothing tells."""
        known = self.weight_shares
        return known.get(place, float(np.mean([*known.values()]))) if known else None

    def priced(self, splits: I64 | Sequence[int]) -> F64:
        """Return what the layers of each stage take, against a mean layer: a row a split."""
        return _priced(self.prices, splits)

    def besides_layers(self, kind: int) -> tuple[float, float]:
        """Return what first and last stage have besides layers, by the kind nearest to this."""
        for known in (kind, PassKind.B, PassKind.F):
            if known in self.extras:
                return self.extras[known]
        return 0.0, 0.0

    def log_ns(self, kind: int, *, first: bool, place: int) -> float | None:
        """Return a rank's base, else the mean of the other ranks; None where no such pass ran.

        A run of one microbatch has none but the first.
        """
        for is_first in (first, False) if first else (False,):
            if (kind, is_first, place) in self.base:
                return self.base[kind, is_first, place]
        alike = [
            (is_first, base) for (other, is_first, _), base in self.base.items() if other == kind
        ]
        others = [base for is_first, base in alike if is_first == first]
        others = others or [base for _, base in alike]
        return float(np.mean(others)) if others else None

    def with_tokens(self, scale: float) -> PassModel:
        """Return what passes take with so many times as many tokens a microbatch."""
        if scale == 1.0:
            return self
        base = {
            (kind, first, place): log + float(np.log(stays + (1 - stays) * scale))
            for (kind, first, place), log in self.base.items()
            for stays in [self.stays[kind, first]]
        }
        return replace(self, base=base)


def measure_passes(
    passes: Passes,
    ranks: tuple[RankTimeline, ...],
    slow: Mapping[Key, int] | None = None,
) -> PassCosts:
    """Take medians over all steps of a pipeline; `slow` is what slow devices take more."""
    passes = passes.where(np.isin(passes.rank, [rank.rank for rank in ranks]))
    lengths = passes.end_ns - passes.start_ns - inside_passes(passes, ranks, collectives_of)
    lengths -= inside_passes(passes, ranks, data_parallel_of)
    several_steps = len(np.unique(passes.step)) > 1
    median, first = {}, {}
    for stage, kind in sorted(set(zip(passes.stage.tolist(), passes.kind.tolist(), strict=True))):
        mine = (passes.stage == stage) & (passes.kind == kind)
        later = mine & (passes.microbatch > 0)
        median[stage, kind] = int(np.median(lengths[later if later.any() else mine]))
    own_ns = lengths / held_by_forward(passes, lengths, median)
    for (stage, kind), usual in median.items():
        mine = (passes.stage == stage) & (passes.kind == kind) & (passes.microbatch == 0)
        if several_steps and kind in {PassKind.B, PassKind.W} and mine.any():
            length = int(np.median(own_ns[mine]))
            if length < UNEVEN * usual:  # else it is long for another reason
                first[stage, kind] = length
    sound = {key: max(length - (slow or {}).get(key, 0), 1) for key, length in median.items()}
    return PassCosts(
        median=median,
        equal=equal_stages(sound),
        first=first,
        sound=sound,
        heavy=1.0,
        data=compare_microbatches(passes, lengths, median, first),
    )


def equal_stages(median: dict[Key, int]) -> dict[Key, int]:
    """Return each kind's mean over the stages.

    The first stage needs no input gradient: its weight gradient may be its whole backward pass, and
    is held against both.
    """
    splits = any(kind == PassKind.I for _, kind in median)
    whole = {
        stage
        for stage, kind in median
        if splits and kind == PassKind.W and (stage, PassKind.I) not in median
    }
    lengths: dict[int, list[int]] = {}
    for (stage, kind), length in median.items():
        if kind != PassKind.W or stage not in whole:
            lengths.setdefault(kind, []).append(length)
    mean = {kind: round(sum(all_of) / len(all_of)) for kind, all_of in lengths.items()}
    both = mean.get(PassKind.I, 0) + mean.get(PassKind.W, 0)
    return {
        (stage, kind): both if kind == PassKind.W and stage in whole else mean[kind]
        for stage, kind in median
    }


def inside_passes(
    passes: Passes, ranks: tuple[RankTimeline, ...], of: Callable[[RankTimeline], Intervals]
) -> I64:
    """Return how long each pass was in some intervals of its rank."""
    inside = np.zeros(len(passes), dtype=np.int64)
    for rank in ranks:
        found = of(rank)
        if len(found.start_ns):
            for row in np.flatnonzero(passes.rank == rank.rank).tolist():
                inside[row] = found.inside(int(passes.start_ns[row]), int(passes.end_ns[row]))
    return inside


def collectives_of(rank: RankTimeline) -> Intervals:
    """Return when a rank was in a collective of its passes that no compute covered."""
    occupied, busy = rank.occupied, rank.busy
    if np.array_equal(occupied.start_ns, busy.start_ns) and np.array_equal(
        occupied.end_ns, busy.end_ns
    ):
        return Intervals.no_rows()
    return without(without(occupied, busy), rank.data_parallel)


def data_parallel_of(rank: RankTimeline) -> Intervals:
    """Return when a rank was in a gather or reduction beside its passes that nothing covered."""
    return rank.data_parallel


def fit_passes(
    timeline: Timeline, pipeline: int, layers: Sequence[float] | None = None
) -> PassModel:
    """Fit a run's passes, given how many layers each stage holds where that is known."""
    ranks = timeline.ranks_of(pipeline)
    stages = 1 + max(stage for rank in ranks for stage in rank.stages)
    prices = () if layers is None else _prices(ranks, round(sum(layers)))
    extras = {} if layers is None else _extras(ranks, layers, prices)
    layers = (1.0,) * stages if layers is None else tuple(_priced(prices, layers).tolist())
    passes = timeline.passes.where(np.isin(timeline.passes.rank, [rank.rank for rank in ranks]))
    passes = passes.where(passes.end_ns > passes.start_ns)
    weights = np.array(layers)[passes.stage]
    more = [extras.get(kind, extras.get(int(PassKind.F), (0.0, 0.0))) for kind in PassKind]
    for end, of_kinds in zip((0, stages - 1), np.array(more).T, strict=True):
        mine = passes.stage == end
        weights[mine] += of_kinds[passes.kind[mine]]
    # What is gathered or reduced beside passes is none of their work.
    own_ns = passes.end_ns - passes.start_ns - inside_passes(passes, ranks, data_parallel_of)
    logs = np.log(np.maximum(own_ns, 1) / np.maximum(weights, _LEAST_EXTRA))
    activity = np.zeros(len(passes))
    for step in np.unique(passes.step).tolist():
        here = passes.step == step
        activity[here] = trailing_activity(passes.start_ns[here], passes.end_ns[here])
    rows_of = _rows_of_classes(passes, ranks)
    shares = beside_messages(passes, timeline.transfers)
    shared = surely_share(ranks)
    slope = SLOPE if shared else 0.0
    seen = _slowed_by_messages(rows_of, logs - slope * activity, shares)
    beside = seen if seen is not None else BESIDE if shared else 0.0
    rest = logs - slope * activity - slowed_beside(beside, shares)
    base = {of: float(rest[rows].mean()) for of, rows in rows_of.items()}
    residuals = rest.copy()
    for of, rows in rows_of.items():
        residuals[rows] -= base[of]
    return PassModel(
        base=base,
        residuals=residuals,
        slope=slope,
        layers=layers,
        extras=extras,
        beside=beside,
        tells_beside=seen is not None,
        stays=_share_that_stays(base),
        prices=prices,
        weight_shares={
            place: float(np.mean([*rank.weight_shares.values()]))
            for place, rank in enumerate(ranks)
            if rank.weight_shares
        },
    )


def slowed_beside(beside: float, share: F64 | float) -> F64:
    """Return what a share of a pass beside messages adds to it, of the logarithm.

    A moment beside them does exp(-beside) of a moment's work.
    """
    added: F64 = -np.log1p(-(1 - np.exp(-beside)) * np.asarray(share))
    return added


def beside_messages(passes: Passes, transfers: Transfers) -> F64:
    """Return the share of each pass beside which its rank sends or receives, waiting included."""
    shares = np.zeros(len(passes))
    for rank in np.unique(passes.rank).tolist():
        mine = passes.rank == rank
        sends, takes = transfers.source == rank, transfers.destination == rank
        shares[mine] = share_under(
            passes.start_ns[mine],
            passes.end_ns[mine],
            np.concatenate((transfers.send_start_ns[sends], transfers.receive_start_ns[takes])),
            np.concatenate((transfers.send_end_ns[sends], transfers.receive_end_ns[takes])),
        )
    return shares


def _prices(ranks: Sequence[RankTimeline], layers: int) -> tuple[float, ...]:
    """Return what each layer takes, against the mean: by its kind, whichever rank has it.

    Stages that have all kinds tell how they compare: others may be on slower devices.
    """
    stages = sorted((one for rank in ranks for one in rank.layers), key=lambda one: one.stage)
    order = [kind.name for one in stages for kind in one.kinds for _ in range(kind.layers)]
    if len(order) != layers:
        return ()
    every = [one.kinds for one in stages if {kind.name for kind in one.kinds} == {*order}]
    spans: dict[str, list[int]] = {}
    for kind in chain.from_iterable(every or [one.kinds for one in stages]):
        spans.setdefault(kind.name, []).extend([kind.span_ns] * kind.layers)
    taken = np.array([np.mean(spans[name]) for name in order])
    return tuple((taken / taken.mean()).tolist())


def _priced(prices: Sequence[float], splits: I64 | Sequence[float]) -> F64:
    if not prices:
        return np.asarray(splits, dtype=np.float64)
    sizes = np.asarray(splits, dtype=np.int64)
    ends, sums = np.cumsum(sizes, axis=-1), np.concatenate(([0.0], np.cumsum(prices)))
    taken: F64 = sums[ends] - sums[ends - sizes]
    return taken


def _extras(
    ranks: Sequence[RankTimeline], layers: Sequence[float], prices: Sequence[float]
) -> dict[int, tuple[float, float]]:
    """Return by kind, in layers, what the ends have that is not of layers.

    What stages between them have besides layers as well, such as sums of gradients, grows with the
    layers and is part of them. A stage's own layers tell how long one takes there; of a stage that
    has none, the others tell.
    """
    found = {stage.stage: stage for rank in ranks for stage in rank.layers}
    if any(stage not in found or found[stage].layers != n for stage, n in enumerate(layers)):
        return {}  # what was stated wins, and its layers are not those that kernels show
    extras = {}
    ends = (0, len(layers) - 1)
    held = _priced(prices, layers).tolist()
    # By how much more a layer lasts than its kernels, on a stage of mean layers.
    lasts = {n: found[n].stretch * layers[n] / (held[n] or 1.0) for n in found}
    for kind in (PassKind.F, PassKind.B):
        columns = {
            number: (stage.layer_ns * lasts[number], stage.rest_ns)
            if kind is PassKind.F
            else ((stage.backward_layer_ns or 0) * lasts[number], stage.backward_rest_ns or 0)
            for number, stage in found.items()
        }
        usual = [each for each, _ in columns.values() if each]
        if not usual:
            continue
        shares = [
            rest / (each * held[stage])
            for stage, (each, rest) in columns.items()
            if stage not in ends and each and layers[stage]
        ]
        common = float(np.median(shares)) if shares else 0.0
        both = []
        for stage in ends:
            each, rest = columns[stage]
            more = rest / (each or float(np.median(usual))) - common * held[stage]
            both.append(more / (1 + common) if more >= _LEAST_EXTRA else 0.0)
        extras[int(kind)] = (both[0], both[1])
    return extras


def _rows_of_classes(passes: Passes, ranks: Sequence[RankTimeline]) -> dict[Class, list[int]]:
    """Return the passes that are alike: of a kind and rank, first backward passes apart."""
    place = {rank.rank: number for number, rank in enumerate(ranks)}
    kinds = passes.kind.astype(int)
    inputs = kinds == PassKind.I
    if inputs.any() and not (inputs & (passes.stage == 0)).any():
        kinds[(passes.stage == 0) & (kinds == PassKind.W)] = WHOLE
    rows: dict[Class, list[int]] = {}
    columns = (kinds.tolist(), passes.microbatch.tolist(), passes.rank.tolist())
    for row, (kind, number, rank) in enumerate(zip(*columns, strict=True)):
        first = number == 0 and kind not in _NO_GRADIENTS
        rows.setdefault((kind, first, place[rank]), []).append(row)
    return rows


def _slowed_by_messages(rows_of: Mapping[Class, list[int]], logs: F64, shares: F64) -> float | None:
    """Return what messages add to passes beside them, within classes; None: it is not sure."""
    free = len(logs) - len(rows_of) - 1
    if free < 1:
        return None
    seen, alike = 0.0, [np.array(rows) for rows in rows_of.values()]
    for _ in range(_ROUNDS):
        # What messages add bends with the share: a line along it, where the last round came to.
        lost = 1 - np.exp(-seen)
        along = (1 - lost) * shares / (1 - lost * shares)
        y = logs - slowed_beside(seen, shares) + along * seen
        for rows in alike:
            y[rows] -= y[rows].mean()
            along[rows] -= along[rows].mean()
        apart = float(along @ along)
        if apart <= 0:
            return None
        line = float(along @ y) / apart
        seen = max(line, 0.0)
    left = y - line * along
    error = np.sqrt(max(float(left @ left) / free, _PASSES_VARY**2) / apart)
    telling = apart**2 / float((along**4).sum())
    return seen if error < _TELLS and telling >= _FEWEST_TELL else None


def _share_that_stays(base: Bases) -> dict[Kind, float]:
    """Return what a first microbatch does without, the accumulation of gradients."""
    shares: dict[Kind, list[float]] = {}
    for (kind, first, place), own in base.items():
        shares.setdefault((kind, first), [])
        alone = base.get((kind, True, place))
        if not first and alone is not None and kind not in _NO_GRADIENTS:
            shares[kind, first].append(1 - float(np.exp(alone - own)))
    return {
        kind: min(max(0.0, float(np.mean(seen)) if seen else 0.0), 1.0)
        for kind, seen in shares.items()
    }
