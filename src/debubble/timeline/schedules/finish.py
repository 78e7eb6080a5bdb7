"""An order in → whether it can finish, and how many microbatches it holds at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from debubble.errors import UsageError
from debubble.timeline.schedules.named import Action, Order, cells_of

Pass = tuple[int, str, int]
"""Stage, F, B (also for I: both give the input gradient) or W, microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What one rank holds, a row before its first pass and after each: [row, stage of the rank]."""

    stages: tuple[int, ...]
    in_flight: NDArray[np.int64]
    """Microbatches whose activations the stage still needs: until B, or until W."""
    halfway: NDArray[np.int64]
    """Those of them that had I and wait for W."""
    reduced: NDArray[np.bool_]
    """Whether the stage has gradients: from its first B or W on."""


def can_finish(order: Order) -> bool:
    """Say whether every pass is there once and gets its input in the end."""
    return find_fault(order) is None


def check_order(order: Order) -> None:
    """Refuse an order that cannot finish, and say why."""
    fault = find_fault(order)
    if fault:
        raise UsageError(
            f"this order cannot finish: {fault}",
            hint="every stage needs every microbatch's F once, and its B, or I and W, once",
        )


def find_fault(order: Order) -> str | None:
    """Return what keeps an order from finishing, as far as order alone can: sends never block."""
    faults = (_fault_in_stages, _fault_in_passes, _fault_in_pairs, _fault_in_waits)
    return next(filter(None, (look(order) for look in faults)), None)


def hold(actions: list[Action]) -> Holdings:
    """Count over the passes of one rank."""
    stages = tuple(sorted({action.stage for action in actions}))
    column = {stage: number for number, stage in enumerate(stages)}
    shape = (len(actions) + 1, len(stages))
    change, waits, grads = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    for row, action in enumerate(actions, start=1):
        at = row, column[action.stage]
        change[at] = {"F": 1, "I": 0}.get(action.kind, -1)
        waits[at] = {"I": 1, "W": -1}.get(action.kind, 0)
        grads[at] = action.kind in {"B", "W"}
    return Holdings(
        stages=stages,
        in_flight=np.cumsum(change, axis=0),
        halfway=np.cumsum(waits, axis=0),
        reduced=np.cumsum(grads, axis=0) > 0,
    )


def _fault_in_stages(order: Order) -> str | None:
    holders: dict[int, set[int]] = defaultdict(set)
    for rank, actions in enumerate(order):
        for action in actions:
            if min(action.stage, action.microbatch) < 0:
                return f"{action} counts from below 0"
            holders[action.stage].add(rank)
    if not holders:
        return "it is empty"
    for stage in range(max(holders) + 1):
        if not holders[stage]:
            return f"no rank has stage {stage}"
        if len(holders[stage]) > 1:
            return f"stage {stage} is on ranks {', '.join(map(str, sorted(holders[stage])))}"
    return None


def _fault_in_passes(order: Order) -> str | None:
    """Look for passes that are missing or there twice."""
    seen: set[Action] = set()
    kinds: dict[tuple[int, int], str] = defaultdict(str)
    for action in (action for actions in order for action in actions):
        bare = action._replace(overlap=False)
        if bare in seen:
            return f"{action} is there twice"
        seen.add(bare)
        kinds[action.stage, action.microbatch] += action.kind
    allowed = {"F"} if set("".join(kinds.values())) == {"F"} else {"BF", "FIW"}
    stages = 1 + max(stage for stage, _ in kinds)
    microbatches = 1 + max(microbatch for _, microbatch in kinds)
    for stage in range(stages):
        for microbatch in range(microbatches):
            found = "".join(sorted(kinds[stage, microbatch]))
            if found not in allowed:
                has = " and ".join(found) or "nothing"
                return f"stage {stage} has {has} of microbatch {microbatch}"
    return None


def _fault_in_pairs(order: Order) -> str | None:
    for actions in order:
        for action, after in zip(actions, [*actions[1:], None], strict=True):
            if action.overlap and (action.kind != "F" or after is None or after.kind != "B"):
                return f"{action} is to overlap, but no B comes after it"
    return None


def _fault_in_waits(order: Order) -> str | None:
    """Run the order: each rank goes on until it lacks an input, and is woken when that is made."""
    stages = 1 + max(action.stage for actions in order for action in actions)
    cells = [list(cells_of(actions)) for actions in order]
    at = [0] * len(order)
    made: set[Pass] = set()
    sleepers: dict[Pass, list[int]] = defaultdict(list)
    awake = list(range(len(order)))
    while awake:
        rank = awake.pop()
        while at[rank] < len(cells[rank]):
            cell = cells[rank][at[rank]]
            lacking = next((need for need in _needs(cell, stages) if need not in made), None)
            if lacking is not None:
                sleepers[lacking].append(rank)
                break
            at[rank] += 1
            for result in map(_result, cell):
                made.add(result)
                awake += sleepers.pop(result, [])
    for need, ranks in sleepers.items():
        waiting = cells[ranks[0]][at[ranks[0]]][0]
        stage, kind, microbatch = need
        return (
            f"rank {ranks[0]} waits at {waiting} for {stage}{kind}{microbatch}, which never comes"
        )
    return None


def _needs(cell: tuple[Action, ...], stages: int) -> Iterator[Pass]:
    """Yield the passes whose results must be there before the cell can start."""
    for stage, kind, microbatch, _ in cell:
        if kind == "F" and stage > 0:
            yield stage - 1, "F", microbatch
        elif kind == "W":
            yield stage, "B", microbatch
        elif kind != "F":
            yield stage, "F", microbatch
            if stage + 1 < stages:
                yield stage + 1, "B", microbatch


def _result(action: Action) -> Pass:
    return action.stage, "B" if action.kind == "I" else action.kind, action.microbatch
