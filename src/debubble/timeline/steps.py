"""One rank's trace in → its steps, as the host marked them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import I32, I64, UNKNOWN
from debubble.trace.columns import RankTrace

_STEP = re.compile(r"^ProfilerStep#(\d{1,9})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Windows of the host, sorted. Work belongs to the step whose window holds its launch."""

    number: I32
    start_ns: I64
    end_ns: I64

    def at(self, moments_ns: I64) -> I32:
        """Return the step of each moment; -1 outside of all."""
        if not len(self.number):
            return np.full(len(moments_ns), UNKNOWN, dtype=np.int32)
        row = np.searchsorted(self.start_ns, moments_ns, side="right") - 1
        inside = (row >= 0) & (moments_ns < self.end_ns[row])
        return np.where(inside, self.number[row], UNKNOWN).astype(np.int32)


def whole_run() -> Steps:
    """Return the one step of a run that marks none: all of it, as number 0."""
    limits = np.iinfo(np.int64)
    return Steps(
        number=np.zeros(1, dtype=np.int32),
        start_ns=np.array([limits.min], dtype=np.int64),
        end_ns=np.array([limits.max], dtype=np.int64),
    )


def find_steps(trace: RankTrace) -> Steps:
    """Read the profiler's own marks; none of them: no steps."""
    numbers = np.array(
        [int(found[1]) if (found := _STEP.match(name)) else UNKNOWN for name in trace.names] or [-1]
    )
    annotations = trace.annotations
    number = numbers[annotations.name]
    rows = np.flatnonzero((number >= 0) & (annotations.stream < 0))
    start = annotations.start_ns[rows]
    return Steps(
        number=number[rows].astype(np.int32),
        start_ns=start,
        end_ns=start + annotations.duration_ns[rows],
    )


def marks_steps(trace: RankTrace) -> bool:
    """Tell whether the profiler marked any step on this rank."""
    return bool(len(find_steps(trace).number))
