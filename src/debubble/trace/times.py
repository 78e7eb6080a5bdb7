"""Microseconds as files write them in → integer nanoseconds out, and what was wrong with them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from debubble.units import NS_PER_US

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

# The year 2096 in microseconds; with a base as large, int64 nanoseconds do not overflow.
MAX_TIME_US = 4.0e15
# 31 years: added to the latest start and the latest base, it stays inside int64 nanoseconds.
MAX_DURATION_US = 1.0e15


def to_ns(microseconds: F64, base_ns: int = 0) -> I64:
    """Convert exactly: the whole part and the fraction apart, so that no digit is rounded twice."""
    whole = np.floor(microseconds)
    nanoseconds = np.rint((microseconds - whole) * NS_PER_US).astype(np.int64)
    return whole.astype(np.int64) * NS_PER_US + nanoseconds + np.int64(base_ns)


def is_time(microseconds: F64) -> Bool:
    """Return where there is a time at all: not missing, NaN or absurd."""
    return np.abs(microseconds) < MAX_TIME_US


def is_duration(microseconds: F64) -> Bool:
    """Return where a duration is there and not negative."""
    return (microseconds >= 0) & (microseconds < MAX_DURATION_US)
