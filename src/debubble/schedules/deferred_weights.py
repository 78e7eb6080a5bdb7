"""The rule behind ZB-H1 and ZB-H2: weight gradients wait until memory or the end calls for them."""

from __future__ import annotations

from debubble.schedules.model import Action


def defer_weights(stage: int, microbatches: int, *, ahead: int, limit: int) -> list[Action]:
    """Return one rank's order: `ahead` F, then I and F in turn, W only where it must be.

    A microbatch holds memory from its F to its W. With `limit` of them held, a W goes before the
    next F; when no F is left, each I is followed by a W, and what then remains comes last.
    """
    started = min(ahead, microbatches)
    weighted = 0
    actions = [Action(stage, "F", m) for m in range(started)]
    for microbatch in range(microbatches):
        actions.append(Action(stage, "I", microbatch))
        last = started == microbatches
        if last or started - weighted == limit:
            actions.append(Action(stage, "W", weighted))
            weighted += 1
        if not last:
            actions.append(Action(stage, "F", started))
            started += 1
    return actions + [Action(stage, "W", m) for m in range(weighted, microbatches)]
