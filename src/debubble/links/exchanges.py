"""Exchanges in → which of them lasted so long by the other direction, not by the hop's own."""

from __future__ import annotations

import numpy as np

from debubble.simulate.measured import MeasuredStep
from debubble.timeline.model import F64, I64, Flags

# Both ranks see an exchange end at once where each waits for both its messages; the recorded ones,
# whose sends are buffered, do not.
_AT_ONCE = 0.02
# Messages so many times as long, or as short, count as alike.
_ALIKE = 1.2


def end_together(step: MeasuredStep) -> Flags:
    """Tell the messages of exchanges that ended for both ranks at once, with the later message."""
    ends, messages = step.times.batch_end, step.program.messages
    apart = np.abs(ends[messages.received] - ends[messages.sent])
    together: Flags = step.fused & (apart <= _AT_ONCE * step.lengths.wire)
    return together


def of_other_way(against_usual: F64, times: float, healthy: F64) -> Flags:
    """Tell exchanges of a slow hop that lasted as long because of their other message.

    `against_usual` is how long each lasted, `healthy` the same of hops that are well, both against
    what is usual there. An exchange of a hop that takes some `times` as long may be one that would
    have been as many times shorter, or one that was late the other way: the commoner of the two.
    """
    in_order = np.sort(healthy)

    def alike(lengths: F64) -> I64:
        below = np.searchsorted(in_order, lengths / _ALIKE, side="left")
        above = np.searchsorted(in_order, lengths * _ALIKE, side="right")
        return (above - below).astype(np.int64)

    found: Flags = alike(against_usual) > alike(against_usual / times)
    return found
