"""The kernels of a pass of each stage in → its layers, what is none, its weight gradients.

Layers are alike on all stages, but which kernels run in them is not: a device with fewer processors
is given other products, experts work on other numbers of tokens, compilers fuse the first layer
with what comes before it. But most kernels of a layer run once in each:

    stage            0   1   2   3
    softmax          2   2   2   2    ┐ most names run so often: layers
    activation       2   2   2   2    ┘
    residual         4   4   4   4    twice in a layer
    norm             4   4   4   5    and once before the head
    product 256x64   8   8   0   8    another product on stage 2
    loss             0   0   0   1

What runs before the first layer of a stage that it does not begin with elsewhere is an embedding;
what runs after the last one is a head and a loss. Of layers that are not all alike, as a dense one
before those with experts, attention tells the number: every layer has one.

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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from debubble.timeline.model import I32, I64, StageLayers

# Kernels that run as often as there are layers take more of a pass than those that run once in
# every stage, however many layers it has: 0.07 against 0.01 in the recordings.
_LEAST_SHARE = 0.04
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)
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


Counts = tuple[int, ...]
"""How often something runs in each stage."""


def count_layers(
    stages: Sequence[StagePasses], names: Sequence[str] = ()
) -> dict[int, StageLayers]:
    """Return what each stage is made of; nothing where the stages have nothing in common.

    `names` of kernels tell attention.
    """
    stages = sorted(stages, key=lambda passes: passes.stage)
    attention = {number for number, name in enumerate(names) if _ATTENTION.search(name)}
    counts = _layers_of([passes.forward for passes in stages], attention)
    if counts is None:
        return {}
    forwards = _parts([passes.forward for passes in stages], counts)
    found = {
        passes.stage: StageLayers(
            stage=passes.stage,
            layers=count,
            layer_ns=inside // max(count, 1),
            before_ns=before,
            after_ns=after,
        )
        for passes, count, (before, inside, after) in zip(stages, counts, forwards, strict=True)
    }
    backwards = [passes.backward for passes in stages if passes.backward is not None]
    parts = _parts(backwards, counts, backward=True)
    for passes, count, (before, inside, after) in zip(stages, counts, parts, strict=False):
        found[passes.stage] = replace(
            found[passes.stage],
            backward_layer_ns=inside // max(count, 1),
            backward_rest_ns=before + after,
        )
    return found


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


def _layers_of(kernels: Sequence[PassKernels], attention: Collection[int]) -> Counts | None:
    """Return how many layers each stage has."""
    often = _often(kernels)
    votes = Counter(often.values())
    if not votes:
        return None
    took = Counter[Counts]()
    for each in kernels:
        for name, ns in zip(each.name.tolist(), each.end_ns - each.start_ns, strict=True):
            took[often.get(name, ())] += int(ns)
    telling = Counter(often[name] for name in often if name in attention) or votes
    usual = max(telling, key=lambda times: (telling[times], -sum(times)))
    enough = _LEAST_SHARE * sum(took.values())
    parts = [times for times in votes if took[times] >= enough and _divides(times, usual)]
    return min([*parts, usual], key=sum)


def _divides(times: Counts, whole: Counts) -> bool:
    """Tell whether what runs so often runs a part as often, the same on all stages."""
    part = sum(whole) // max(sum(times), 1)
    return tuple(part * count for count in times) == whole


def _parts(
    kernels: Sequence[PassKernels], counts: Counts, *, backward: bool = False
) -> list[tuple[int, int, int]]:
    """Return what passes take before their layers, in them, and after them.

    Layers go from the first to the last kernel whose name runs equally often in each of them. Where
    one of the ends runs it more often, that is its embedding, or its head: on the outer side.
    Nothing where kernels do not show as many layers.
    """
    if len(kernels) != len(counts):
        return []
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
        took = passed.end_ns - passed.start_ns
        nothing = len(took) * ends_with_layers
        first, end = (min(rows), max(rows) + 1) if rows else (nothing, nothing)
        parts.append((int(took[:first].sum()), int(took[first:end].sum()), int(took[end:].sum())))
    return parts if in_a_layer else []


def recomputed_share(stages: Sequence[StagePasses]) -> float:
    """Return of how many layers, as a share, backward passes launch the forward kernels once more.

    torchtitan's default recomputes every other one.
    """
    counts = _layers_of([passes.forward for passes in stages], ())
    if counts is None or not sum(counts) or any(passes.backward is None for passes in stages):
        return 0.0
    often = _often([passes.forward for passes in stages])
    once = [name for name, times in often.items() if times == counts]
    again = [
        sum(int((p.backward.name == name).sum()) for p in stages if p.backward) for name in once
    ]
    return min(min(again) / sum(counts), 1.0)


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
