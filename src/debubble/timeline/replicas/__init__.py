"""All ranks' collectives and their pipelines in → which replica drags the others, what that costs.

A reduction between replicas ends on all its members together: whoever came last has the shortest
one, and what the others' lasts longer is their wait. No clock is shared for that.
"""

from debubble.timeline.replicas.judge import (
    DRAGS,
    UNDECIDED,
    Difference,
    Replica,
    ReplicaFigures,
    judge_replicas,
    judge_run,
    shown_of,
)
from debubble.timeline.replicas.workers import SlowWorker, Workers, compare_workers

__all__ = [
    "DRAGS",
    "UNDECIDED",
    "Difference",
    "Replica",
    "ReplicaFigures",
    "SlowWorker",
    "Workers",
    "compare_workers",
    "judge_replicas",
    "judge_run",
    "shown_of",
]
