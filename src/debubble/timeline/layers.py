"""The kernels of a pass of each stage in → its layers, what is none, its weight gradients.

Every layer mixes tokens once: it has one attention, whether that is one kernel, a softmax between
two products, or a ring that goes on without a product between its kernels:

    norm QKV attention product  norm product act product     a layer
    norm QKV attention product  norm route sort experts add   another kind of layer: so is this one
    norm QKV block block merge product  norm product act …    blocks of a ring: one attention

So neither which kernels a device is given, nor how many tokens an expert gets, nor layers that are
not all alike change the number. Where nothing looks like attention, most kernels of a layer run
once in each, and those names tell:

    stage            0   1   2   3
    activation       2   2   2   2    ┐ most names run so often: layers
    sum              2   2   2   2    ┘
    norm             4   4   4   5    twice in a layer, and once before the head
    product 256x64   8   8   0   8    another product on stage 2
    loss             0   0   0   1

What runs before the first layer of a stage that it does not begin with elsewhere is an embedding;
what runs after the last one is a head and a loss.

What of a backward pass is for weights, its products tell. A BLAS library counts columns first, so
that forward a weight is transposed, and of its gradients only that of the weight has the second
factor transposed, whatever the model; what adds it to those of earlier microbatches comes next:

    gemm …_NTN  gemm …_NNT  add   gelu_backward   gemm …_NTN  gemm …_NNT  add   norm_backward …
      weight      input   weight                    weight      input   weight
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from debubble.timeline.model import I32, I64, LayerKind, StageLayers

# Kernels that run as often as there are layers take more of a pass than those that run once in
# every stage, however many layers it has: 0.07 against 0.01 in the recordings.
_LEAST_SHARE = 0.04
# One stage that mixes tokens, of several, may do so in its head.
_TELLING_STAGES = 2
# One kernel that mixes tokens: attention as torch, vLLM, cuDNN, AMD and FlashInfer spell it, and
# what takes its place in layers of state space models.
_MIXES = re.compile(
    r"flash|fmha|sdpa|attn|attention|PagedKVCache|selective_scan|chunk_scan|delta_rule|wkv",
    re.IGNORECASE,
)
_SOFTMAX = re.compile(r"^(?!.*log_?soft_?max).*soft_?max", re.IGNORECASE)
# What routes tokens to experts, or multiplies those of all in one kernel.
_ROUTES = re.compile(r"top_?k|moe_|expert|GroupProblem|grouped|permute_token", re.IGNORECASE)
_MULTIPLIES = re.compile(r"nvjet|gem[mv]|Cijk|matmul|aten::(?:addmm|mm|bmm|linear)", re.IGNORECASE)
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


Counts = tuple[int, ...]
"""How often something runs in each stage."""


def count_layers(stages: Sequence[StagePasses], names: Sequence[str]) -> dict[int, StageLayers]:
    """Return what each stage is made of; nothing where the stages have nothing in common.

    `names` are those of all kernels, by number.
    """
    stages = sorted(stages, key=lambda passes: passes.stage)
    launched = [[names[number] for number in p.forward.name.tolist()] for p in stages]
    mixers = [_mixers(kernels) for kernels in launched]
    forwards = [passes.forward for passes in stages]
    counts = tuple(map(len, mixers))
    if not all(counts[1:-1]) or sum(map(bool, counts)) < _TELLING_STAGES:
        mixers, counts = [], _layers_by_names(forwards)
    if not counts:
        return {}
    parts = _parts(forwards, counts)
    layers = {}
    for passes, count, (first, end) in zip(stages, counts, parts, strict=True):
        took = passes.forward.end_ns - passes.forward.start_ns
        layers[passes.stage] = StageLayers(
            stage=passes.stage,
            layers=count,
            layer_ns=int(took[first:end].sum()) // max(count, 1),
            before_ns=int(took[:first].sum()),
            after_ns=int(took[end:].sum()),
        )
    cuts = [_cut(rows, first, end) for rows, (first, end) in zip(mixers, parts, strict=False)]
    for stage, kinds in zip(layers, _kinds(stages, launched, cuts), strict=False):
        layers[stage] = replace(layers[stage], kinds=kinds)
    backwards = [passes.backward for passes in stages if passes.backward is not None]
    parts = _parts(backwards, counts, backward=True) if len(backwards) == len(counts) else []
    if any(end > first for first, end in parts):
        for stage, kernels, (first, end) in zip(layers, backwards, parts, strict=True):
            took = kernels.end_ns - kernels.start_ns
            inside = int(took[first:end].sum())
            layers[stage] = replace(
                layers[stage],
                backward_layer_ns=inside // max(layers[stage].layers, 1),
                backward_rest_ns=int(took.sum()) - inside,
            )
    return layers


def _mixers(kernels: Sequence[str]) -> list[int]:
    """Return where each mixing of tokens begins: one kernel, or several without a product between.

    Of a softmax, that which runs most often: routers of experts have one as well, and some losses.
    What runs before the first product prepares them all.
    """
    fused = _runs(kernels, {name for name in kernels if _MIXES.search(name)})
    softmaxes = [_runs(kernels, {name}) for name in set(kernels) if _SOFTMAX.search(name)]
    return fused or max(softmaxes, key=len, default=[])


def _runs(kernels: Sequence[str], names: Collection[str]) -> list[int]:
    """Return where kernels of some names begin to run behind a product."""
    rows, behind_product = [], False
    for row, name in enumerate(kernels):
        if name in names:
            rows += [row] if behind_product else []
            behind_product = False
        elif _MULTIPLIES.search(name):
            behind_product = True
    return rows


def _layers_by_names(kernels: Sequence[PassKernels]) -> Counts:
    """Return how many layers each stage has, by how often most names run in them; () if none."""
    often = _often(kernels)
    votes = Counter(often.values())
    if not votes:
        return ()
    took = Counter[Counts]()
    for each in kernels:
        for name, ns in zip(each.name.tolist(), each.end_ns - each.start_ns, strict=True):
            took[often.get(name, ())] += int(ns)
    usual = max(votes, key=lambda times: (votes[times], -sum(times)))
    enough = _LEAST_SHARE * sum(took.values())
    parts = [times for times in votes if took[times] >= enough and _divides(times, usual)]
    return min([*parts, usual], key=sum)


def _often(kernels: Sequence[PassKernels]) -> dict[int, Counts]:
    """Return how often each name runs in each stage: of those that run in all, ends left out."""
    counts = [Counter(each.name.tolist()) for each in kernels]
    names = set().union(*counts)
    often = {name: tuple(count[name] for count in counts) for name in names}
    return {
        name: times
        for name, times in often.items()
        if all(times[1:-1]) and sum(map(bool, times)) > 1
    }


def _divides(times: Counts, whole: Counts) -> bool:
    """Tell whether what runs so often runs a part as often, the same on all stages."""
    part = sum(whole) // max(sum(times), 1)
    return tuple(part * count for count in times) == whole


def _parts(
    kernels: Sequence[PassKernels], counts: Counts, *, backward: bool = False
) -> list[tuple[int, int]]:
    """Return the first kernel of each pass that is of its layers, and the first that no more is.

    Layers go from the first to the last kernel whose name runs equally often in each of them. Where
    one of the ends runs it more often, that is its embedding, or its head: on the outer side.
    """
    in_a_layer: dict[int, int] = {}
    for name, times in _often(kernels).items():
        each = min((t // n for t, n in zip(times, counts, strict=True) if n), default=0)
        more = [t - each * n for t, n in zip(times, counts, strict=True)]
        if each and not any(more[1:-1]) and 0 in more:
            in_a_layer[name] = each
    parts = []
    for stage, (passed, layers) in enumerate(zip(kernels, counts, strict=True)):
        ends_with_layers = (stage == 0) != backward
        rows: list[int] = []
        for name, each in in_a_layer.items():
            mine = np.flatnonzero(passed.name == name).tolist()
            rows += mine[len(mine) - each * layers :] if ends_with_layers else mine[: each * layers]
        nothing = len(passed.name) * ends_with_layers
        parts.append((min(rows), max(rows) + 1) if rows else (nothing, nothing))
    return parts


def _cut(mixers: Sequence[int], first: int, end: int) -> list[tuple[int, int]]:
    """Cut layers apart: all have as many kernels before they mix tokens as the first one."""
    ahead = max(mixers[0] - first, 0) if mixers else 0
    return list(pairwise([*(row - ahead for row in mixers), end]))


def _kinds(
    stages: Sequence[StagePasses],
    launched: Sequence[Sequence[str]],
    cuts: Sequence[Sequence[tuple[int, int]]],
) -> list[tuple[LayerKind, ...]]:
    """Return the layers of each stage by kind, in order; nothing where all are of one kind."""
    kinds = [
        [any(_ROUTES.search(name) for name in names[start:end]) for start, end in layers]
        for names, layers in zip(launched, cuts, strict=False)
    ]
    if len({experts for stage in kinds for experts in stage}) < 2:
        return []
    found: list[tuple[LayerKind, ...]] = []
    for passes, stage, rows in zip(stages, kinds, cuts, strict=True):
        kernels, kinds_here = passes.forward, []
        took = kernels.end_ns - kernels.start_ns
        for experts, group in groupby(zip(stage, rows, strict=True), key=itemgetter(0)):
            layers = [layer for _, layer in group]
            first, end = layers[0][0], layers[-1][1]
            until = kernels.start_ns[end] if end < len(took) else kernels.end_ns[end - 1]
            kinds_here.append(
                LayerKind(
                    name="experts" if experts else "dense",
                    layers=len(layers),
                    layer_ns=int(took[first:end].sum()) // len(layers),
                    span_ns=int(until - kernels.start_ns[first]) // len(layers),
                )
            )
        found.append(tuple(kinds_here))
    return found


def recomputed_share(stages: Sequence[StagePasses], layers: Mapping[int, StageLayers]) -> float:
    """Return of how many layers, as a share, backward passes launch the forward kernels once more.

    torchtitan's default recomputes every other one.
    """
    stages = sorted(stages, key=lambda passes: passes.stage)
    counts = tuple(held.layers for held in layers.values())
    if not sum(counts) or any(passes.backward is None for passes in stages):
        return 0.0
    often = _often([passes.forward for passes in stages])
    once = [name for name, times in often.items() if times == counts]
    again = [
        sum(int((p.backward.name == name).sum()) for p in stages if p.backward) for name in once
    ]
    return min(min(again, default=0) / sum(counts), 1.0)


def weight_share(names: Sequence[str], took_ns: I64) -> float | None:
    """Return what makes gradients of weights, of a backward pass; None where nothing tells."""
    total = int(took_ns.sum())
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
