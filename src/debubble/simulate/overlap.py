"""Stretches of time → how long others lie over each: passes beside passes, or beside messages."""

from __future__ import annotations

import numpy as np

from debubble.timeline.model import F64, I64


def share_under(start_ns: I64, end_ns: I64, begun_ns: I64, over_ns: I64) -> F64:
    """Return the share of each stretch that lies under some others, however many.

    A second dimension holds many runs, each by itself.
    """
    order = np.argsort(begun_ns, axis=0, kind="stable")
    begun = np.take_along_axis(begun_ns, order, axis=0)
    until = np.maximum.accumulate(np.take_along_axis(over_ns, order, axis=0), axis=0)
    # Of each, what none before it has covered: nothing is counted twice.
    begun[1:] = np.maximum(begun[1:], until[:-1])
    under = time_under(start_ns, end_ns, np.minimum(begun, until), until)
    share: F64 = under / np.maximum(end_ns - start_ns, 1)
    return share


def time_under(start_ns: I64 | F64, end_ns: I64 | F64, begun_ns: I64, over_ns: I64) -> F64:
    """Return how long others lasted inside each stretch, each counted, in each of many runs."""
    if not len(begun_ns):
        return np.zeros(start_ns.shape)
    # Stamps of a trace are too large to be added up: times count from the first of the others.
    origin = begun_ns.min(axis=0)
    start_ns, end_ns = start_ns - origin, end_ns - origin
    lasted = np.zeros(start_ns.shape)
    for sign, moments_ns in ((1, begun_ns), (-1, over_ns)):
        moments = np.sort(moments_ns - origin, axis=0).astype(np.float64)
        sums = np.concatenate((np.zeros_like(moments[:1]), np.cumsum(moments, axis=0)))
        for side, until in ((sign, end_ns), (-sign, start_ns)):
            before = _count_before(moments, until)
            lasted += side * (before * until - np.take_along_axis(sums, before, axis=0))
    return lasted


def _count_before(moments: F64, until: I64 | F64) -> I64:
    """Return how many of some sorted moments are not after each of others, in each of many runs."""
    if moments.ndim == 1:
        return np.searchsorted(moments, until, side="right")
    if not until.size:
        return np.zeros(until.shape, dtype=np.int64)
    # One search for all: each run lies after the one before it.
    runs = np.arange(moments.shape[1])
    apart = max(moments.max(), until.max()) - min(moments.min(), until.min()) + 1
    laid, asked = ((part + runs * apart).T.ravel() for part in (moments, until))
    found: I64 = np.searchsorted(laid, asked, side="right").reshape(len(runs), -1).T
    return found - runs * len(moments)
