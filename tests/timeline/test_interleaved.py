"""Forward and backward passes that a rank runs at once, from two threads."""

from __future__ import annotations

import numpy as np

from debubble.timeline.build import lay_one_after_the_other


def laid(*passes):
    """Passes of (start, end, busy)."""
    start, end, busy = (np.array(column, dtype=np.int64) for column in zip(*passes, strict=True))
    starts, ends = lay_one_after_the_other(start, end, busy)
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def test_passes_that_ran_at_once_are_laid_one_after_the_other_by_what_they_computed():
    assert laid((0, 150, 50), (10, 160, 100)) == [(0, 53), (53, 160)]
    assert laid((10, 160, 100), (0, 170, 50)) == [(57, 170), (0, 57)]


def test_passes_that_share_an_edge_stay_as_they_are():
    assert laid((0, 100, 90), (90, 200, 100), (300, 400, 100)) == [(0, 100), (90, 200), (300, 400)]
