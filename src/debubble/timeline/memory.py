"""A rank's allocations and kernels in → what its memory is for, its layers, its weight gradients.

A layer is the unit that all stages have in common: they launch the same names over and over. Inside
a layer kernels repeat as well, so that a stage alone may show a repetition that is no layer; and a
stage of one layer shows none at all. Forward kernels, names shortened:

    stage 0   embedding  norm gemm attention gemm norm gemm act gemm  norm gemm attention …
    stage 1              norm gemm attention gemm norm gemm act gemm  norm gemm attention …
    stage 3              norm gemm attention gemm norm gemm act gemm  norm head loss

What is not of layers is the first stage's embedding and the last one's head and loss. Where a stage
between them has much left over, its layers are not alike, and nothing is counted.

What of a backward pass is for weights, its products tell. A BLAS library counts columns first, so
that forward a weight is transposed, and of its gradients only that of the weight has the second
factor transposed, whatever the model; what adds it to those of earlier microbatches comes next:

    gemm …_NTN  gemm …_NNT  add   gelu_backward   gemm …_NTN  gemm …_NNT  add   norm_backward …
      weight      input   weight                    weight      input   weight

On a CPU a node of autograd is one operator, and that of a product makes both gradients. What makes
a gradient of weights is followed by the node that adds it to what is there:

    MmBackward0  TBackward0  AccumulateGrad   GeluBackward0   MmBackward0  TBackward0 …
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from debubble.timeline.model import (
    F64,
    FEWEST_SAMPLES,
    I32,
    I64,
    Flags,
    MemoryFigures,
    PassKind,
    StageLayers,
)
from debubble.timeline.passes import Assignment
from debubble.timeline.work import Work, number_passes
from debubble.trace.columns import MemoryDevice, RankTrace

# A layer is at least this many kernels: single elementwise kernels in a row are no layers.
_SHORTEST_UNIT = 2
# Units are looked for up to this many kernels; a transformer layer has some 10 to 60.
_LONGEST_UNIT = 600
# A unit twice as long may cover as much, or a little more by chance: the shortest that covers so
# much of the best is the layer.
_NEARLY = 0.98
# What makes up less of all stages is no layer of theirs.
_LEAST_COVERED = 0.3
# A stage between first and last has nothing but layers; what lies between them is less than this
# share of one.
_MOST_LEFT_OVER = 0.5
# Layers that are alike do not take several times as long on one stage as on another.
_MOST_APART = 2.0
# Products by cuBLAS (`nvjet_…_NTN`, `…gemm…_nt_…`) and by AMD's Tensile, which names its indices.
_PRODUCT = re.compile(
    r"nvjet.*_(?P<new>[NT]{2})[NT](?![a-zA-Z0-9])|gemm.*_(?P<old>[nt]{2})(?![a-zA-Z0-9])"
    r"|Cijk_(?P<amd>A(?:ilk|lik)_B(?:ljk|jlk))"
)
_FOR_WEIGHTS = frozenset({"NT", "nt", "Ailk_Bjlk"})
_FORWARD = frozenset({"TN", "tn", "Alik_Bljk"})
# Backward passes that recompute run as long forward as they make either gradient. Devices that
# multiply 8-bit numbers in one way alone run all products as if forward: they tell nothing.
_MOST_FORWARD = 1.5
# They are parts of products, or between them: memory set to 0, and sums over a divided product.
_OF_PRODUCTS = re.compile(r"^Memset|splitK", re.IGNORECASE)
_NORM_WEIGHTS = re.compile(r"GammaBeta|GradGamma")
_ADDS = re.compile(r"CUDAFunctor(?:OnSelf)?_add")
_NODE = "autograd::engine::evaluate_function: "
_ACCUMULATES = f"{_NODE}torch::autograd::AccumulateGrad"
# Views of a weight: its gradient passes through them on its way.
_VIEWS = re.compile(r": (?:T|Transpose|Permute|View|UnsafeView|Expand|ToCopy)Backward\d+$")
_BOTH = re.compile(r": (?:Mm|Addmm|Linear|MkldnnLinear|Convolution|MkldnnConvolution)Backward\d+$")
_OF_TORCH, _LOOKS_UP = re.compile(r"Backward\d+$"), re.compile(r": EmbeddingBackward\d+$")
# An input gradient takes as long as a weight gradient, which is then added to others: of recorded
# layers the latter takes 0.53 to 0.56. Where more seems to be for weights, a part of it is not.
_MOST_FOR_WEIGHTS = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class PassKernels:
    """What one pass launched, in the order of the host."""

    name: I32
    """Numbered alike on all ranks."""
    start_ns: I64
    end_ns: I64


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePasses:
    """One forward pass of a stage, and one backward pass where it has any."""

    stage: int
    forward: PassKernels
    backward: PassKernels | None
    weight_share: float | None = None
    """Of the backward pass, what makes gradients of weights; None where nothing tells."""


def weight_share(names: Sequence[str], took_ns: I64) -> float | None:
    """Return what makes gradients of weights, of a backward pass; None where nothing tells."""
    total = int(took_ns.sum())
    if any(name.startswith(_NODE) for name in names):
        found: float | None = _in_nodes(names, took_ns.tolist())
    else:
        found = _in_products(names, took_ns.tolist())
    if found is None or not total or found > _MOST_FOR_WEIGHTS * total:
        return None
    return found / total


def _in_products(names: Sequence[str], took_ns: Sequence[int]) -> int | None:
    """Add up products for weights, and what adds them to others right behind; None: no product.

    So for the weights of norms. Products of attention that is not one kernel look alike: of a
    recorded layer those are a hundredth.
    """
    found, forward, others = 0, 0, 0
    for_weights = in_group = False  # this product; one of those in a row before it
    for name, took in zip(names, took_ns, strict=True):
        if product := _PRODUCT.search(name):
            factors = product[product.lastgroup or 0]
            for_weights = factors in _FOR_WEIGHTS
            forward += took * (factors in _FORWARD)
            others += took * (factors not in _FORWARD)
            in_group |= for_weights
            found += took * for_weights
        elif _OF_PRODUCTS.search(name):
            found += took * for_weights
        elif _NORM_WEIGHTS.search(name) or (in_group and _ADDS.search(name)):
            found += took
            for_weights, in_group = False, True
        else:
            for_weights = in_group = False
    return found if forward < _MOST_FORWARD * others else None


def _in_nodes(names: Sequence[str], took_ns: Sequence[int]) -> float:
    """Add up nodes of autograd that make gradients of weights: of a product's node it is half.

    torch's others hardly take time for them (norms), or make no other (embeddings). Of a node that
    is not torch's nothing is known but that it is followed so.
    """
    nodes = [row for row, name in enumerate(names) if name.startswith(_NODE)]
    added = 0.0
    follows = False  # the next nodes are views and one that adds to a gradient
    for row in reversed(nodes):
        name = names[row]
        if name == _ACCUMULATES:
            follows = True
        elif not _VIEWS.search(name):
            whole = _LOOKS_UP.search(name) or not _OF_TORCH.search(name)
            share = 0.5 if _BOTH.search(name) else float(bool(whole))
            added += share * took_ns[row] * follows
            follows = False
    return added


def count_layers(stages: Sequence[StagePasses]) -> dict[int, StageLayers]:
    """Return what each stage is made of; nothing where the stages have no unit in common."""
    stages = sorted(stages, key=lambda passes: passes.stage)
    unit = _find_unit([passes.forward.name for passes in stages])
    if unit is None:
        return {}
    starts = [_places(passes.forward.name, unit) for passes in stages]
    for passes, begins in list(zip(stages, starts, strict=True))[1:-1]:
        left_over = len(passes.forward.name) - len(begins) * len(unit)
        if left_over > _MOST_LEFT_OVER * len(unit) or not len(begins):
            return {}
    found = {}
    for passes, begins in zip(stages, starts, strict=True):
        inside, taken = _inside(passes.forward, begins, len(unit))
        first = int(begins[0]) if len(begins) else 0
        before = int(taken[:first][~inside[:first]].sum())
        found[passes.stage] = StageLayers(
            stage=passes.stage,
            layers=len(begins),
            layer_ns=int(taken[inside].sum()) // max(len(begins), 1),
            before_ns=before,
            after_ns=int(taken[~inside].sum()) - before,
        )
    lasted = [layers.layer_ns for layers in found.values() if layers.layers]
    if max(lasted) > _MOST_APART * min(lasted):
        return {}
    return found | _backward(stages, found)


def count_served_layers(stages: Sequence[StagePasses]) -> dict[int, StageLayers]:
    """Return what stages of a serving engine are made of, by how often kernels run on each.

    Compilers fuse the kernels of a first layer with what comes before it, and those of each layer
    with the next: then no sequence repeats as often as there are layers. But most kernels of a
    layer run once in each:

        stage          0   1   2   3
        attention      6   6   6  14    ┐ most are like this: layers
        qkv            6   6   6  14    ┘
        fused norm     5   5   5  13
    """
    stages = sorted(stages, key=lambda passes: passes.stage)
    counts = [Counter(passes.forward.name.tolist()) for passes in stages]
    shared = set.intersection(*(set(count) for count in counts)) if counts else set()
    often = {name: tuple(count[name] for count in counts) for name in shared}
    votes = Counter(times for times in often.values() if max(times) > 1)
    if not votes:
        return {}
    layers = max(votes, key=lambda times: (votes[times], -sum(times)))
    of_layers = np.array(sorted(name for name, times in often.items() if times == layers))
    found = {}
    for passes, count in zip(stages, layers, strict=True):
        kernels = passes.forward
        taken = kernels.end_ns - kernels.start_ns
        rows = np.flatnonzero(np.isin(kernels.name, of_layers))
        before, after = int(taken[: rows[0]].sum()), int(taken[rows[-1] + 1 :].sum())
        found[passes.stage] = StageLayers(
            stage=passes.stage,
            layers=count,
            layer_ns=(int(taken.sum()) - before - after) // count,
            before_ns=before,
            after_ns=after,
        )
    return found


def _backward(
    stages: Sequence[StagePasses], found: dict[int, StageLayers]
) -> dict[int, StageLayers]:
    """Add what layers take backward, where as many units are found there as forward."""
    passes = [(stage.stage, stage.backward) for stage in stages if stage.backward is not None]
    if len(passes) < len(stages):
        return {}
    counts = [found[stage].layers for stage, _ in passes]
    unit = _find_unit([kernels.name for _, kernels in passes], counts)
    if unit is None:
        return {}
    measured = {}
    for stage, kernels in passes:
        begins = _places(kernels.name, unit)
        inside, taken = _inside(kernels, begins, len(unit))
        measured[stage] = replace(
            found[stage],
            backward_layer_ns=int(taken[inside].sum()) // max(len(begins), 1),
            backward_rest_ns=int(taken[~inside].sum()),
        )
    return measured


def _inside(kernels: PassKernels, begins: I64, size: int) -> tuple[Flags, I64]:
    """Tell which kernels of a pass are of layers that begin so, and what each took."""
    inside = np.zeros(len(kernels.name), dtype=bool)
    for begin in begins.tolist():
        inside[begin : begin + size] = True
    return inside, kernels.end_ns - kernels.start_ns


def recomputed_share(stages: Sequence[StagePasses]) -> float:
    """Return of how many layers, as a share, backward passes launch the forward kernels once more.

    torchtitan's default recomputes every other one.
    """
    unit = _find_unit([passes.forward.name for passes in stages])
    if unit is None:
        return 0.0
    forward = again = 0
    for passes in stages:
        if passes.backward is not None:
            forward += len(_places(passes.forward.name, unit))
            again += len(_places(passes.backward.name, unit))
    return min(again / forward, 1.0) if forward else 0.0


def _find_unit(names: Sequence[I32], counts: Sequence[int] | None = None) -> I32 | None:
    """Return the shortest sequence that, over and over, makes up most of all stages.

    Of those that are in each stage so many times, where counts are given.
    """
    if not names:
        return None
    total = sum(len(stage) for stage in names)
    best: list[tuple[float, int, I32]] = []
    seen: set[bytes] = set()
    alike = {stage.tobytes(): stage for stage in names}  # most stages launch the same
    for unit in _candidates(names):
        if unit.tobytes() not in seen and not _repeats(unit):
            seen.add(unit.tobytes())
            found = {key: len(_places(stage, unit)) for key, stage in alike.items()}
            often = [found[stage.tobytes()] for stage in names]
            if sum(often) > 1 if counts is None else often == list(counts):
                best.append((sum(often) * len(unit) / max(total, 1), len(unit), unit))
    most = max((covered for covered, _, _ in best), default=0.0)
    good = [found for found in best if found[0] >= _NEARLY * most >= _NEARLY * _LEAST_COVERED]
    return min(good, key=lambda found: (found[1], -found[0]))[2] if good else None


def _repeats(unit: I32) -> bool:
    """Tell whether a sequence is itself a shorter one over and over."""
    return any(
        (unit[period:] == unit[:-period]).all()
        for period in range(1, len(unit) // 2 + 1)
        if len(unit) % period == 0
    )


def _candidates(names: Sequence[I32]) -> Iterator[I32]:
    """Yield what repeats in a stage, and whole stages between first and last: one layer each."""
    between = list({stage.tobytes(): stage for stage in names[1:-1] or names}.values())
    for stage in {stage.tobytes(): stage for stage in names}.values():
        longest = min(len(stage) // 2, _LONGEST_UNIT)
        for period in range(_SHORTEST_UNIT, longest + 1):
            first, run = _longest_run(stage[period:] == stage[:-period])
            if run >= period:
                yield stage[first : first + period]
                yield from (other[:period] for other in between if len(other) >= period)
    alone = [stage for stage in between if _SHORTEST_UNIT <= len(stage) <= _LONGEST_UNIT]
    yield from alone
    # A stage may launch something more for its neighbour; what it shares with the last is a layer.
    for stage in (names[0], *alone[:1]):
        common = _longest_common(stage[:_LONGEST_UNIT], names[-1][:_LONGEST_UNIT])
        if len(common) >= _SHORTEST_UNIT:
            yield common


def _places(names: I32, unit: I32) -> I64:
    """Return where a unit begins in a sequence, copies that overlap left out."""
    if len(unit) > len(names):
        return np.zeros(0, dtype=np.int64)
    begins = np.flatnonzero(names[: len(names) - len(unit) + 1] == unit[0])
    found = begins[(sliding_window_view(names, len(unit))[begins] == unit).all(axis=1)]
    kept: list[int] = []
    for begin in found.tolist():
        if not kept or begin >= kept[-1] + len(unit):
            kept.append(begin)
    return np.array(kept, dtype=np.int64)


def _longest_run(flags: Flags) -> tuple[int, int]:
    """Return where the longest stretch of true values begins, and its length."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(edges[2 * longest]), int(lengths[longest])


def _longest_common(names: I32, others: I32) -> I32:
    """Return the longest stretch that two sequences have in common."""
    best_end, best = 0, 0
    before = np.zeros(len(others) + 1, dtype=np.int64)
    for end, name in enumerate(names.tolist(), start=1):
        after = np.zeros(len(others) + 1, dtype=np.int64)
        after[1:] = np.where(others == name, before[:-1] + 1, 0)
        if after.max() > best:
            best, best_end = int(after.max()), end
        before = after
    return names[best_end - best : best_end]


# What a pass does to the microbatches whose activations a stage must keep. With a split backward
# pass they are free after the weight gradient.
_KEEPS = {PassKind.F: 1, PassKind.B: -1, PassKind.I: 0, PassKind.W: -1}


def measure_memory(
    trace: RankTrace, work: Work, assignment: Assignment, step: I32
) -> MemoryFigures | None:
    """Fit the allocator's curve, on the host's clock, to the microbatches in flight.

    The allocator acts when the host issues work, not when the device does it.
    """
    moments, allocated = allocator_curve(trace)
    if not len(allocated):
        return None
    reserved = trace.memory.reserved_bytes[_of_compute(trace)]
    levels = _levels(work, assignment, step)
    row = np.searchsorted(moments, levels.after_ns, side="right") - 1
    known = (row >= 0) & ~levels.ends_step
    if known.sum() < FEWEST_SAMPLES or np.ptp(levels.in_flight[known]) == 0:
        known = row >= 0
    until = np.searchsorted(moments, levels.until_ns[known], side="left")
    # The lowest level from each pass on, until the next; that after the pass itself at least.
    spans = zip(row[known].tolist(), np.maximum(until, row[known] + 1).tolist(), strict=True)
    lowest = np.array([allocated[first:end].min() for first, end in spans], dtype=np.int64)
    fit = _fit(levels.columns()[known], lowest)
    # Inside is from the first to the last piece of a step's passes. Forward only, what is held
    # between steps is outputs: passes made it, and no optimizer.
    trains = bool((assignment.kind > PassKind.F).any())
    inside = np.full(len(moments), not trains)
    for number in np.unique(levels.step).tolist():
        mine = levels.step == number
        begun, over = levels.begun_ns[mine].min(), levels.after_ns[mine].max()
        inside |= (moments >= begun) & (moments <= over)
    passes_peak = int(allocated[inside].max(initial=0)) or int(allocated.max())
    used = set(np.unique(trace.kernels.device).tolist())
    sizes = [d.memory_bytes for d in trace.header.devices if d.index in used and d.memory_bytes]
    return MemoryFigures(
        peak_bytes=int(allocated.max()),
        passes_peak_bytes=passes_peak,
        between_peak_bytes=int(allocated[~inside].max(initial=0)) or None,
        peak_reserved_bytes=int(reserved.max()) if reserved.max() > 0 else None,
        static_bytes=fit.static_bytes if fit else None,
        per_microbatch_bytes=fit.per_microbatch_bytes if fit else None,
        gradient_bytes=fit.gradient_bytes if fit else None,
        halfway_bytes=fit.halfway_bytes if fit else None,
        transient_bytes=max(0, passes_peak - fit.highest_bytes) if fit else None,
        most_in_flight=int(levels.in_flight.max(initial=0)),
        limit_bytes=min(sizes, default=None),
    )


def allocator_curve(trace: RankTrace) -> tuple[I64, I64]:
    """Return when the allocator acted, by the host's clock, and what it held then, in bytes."""
    mine = _of_compute(trace)
    moments, allocated = trace.memory.start_ns[mine], trace.memory.allocated_bytes[mine]
    if allocated.max(initial=-1) < 0:
        return moments[:0], allocated[:0]
    return moments, allocated


def _of_compute(trace: RankTrace) -> Flags:
    """Take the host's allocator where no device runs kernels: a pipeline on CPUs.

    torch counts the host's bytes from the profiler's start: activations and gradients are in it,
    weights that were there before are not.
    """
    on_device: Flags = trace.memory.device_type == MemoryDevice.DEVICE
    if len(trace.kernels) or on_device.any():
        return on_device
    on_host: Flags = trace.memory.device_type == MemoryDevice.CPU
    return on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    static_bytes: int
    per_microbatch_bytes: int
    gradient_bytes: int
    halfway_bytes: int
    highest_bytes: int
    """The most that the line itself reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    """What a rank had to keep, each time a pass had been issued."""

    after_ns: I64
    until_ns: I64
    """When the next pass of the step began to be issued: what passes work with is free by then."""
    ends_step: Flags
    """No pass of the step comes after it, so that this is not known."""
    in_flight: I64
    halfway: I64
    """Of those in flight: with I behind them and W before them."""
    reduced: F64
    """Share of its stages that have gradients."""
    sent: I64
    """Passes I so far: torch keeps what they sent until the step ends."""
    step: I64
    begun_ns: I64

    def columns(self) -> F64:
        """Return what the allocator's level is made of, a column each; the first is constant."""
        constant = np.ones(len(self.in_flight))
        parts = (constant, self.in_flight, self.halfway, self.reduced, self.sent)
        return np.stack(parts, axis=1)


def _levels(work: Work, assignment: Assignment, step: I32) -> _Levels:
    kept = np.flatnonzero((assignment.kind >= 0) & (step >= 0))
    passes, group = number_passes(
        step[kept], assignment.stage[kept], assignment.kind[kept], assignment.microbatch[kept]
    )
    issued = np.zeros(passes.shape[1], dtype=np.int64)
    np.maximum.at(issued, group, work.issued_ns[kept])
    begun = np.full(passes.shape[1], np.iinfo(np.int64).max)
    np.minimum.at(begun, group, work.issued_ns[kept])
    order = np.argsort(issued, kind="stable")
    numbers, stage, kind = passes[0], passes[1], passes[2]
    change = np.array([_KEEPS[PassKind(number)] for number in kind.tolist()], dtype=np.int64)
    stages, first_half = np.unique(stage), kind == PassKind.I
    # Where I has no kernels, as on torch's first stage, W is the whole backward pass.
    second_half = (kind == PassKind.W) & np.isin(stage, stage[first_half])
    held, halfway = np.zeros(len(order), dtype=np.int64), np.zeros(len(order), dtype=np.int64)
    reduced, sent = np.zeros(len(order)), np.zeros(len(order), dtype=np.int64)
    for number in np.unique(numbers).tolist():
        mine = order[numbers[order] == number]
        held[mine] = np.cumsum(change[mine])
        halfway[mine] = np.cumsum(first_half[mine].astype(np.int64) - second_half[mine])
        sent[mine] = np.cumsum(first_half[mine])
        for held_stage in stages.tolist():
            ended = np.cumsum((change[mine] < 0) & (stage[mine] == held_stage))
            reduced[mine] += np.minimum(ended, 1) / len(stages)
    ends_step = np.diff(numbers[order], append=-1) != 0
    return _Levels(
        after_ns=issued[order],
        until_ns=np.where(ends_step, issued[order], np.append(begun[order][1:], 0)),
        ends_step=ends_step,
        in_flight=held[order],
        halfway=halfway[order],
        reduced=reduced[order],
        sent=sent[order],
        step=numbers[order],
        begun_ns=begun[order],
    )


def _fit(columns: F64, allocated: I64) -> _Fit | None:
    """Fit bytes = static + slope * microbatches + gradients; None where nothing varies.

    Gradients appear with a stage's first backward pass and stay; they belong to what is static.
    """
    if len(columns) < FEWEST_SAMPLES or np.ptp(columns[:, 1]) == 0:
        return None
    shares = np.linalg.lstsq(columns, allocated.astype(np.float64), rcond=None)[0]
    base, slope, halfway, gradients, _ = shares.tolist()
    return _Fit(
        static_bytes=round(base + gradients),
        per_microbatch_bytes=round(slope),
        gradient_bytes=max(0, round(gradients)),
        halfway_bytes=round(halfway),
        highest_bytes=round(float((columns @ shares).max())),
    )
