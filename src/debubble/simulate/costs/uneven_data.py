"""The same microbatch on every stage in → how much longer its data take than those of others.

    microbatch      0     1     2     3
    stage 0        10    10    21    10      twice as long wherever it goes: long sequences, or
    stage 1        12    12    25    12      experts that are asked more than others
    stage 2        10    17    21    10      17: a stray pass, for stages 0 and 1 know nothing of it

A slow device is slow with all microbatches. What the lower half of the stages has in common came
with the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from debubble.timeline.model import F64, I64, Passes, PassKind

# Of twelve recorded runs whose microbatches were all alike, none had one that took longer: ranks
# that share a device, and reductions beside passes, made it up to 1.13.
UNEVEN = 1.15

Slot = tuple[int, int, int]
"""Step, kind of pass and microbatch."""


def compare_microbatches(
    passes: Passes,
    lengths: I64,
    median: Mapping[tuple[int, int], int],
    first: Mapping[tuple[int, int], int],
) -> dict[Slot, float]:
    """Return what each microbatch takes of what most take, on the lower middle of the stages.

    Nothing of kinds of passes that one stage alone has.
    """
    times: dict[Slot, list[float]] = {}
    columns = (passes.stage, passes.kind, passes.step, passes.microbatch, lengths)
    for stage, kind, step, microbatch, length in zip(*(c.tolist() for c in columns), strict=True):
        usual = median[stage, kind]
        if microbatch == 0:
            usual = first.get((stage, kind), usual)
        times.setdefault((step, kind, microbatch), []).append(length / max(usual, 1))
    stages = {
        kind: max(len(times[slot]) for slot in times if slot[1] == kind)
        for kind in {kind for _, kind, _ in times}
    }
    return {
        slot: sorted(all_of)[(len(all_of) - 1) // 2]
        for slot, all_of in times.items()
        if len(all_of) == stages[slot[1]] > 1
    }


def held_by_forward(passes: Passes, lengths: I64, median: Mapping[tuple[int, int], int]) -> F64:
    """Return what each pass takes of the usual by its data, as its forward passes show it.

    A first backward pass is short for want of gradients, and long for what its microbatch holds.
    """
    forward = passes.kind == PassKind.F
    data = compare_microbatches(passes.where(forward), lengths[forward], median, {})
    if max(data.values(), default=1.0) < UNEVEN:
        return np.ones(len(passes))
    columns = (passes.step.tolist(), passes.microbatch.tolist())
    slots = ((step, int(PassKind.F), number) for step, number in zip(*columns, strict=True))
    # Forward passes that took no time at all, as marks may have them, tell nothing.
    return np.array([data.get(slot) or 1.0 for slot in slots])


def even_times(pipelines: Iterable[Mapping[Slot, float]]) -> dict[tuple[int, int], float]:
    """Return, by step and kind, what microbatches of all pipelines would take, all holding as much.

    Nothing where no microbatch takes clearly longer than most: their data are even.
    """
    found: dict[tuple[int, int], list[float]] = {}
    for data in pipelines:
        for (step, kind, _), times in data.items():
            found.setdefault((step, kind), []).append(times)
    if max((max(all_of) for all_of in found.values()), default=1.0) < UNEVEN:
        return {}
    return {at: sum(all_of) / len(all_of) for at, all_of in found.items()}
