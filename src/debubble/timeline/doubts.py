"""Ranks beside each other in → those that lack what the others have, and may have lost it.

What one rank's trace cannot be is told where it is read (`trace/guard.py`). This needs the others:

    rank 0   F: 40 kernels   F: 40   F: 40      threads 2   memory yes   messages with kernels
    rank 1   F: 40 kernels   F: 31   F: 40      threads 1   memory yes   messages with kernels
                                 └ named: some were lost  └ named: its passes may be told wrong
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from debubble.errors import Code, Gap
from debubble.timeline.model import I32, I64, Flags, Passes, PassKind
from debubble.timeline.passes import Assignment
from debubble.timeline.steps import RankRecord
from debubble.timeline.work import number_passes
from debubble.trace.columns import KernelKind, Operation, RankTrace, peak_memory
from debubble.trace.optable import Op, OpTable
from debubble.units import show_percent

# Passes of one stage and kind that launch neither of their two commonest numbers of kernels are an
# eighth of all at most on 120 recorded ranks; with a tenth of a rank's kernels lost, a half.
_MANY_PASSES, _OF_OTHER_NUMBERS = 6, 0.3
# A pass with so few of the usual kernels has lost some, unless it has fewer on other ranks, too.
_SHORT, _SHORTER = 0.75, 0.95
# Batches of a stream for which a rank runs fewer kernels than for others like them: none at all on
# the 40 recorded ranks of streams. A pipeline of two shows not which of them it is.
_FEWEST_SHORT, _SHORT_BATCHES, _FEWEST_PEERS = 2, 0.04, 3
# Of 190 recorded ranks with two peers and more, three lack a kernel that all others have: the last
# ones of Megatron, which run others as often.
_FEWEST_OF_NAME, _INSTEAD = 6, 0.95
# Libraries that send by kernels of the device.
_BY_KERNELS = frozenset({"nccl", "cuda:nccl", "rccl"})
# A thread that launches passes launches hundreds of kernels.
_OFTEN = 10
# As torch, its compiler, cuDNN and libraries of attention call kernels of backward passes.
_BACKWARD = re.compile(r"backward|_bwd|bprop|[dw]grad|_grad_", re.IGNORECASE)
# As torch calls the range of `Optimizer.step`.
_OPTIMIZER = "Optimizer.step#"

# Passes of ranks are within three times each other in all tables of others; of one in another unit,
# a thousand times.
_IN_ANOTHER_UNIT = 300
# Clocks of timers are off by 2 % of a pass at most in tables of others.
_AT_ONCE = 0.1
# On all 24 ranks of production tables that time messages, half of the results are sent within a
# thousandth of a pass of its end.
_SENT_AT_ONCE, _SENT_APART = 0.005, 0.03
# Where more steps than these hold what cannot be, it is no slip of a row or two.
_ODD_STEPS = 0.05


def name_untold(traces: Sequence[RankTrace]) -> list[Gap]:
    """Name ranks that do not tell of memory, optimizer, threads or messages what others tell."""
    peaks = [peak_memory(trace) for trace in traces]
    others = any(peak is not None for peak in peaks)
    several = len(traces) > 1  # an engine's one rank may say so, its memory laid out before
    without_memory = [
        peak is None
        and (others or (several and bool(trace.header.profile_memory and len(trace.kernels))))
        for trace, peak in zip(traces, peaks, strict=True)
    ]
    optimizers = list(map(_marks_optimizer, traces))
    threads = list(map(_launching_threads, traces))
    usual = sorted(threads)[len(threads) // 2]
    carried = list(map(_carries_messages, traces))
    asked = (
        (
            without_memory,
            Code.WRONG_MEMORY,
            "nothing of its device's memory in it, though other ranks have some"
            if others
            else "nothing of its device's memory in it, though it was recorded with profile_memory",
            "record with profile_memory=True on every rank",
        ),
        (
            [any(optimizers) and not has for has in optimizers],
            Code.UNEVEN_RANGES,
            "no range of an optimizer that launches, though other ranks have one",
            "record the same steps on every rank",
        ),
        (
            [0 < count < usual for count in threads],
            Code.WRONG_FIELDS,
            f"it launches from fewer than {usual} threads, as other ranks do: passes may be wrong",
            "record the rank again",
        ),
        (
            [
                has is False
                and (any(carried) or (len(trace.kernels) and trace.header.backend in _BY_KERNELS))
                for trace, has in zip(traces, carried, strict=True)
            ],
            Code.WRONG_FIELDS,
            "none of its messages has a kernel, though NCCL sends by kernels",
            "record the rank again",
        ),
    )
    return [
        _gap(trace, code, message, hint)
        for untold, code, message, hint in asked
        for trace, is_untold in zip(traces, untold, strict=True)
        if is_untold
    ]


def _gap(trace: RankTrace, code: Code, message: str, hint: str) -> Gap:
    """Name a rank that is kept."""
    return Gap(code=code, message=message, hint=hint, file=trace.file, rank=trace.rank)


def _marks_optimizer(trace: RankTrace) -> bool:
    """Tell whether a range of an optimizer launches something, or is there on a CPU."""
    ranges, calls = trace.annotations, trace.launches.start_ns
    names = [row for row, name in enumerate(trace.names) if name.startswith(_OPTIMIZER)]
    mine = np.isin(ranges.name, names) & (ranges.stream < 0)
    end_ns = ranges.start_ns[mine] + ranges.duration_ns[mine]
    first, last = np.searchsorted(calls, ranges.start_ns[mine]), np.searchsorted(calls, end_ns)
    return bool((last > first).any() if len(trace.kernels) else mine.any())


def _launching_threads(trace: RankTrace) -> int:
    """Count threads that launch kernels: by autograd's, backward passes are told."""
    calls = trace.kernels.launch[trace.kernels.launch >= 0]
    launched = np.bincount(trace.launches.thread[calls], minlength=1)
    return int((launched >= _OFTEN).sum())


def _carries_messages(trace: RankTrace) -> bool | None:
    """Tell whether a message has its kernel; None where there are no messages."""
    operators = trace.operators
    moves = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
    return bool((operators.kernel[moves] >= 0).any()) if moves.any() else None


def name_doubtful_passes(
    assigned: Sequence[tuple[RankRecord, Assignment]], *, in_steps: bool
) -> list[Gap]:
    """Name ranks of a pipeline that lost kernels of some passes, or all of their backward ones."""
    uneven = _name_uneven_passes(assigned) if in_steps else _name_uneven_batches(assigned)
    return [*uneven, *_name_hidden_backward(assigned)]


def _name_hidden_backward(assigned: Sequence[tuple[RankRecord, Assignment]]) -> list[Gap]:
    """Name ranks that train, by the names of their kernels, where no pass is told as backward.

    Autograd's own thread tells backward passes, or labels do.
    """
    if any((passes.kind > PassKind.F).any() for _, passes in assigned):
        return []
    hidden = []
    for rank, _ in assigned:
        names = [_BACKWARD.search(name) is not None for name in rank.trace.names]
        trains = len(rank.trace.kernels) and np.array(names)[rank.work.name].sum() >= _OFTEN
        hidden += [rank] if trains else []
    return [
        _gap(
            rank.trace,
            Code.WRONG_FIELDS,
            "it runs kernels of backward passes, and no pass is told as one: "
            "its threads are not those that it had, or no step of it is whole",
            "record whole steps, and threads as they are; or label passes",
        )
        for rank in hidden
    ]


def _name_uneven_passes(assigned: Sequence[tuple[RankRecord, Assignment]]) -> list[Gap]:
    """Name ranks whose passes run other numbers of kernels, where those of most ranks do not.

    The first microbatch sums no gradients and the last reduces them, on most ranks alike; all
    others launch the same.
    """
    shares = [_kernel_shares(rank, passes) for rank, passes in assigned]
    uneven = [
        scattered
        or any(
            share < _SHORT
            and 2 * sum(other.get(key, 1.0) < _SHORTER for _, other in shares) <= len(shares)
            for key, share in mine.items()
        )
        for scattered, mine in shares
    ]
    if 2 * sum(uneven) > len(assigned):
        return []
    return [
        _gap(
            rank.trace,
            Code.LOST_OPERATORS,
            "its passes run other numbers of kernels, where those of other ranks run "
            "the same: some may have been lost",
            "record the rank again; if its stage does differ from pass to pass, all is well",
        )
        for (rank, _), is_uneven in zip(assigned, uneven, strict=True)
        if is_uneven
    ]


def _name_uneven_batches(assigned: Sequence[tuple[RankRecord, Assignment]]) -> list[Gap]:
    """Name ranks that run fewer kernels for some batches of a stream than for others like them.

    Batches are alike where the other ranks run as many kernels for them: a server's batches differ,
    and on all ranks alike. The first and the last batch may be cut.
    """
    kernels: dict[int, dict[int, int]] = {}
    for rank, passes in assigned:
        kept = (passes.kind >= 0) & ~rank.work.collective
        batch, count = np.unique(passes.microbatch[kept], return_counts=True)
        kernels[rank.rank] = {int(key): int(many) for key, many in zip(batch, count, strict=True)}
    common = sorted(set.intersection(*map(set, kernels.values())))[1:-1] if kernels else []
    if len(kernels) < _FEWEST_PEERS:
        return []
    uneven = []
    for rank, _ in assigned:
        others = [counts for other, counts in kernels.items() if other != rank.rank]
        alike: dict[int, list[int]] = {}
        for number in common:
            usual = sorted(counts[number] for counts in others)[len(others) // 2]
            alike.setdefault(usual, []).append(kernels[rank.rank][number])
        short = sum(count < _SHORTER * max(like) for like in alike.values() for count in like)
        if short >= max(_FEWEST_SHORT, _SHORT_BATCHES * len(common)):
            uneven.append(rank)
    if 2 * len(uneven) > len(assigned):
        return []
    return [
        _gap(
            rank.trace,
            Code.LOST_OPERATORS,
            "it runs fewer kernels for some batches than for others, where other ranks run "
            "the same: some may have been lost",
            "record the rank again; if its stage does differ from batch to batch, all is well",
        )
        for rank in uneven
    ]


def name_lost_names(assigned: Sequence[tuple[RankRecord, Assignment]]) -> list[Gap]:
    """Name ranks that never run a kernel that all others run often, nor one in its place.

    Layers are alike on all ranks. Where one was tuned to another kernel, that runs as often. What
    runs once a pass may be of the ends: a first layer has no gradient to hand on. And only ranks
    with the same kinds of passes are held against each other: where backward passes are cut, those
    of a first stage stay whole.
    """
    alike: dict[frozenset[int], list[RankTrace]] = {}
    for rank, passes in assigned:
        alike.setdefault(frozenset(passes.kind[passes.kind >= 0].tolist()), []).append(rank.trace)
    return [gap for traces in alike.values() for gap in _lost_names(traces)]


def _lost_names(traces: Sequence[RankTrace]) -> list[Gap]:
    """Name them among ranks whose passes are of the same kinds."""
    counts: list[dict[str, int]] = []
    for trace in traces:
        kernels = trace.kernels
        number = np.bincount(kernels.name[kernels.kind == KernelKind.COMPUTE]).tolist()
        counts.append({trace.names[row]: count for row, count in enumerate(number) if count})
    if len(traces) < _FEWEST_PEERS or not all(counts):
        return []
    ranks_with = Counter(name for known in counts for name in known)
    often = {
        name: sorted(known[name] for known in counts if name in known)
        for name, ranks in ranks_with.items()
        if ranks == len(traces) - 1
    }
    gaps = []
    for trace, mine in zip(traces, counts, strict=True):
        own = [count for name, count in mine.items() if ranks_with[name] == 1]
        fewest = max(_FEWEST_OF_NAME, 2 * _passes_back(trace))
        lost = [
            name
            for name in sorted(often.keys() - mine.keys())
            if often[name][0] >= fewest
            and not any(
                _INSTEAD * often[name][0] <= count <= often[name][-1] / _INSTEAD for count in own
            )
        ]
        if lost:
            gaps.append(
                _gap(
                    trace,
                    Code.LOST_OPERATORS,
                    f"it never runs {lost[0][:60]}, which all other ranks run "
                    f"{often[lost[0]][0]} times and more: its kernels may have been lost",
                    "record the rank again; if its layers are others, all is well",
                )
            )
    return gaps


def _passes_back(trace: RankTrace) -> int:
    """Count the gradients of an end of a pipeline, which has one peer; else there are none."""
    operators = trace.operators
    sends = operators.peer[operators.operation == Operation.SEND]
    receives = operators.peer[operators.operation == Operation.RECEIVE]
    peers = set(sends.tolist()) | set(receives.tolist())
    return min(len(sends), len(receives)) if len(peers) == 1 else 0


def _kernel_shares(
    rank: RankRecord, passes: Assignment
) -> tuple[bool, dict[tuple[int, int, int], float]]:
    """Tell whether passes of a kind run ever other numbers of kernels, and each one's share.

    By step, kind and microbatch: its kernels over those of the middle one of its kind; of several
    stages the least. The first and the last pass of a capture may be cut.
    """
    kept = np.flatnonzero((passes.kind >= 0) & (rank.work_step >= 0) & ~rank.work.collective)
    (step, stage, kind, microbatch), group = number_passes(
        rank.work_step[kept], passes.stage[kept], passes.kind[kept], passes.microbatch[kept]
    )
    kernels = np.bincount(group, minlength=len(stage))
    scattered, shares = False, dict[tuple[int, int, int], float]()
    for alike in {*zip(stage.tolist(), kind.tolist(), strict=True)}:
        mine = np.flatnonzero((stage == alike[0]) & (kind == alike[1]))
        if len(mine) < _MANY_PASSES:
            continue
        times = np.sort(np.unique(kernels[mine], return_counts=True)[1])
        scattered |= int(times[:-2].sum()) > _OF_OTHER_NUMBERS * len(mine)
        usual = float(np.median(kernels[mine]))
        for row in set(mine.tolist()) - {int(group[0]), int(group[-1])}:
            key = (int(step[row]), int(kind[row]), int(microbatch[row]))
            shares[key] = min(shares.get(key, 1.0), float(kernels[row]) / usual)
    return scattered, shares


# Op tables: what the passes of no rank can be.


def sort_out_steps(
    wrong: dict[int, tuple[str, frozenset[int]]], passes: Passes, pipeline_of: I64
) -> tuple[frozenset[int], dict[int, tuple[int, ...]]]:
    """Return the pipelines that nothing is told of, and the steps that are left out of others.

    Where no more than a step in twenty is wrong, the others stand for the pipeline.
    """
    steps_of: dict[int, set[int]] = {}
    for name, (_, steps) in wrong.items():
        steps_of.setdefault(int(pipeline_of[name]), set()).update(steps)
    refused = frozenset(
        pipeline
        for pipeline, steps in steps_of.items()
        if len(steps)
        > _ODD_STEPS * len(np.unique(passes.step[pipeline_of[passes.rank] == pipeline]))
    )
    odd = {
        name: tuple(sorted(steps))
        for name, (_, steps) in wrong.items()
        if pipeline_of[name] not in refused
    }
    return refused, odd


def name_unlike_sends(apart: dict[int, float], file: str) -> list[Gap]:
    """Name ranks whose passes do not end when their results are sent, as those of others do."""
    if not apart or float(np.median([*apart.values()])) > _SENT_AT_ONCE:
        return []
    return [
        Gap(
            code=Code.IMPOSSIBLE,
            message=f"its passes end {show_percent(share)} of a pass away from where their results "
            "are sent, those of other ranks at once: their times may not be as they were",
            hint="write its rows again; if it does something between the two, all is well",
            file=file,
            rank=name,
        )
        for name, share in apart.items()
        if share > _SENT_APART
    ]


def find_impossible(
    passes: Passes, pipeline_of: I64, *, whole: bool
) -> dict[int, tuple[str, frozenset[int]]]:
    """Say of ranks what none can have done, and in which steps: two passes at once, or one early.

        stage 0   ├ F0 ┤├ F1 ┤               ├─ B0 ─┤
        stage 1          ├ F0 ┤├─ B0 ─┤       stage 1's F0 not before the end of stage 0's, its B0
                                              not before its F0, stage 0's B0 not before its B0

    Both are kept to within 2 % of a pass in all tables of others. `whole`: a pass is one row. Of
    passes in a wrong order, the rank that has most of them in its pipeline is named.
    """
    wrong: dict[int, tuple[str, frozenset[int]]] = {}

    def blame(name: int, why: str, rows: NDArray[np.integer[Any]]) -> None:
        first, steps = wrong.get(name, (why, frozenset()))
        wrong[name] = first, steps | {*passes.step[rows].tolist()}

    def blame_each(rows: NDArray[np.integer[Any]], why: str) -> None:
        for name in np.unique(passes.rank[rows]).tolist():
            blame(name, why, rows[passes.rank[rows] == name])

    lasts = passes.end_ns - passes.start_ns
    blame_each(np.flatnonzero(lasts <= 0), "passes that take no time")
    names = np.unique(passes.rank).tolist()
    usual = {name: float(np.median(lasts[passes.rank == name])) for name in names}
    middle = sorted(usual.values())[len(usual) // 2] if usual else 0.0
    short = [name for name in names if 0 < usual[name] < middle / _IN_ANOTHER_UNIT]
    blame_each(
        np.flatnonzero(np.isin(passes.rank, short)),
        "passes hundreds of times as short as those of other ranks",
    )
    order = np.lexsort((passes.start_ns, passes.rank))
    beside = order[1:][_too_early(passes, order, np.diff(passes.rank[order]) == 0)]
    blame_each(beside, "two of its passes at once")
    order = np.lexsort((passes.start_ns, passes.kind, passes.stage, passes.rank))
    alike = np.stack((passes.rank, passes.stage, passes.kind))[:, order]
    turned = ~np.diff(alike).any(axis=0) & (np.diff(passes.step[order]) < 0)
    blame_each(
        np.concatenate((order[:-1][turned], order[1:][turned])),
        "passes of a step among those of the step before",
    )
    if not whole:
        return wrong
    batch = (passes.microbatch, passes.step, pipeline_of[passes.rank])
    forward, backward = passes.kind == PassKind.F, np.isin(passes.kind, (PassKind.B, PassKind.I))
    early = []
    for rows, keys in (
        (forward, (passes.stage, *batch)),
        (backward, (-passes.stage, *batch)),
        (forward | backward, (backward, passes.stage, *batch)),
    ):
        order = np.lexsort(keys)
        order = order[(rows & (passes.microbatch >= 0))[order]]
        apart = [np.diff(np.asarray(key, dtype=np.int64)[order]) for key in keys]
        found = _too_early(passes, order, (apart[0] == 1) & ~np.any(apart[1:], axis=0))
        early += [order[:-1][found], order[1:][found]]
    sides = np.concatenate(early)
    for pipeline in np.unique(pipeline_of[passes.rank[sides]]).tolist():
        mine = sides[pipeline_of[passes.rank[sides]] == pipeline]
        blamed = np.bincount(passes.rank[mine])
        most = np.flatnonzero(blamed == blamed.max()).tolist()
        for name in [name for name in most if name in wrong] or most:
            why = "passes before those that they need, or after those that they feed"
            blame(name, why, mine)
    return wrong


def find_lost_backward(table: OpTable, rank: I32, is_pass: Flags) -> dict[int, str]:
    """Name ranks without a backward pass that exchange gradients, or whose stage has one elsewhere.

    The first stages of a model may be frozen: then nothing comes back to them, in no replica.
    """
    backward = is_pass & (table.op != Op.FORWARD)
    back = set(rank[backward].tolist())
    asked = {
        "gradients sent or received": np.isin(table.op, (Op.BACKWARD_SEND, Op.BACKWARD_RECEIVE)),
        "other ranks with its stage have some": np.isin(table.stage, table.stage[backward]),
    }
    return {
        name: f"no backward pass, and {why}"
        for why, rows in reversed(asked.items())
        for name in sorted(set(rank[rows].tolist()) - back)
    }


def _too_early(passes: Passes, order: NDArray[np.intp], follows: Flags) -> Flags:
    """Tell which passes, but for the first, begin before the one ahead of them ends."""
    before, after = order[:-1], order[1:]
    lasts = passes.end_ns - passes.start_ns
    allowed = _AT_ONCE * np.minimum(lasts[before], lasts[after])
    early: Flags = follows & (passes.end_ns[before] - passes.start_ns[after] > allowed)
    return early
