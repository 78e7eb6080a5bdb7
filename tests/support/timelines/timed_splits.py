"""Times splits by running the order of a schedule, one pass of max and add over all of them."""

from __future__ import annotations

import numpy as np

from debubble.timeline.schedules import order_of
from debubble.timeline.schedules.finish import _needs, _result


def in_turn(order):
    """Return the passes of all ranks so that whatever a pass needs stands before it."""
    stages = 1 + max(action.stage for actions in order for action in actions)
    made, waiting, turn = set(), [list(actions) for actions in order], []
    while any(waiting):
        for rank, actions in enumerate(waiting):
            while actions and all(need in made for need in _needs(actions[:1], stages)):
                action = actions.pop(0)
                made.add(_result(action))
                turn.append((rank, action, list(_needs([action], stages))))
    return turn


def timer_of(problem, name, chunks=None, hop_s=0.0):
    """Return a function that times splits under a schedule; equal hops between ranks if any."""
    order = order_of(name, problem.ranks, problem.microbatches, chunks)
    turn = in_turn(order)
    layers, extras = problem.layers, problem.stages
    of_kind = {
        "F": (layers.forward, extras.forward),
        "B": (layers.backward + layers.weight, extras.backward + extras.weight),
        "I": (layers.backward, extras.backward),
        "W": (layers.weight, extras.weight),
    }

    def evaluate(splits):
        ends = np.cumsum(splits, axis=1)
        took = {}
        for kind, (each, extra) in of_kind.items():
            sums = np.concatenate(([0.0], np.cumsum(each)))
            took[kind] = problem.slowness * (sums[ends] - sums[ends - splits]) + extra
        done = {}
        free = [np.zeros(len(splits)) for _ in order]
        for rank, action, needs in turn:
            for need in needs:
                away = problem.rank[need[0]] != rank
                free[rank] = np.maximum(free[rank], done[need] + hop_s * away)
            free[rank] = free[rank] + took[action.kind][:, action.stage]
            done[_result(action)] = free[rank]
        return np.max(free, axis=0)

    return evaluate
