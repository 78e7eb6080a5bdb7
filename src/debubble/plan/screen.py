"""Many orders in → which are worth a closer look, by means and with messages that nobody waits on.

An engine runs an order as the framework does; making one takes longer than this whole answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.schedules import Action, Order
from debubble.simulate.predict import mean_pass_ns
from debubble.timeline.model import PassKind
from debubble.units import NS_PER_S


def screen_latency_s(baseline: Baseline, change: Change) -> float:
    """Return about what the batch latency of a change is."""
    what_if, source = baseline.what_if(change), baseline.source
    hop_ns = float(source.wires.one_way.mean()) * what_if.message_scale
    lengths: dict[tuple[str, int], float] = {
        (kind, stage): mean_pass_ns(source, what_if, PassKind[kind], stage, place)
        for place, actions in enumerate(what_if.order)
        for kind, stage in {(action.kind, action.stage) for action in actions}
    }
    return _run(what_if.order, lengths, hop_ns) * baseline.correction / NS_PER_S


def _run(order: Order, lengths: Mapping[tuple[str, int], float], hop_ns: float) -> float:
    home = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    last = len(home) - 1
    ends: dict[tuple[int, bool, int], float] = {}
    """When the input of a stage is there: forward or backward, of a microbatch."""
    free = [0.0] * len(order)
    rest = [iter(actions) for actions in order]
    upcoming: list[Action | None] = [next(actions, None) for actions in rest]
    moved = True
    while moved:
        moved = False
        for rank, waiting in enumerate(upcoming):
            action = waiting
            while action is not None:
                stage, kind, microbatch, _ = action
                backward = kind != "F"
                if kind == "W" or (not backward and stage == 0):
                    ready: float | None = 0.0
                else:
                    ready = ends.get((stage, backward, microbatch))
                if ready is None:
                    break
                moved = True
                end = max(free[rank], ready) + lengths[kind, stage]
                free[rank] = end
                if kind != "W":
                    to = stage - 1 if backward else stage + 1
                    arrives = end + (hop_ns if home.get(to, rank) != rank else 0.0)
                    ends[to, backward, microbatch] = arrives
                    if kind == "F" and stage == last:
                        ends[stage, True, microbatch] = end
                action = next(rest[rank], None)
            upcoming[rank] = action
    return max(free)
