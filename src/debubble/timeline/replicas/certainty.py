"""How late each replica came, step by step, in → whether one of them drags.

Two questions, either of which may answer: is it last in more steps than chance lets it (which asks
nothing of the noise, but takes ten steps of two replicas), and is its lead larger than what steps
differ by (Student's test, the noise pooled over all replicas). Each is asked of the worst of all
replicas, so each is held to its share of the error.
"""

from __future__ import annotations

import math

import numpy as np

from debubble.timeline.model import F64

# How often equal replicas may be told apart, over both questions: tests/timeline counts.
ERROR = 0.005
FEWEST_STEPS = 2
# Of two steps that both had a spike, Student's test of 16 replicas named one in 50 runs of equals.
_FEWEST_FOR_STUDENT = 3
# Beyond so many degrees of freedom Student's distribution no longer moves.
_MOST_FREEDOM = 400


def surely_late(late_ns: F64, last: F64, replica: int) -> bool:
    """Tell whether a replica's lead is no accident; never of a single step."""
    mine = late_ns[:, replica]
    known = np.flatnonzero(np.isfinite(late_ns).any(axis=0))
    replica = int(np.searchsorted(known, replica))
    late_ns, last = late_ns[:, known], last[:, known]
    steps = int(np.isfinite(mine).sum())
    if steps < FEWEST_STEPS or np.nanmean(mine) <= 0:
        return False
    replicas = late_ns.shape[1]
    chance = chance_of_last(int(np.nansum(last[:, replica] == 1)), steps, replicas)
    return bool(min(chance, _chance_of_lead(late_ns, replica)) * replicas <= ERROR / 2)


def chance_of_last(times: int, steps: int, replicas: int) -> float:
    """Return how likely one of equal replicas is last in so many steps, or more."""
    one = 1 / replicas
    return math.fsum(
        math.comb(steps, n) * one**n * (1 - one) ** (steps - n) for n in range(times, steps + 1)
    )


def _chance_of_lead(late_ns: F64, replica: int) -> float:
    steps, replicas = late_ns.shape
    if steps < _FEWEST_FOR_STUDENT:
        return 1.0
    off = late_ns - np.nanmean(late_ns, axis=0)
    freedom = (steps - 1) * (replicas - 1)
    pooled = float(np.nansum(off**2)) / (freedom * replicas / (replicas - 1))
    own = float(np.nansum(off[:, replica] ** 2)) / (steps - 1)
    noise = math.sqrt(max(pooled, own) / steps)
    lead = float(np.nanmean(late_ns[:, replica]))
    return student_tail(lead / noise, freedom) if noise else 0.0


def student_tail(t: float, freedom: int) -> float:
    """Return how likely Student's t is larger, by its finite series for whole degrees."""
    freedom = min(freedom, _MOST_FREEDOM)
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for number in range(1 + odd, freedom, 2):
        total += term
        term *= square * number / (number + 1)
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return max(0.0, (1 - within) / 2)
