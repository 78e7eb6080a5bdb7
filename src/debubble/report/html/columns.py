"""Numpy columns in → text that the page's script opens as typed arrays."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

AnyArray = NDArray[Any]
# Half of what 32 bits count: a replay may last longer than the step.
_MOST = 2**31


def pack(column: AnyArray, kind: str) -> str:
    """Write a column as base64 of little-endian numbers: u1, u2, u4, i2, f4."""
    return base64.b64encode(column.astype(f"<{kind}").tobytes()).decode("ascii")


def tick_for(length_ns: int) -> int:
    """Return the shortest tick, in ns, that counts a stretch in 32 bits: 1 up to two seconds."""
    return max(1, -(-length_ns // _MOST))


def ticks(moments_ns: AnyArray, begin_ns: int, length_ns: int) -> AnyArray:
    """Count moments in ticks from a begin on, none of them outside."""
    counted: AnyArray = np.clip(moments_ns - begin_ns, 0, length_ns) // tick_for(length_ns)
    return counted
