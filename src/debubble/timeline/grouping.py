"""The pass of each piece of work in → passes numbered, and the number of each piece."""

from __future__ import annotations

import numpy as np

from debubble.timeline.model import I32, I64


def number_passes(step: I32, stage: I32, kind: I32, microbatch: I32) -> tuple[I64, I64]:
    """Return the passes as rows of (step, stage, kind, microbatch), and each piece's row.

    The four numbers are packed into one: sorting plain integers is ten times quicker than rows.
    """
    columns = [column.astype(np.int64) for column in (step, stage, kind, microbatch)]
    lowest = [int(column.min(initial=0)) for column in columns]
    widths = [
        int(column.max(initial=0)) - low + 1 for column, low in zip(columns, lowest, strict=True)
    ]
    key = np.zeros(len(step), dtype=np.int64)
    for column, low, width in zip(columns, lowest, widths, strict=True):
        key = key * width + (column - low)
    packed, group = np.unique(key, return_inverse=True)
    rows = np.empty((4, len(packed)), dtype=np.int64)
    for row in (3, 2, 1, 0):
        packed, rest = np.divmod(packed, widths[row])
        rows[row] = rest + lowest[row]
    return rows, group.reshape(-1)
