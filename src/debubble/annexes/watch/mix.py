"""A server's own metrics in → when to capture it, which requests it served, and whether they moved.

The last captures are held against the reference with Pearson's test for two samples. Traffic comes
in batches, so counts vary more than chance alone lets them: by how much, the reference tells. What
this leaves is put on one scale for any number of buckets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from debubble.annexes.drift import REFERENCE
from debubble.capture.fetch import NoAnswer, fetch
from debubble.errors import CaptureError
from debubble.measure.measurement import context_bucket
from debubble.trace.server_notes import WAITING, samples_of, total_of

# What engines call the lengths of prompts.
_LENGTHS = ("vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram")
_BOUND = re.compile(r'[{,]\s*le="([0-9.eE+-]+|\+Inf)"')

# No prompt is longer: a bound above is as good as none.
_LONGEST_PROMPT = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMetrics:
    """What an engine says of itself."""

    lengths: Mapping[float, float] = field(default_factory=dict)
    """Requests since its start up to each length, as histograms count."""
    waiting: float = 0.0


def ask_server(url: str) -> ServerMetrics:
    """Read an engine's metrics; one that has none tells nothing."""
    try:
        reply = fetch(f"{url.rstrip('/')}/metrics")
    except NoAnswer as error:
        raise CaptureError(error.message, hint="does the server run?") from error
    if not reply.ok:
        return ServerMetrics()
    text = reply.body.decode("utf-8", "replace")
    return parse_metrics(text)


def parse_metrics(text: str) -> ServerMetrics:
    """Read the few figures that are needed out of Prometheus' text format."""
    samples = samples_of(text)
    lengths: dict[float, float] = {}
    for name in _LENGTHS:
        for labels, value in samples.get(f"{name}_bucket", {}).items():
            bound = _BOUND.search(labels)
            upper = None if bound is None else _number(bound[1])
            if upper is not None and upper > 0 and 0 <= value < math.inf:
                lengths[upper] = lengths.get(upper, 0.0) + value
    waiting = total_of(samples, WAITING) or 0.0
    return ServerMetrics(lengths=lengths, waiting=waiting if 0 <= waiting < math.inf else 0.0)


def requests_between(before: ServerMetrics, after: ServerMetrics) -> dict[int, float]:
    """Count the requests between two readings by context bucket: of each, its upper bound's."""
    counts: dict[int, float] = {}
    below, finite = 0.0, 1.0
    for bound in sorted(after.lengths):
        total = after.lengths[bound] - before.lengths.get(bound, 0.0)
        if total < 0:  # it was started again
            return requests_between(ServerMetrics(), after)
        count, below = total - below, total
        finite = bound if bound <= _LONGEST_PROMPT else min(2 * finite, _LONGEST_PROMPT)
        bucket = context_bucket([math.ceil(finite)])
        if count > 0 and bucket is not None:
            counts[bucket] = counts.get(bucket, 0.0) + count
    return counts


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


# Captures that are held against the reference.
WINDOW = 10
# Traffic of which less than a tenth went elsewhere is the same traffic.
LEAST_MOVED = 0.1

# A score that at most 1 % of quiet series exceed in 300 captures: of 2 to 6 buckets, 1 to 1,000
# requests a capture, with shares that wander and shares that do not, by references of 10 to 80.
MOVED = 5.0

Counts = Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What is remembered of a pipeline's traffic."""

    reference: tuple[dict[int, float], ...] = ()
    recent: tuple[dict[int, float], ...] = ()


def advance(mix: Mix, counts: Counts, reference: int = REFERENCE) -> Mix:
    """Take one more capture in."""
    capture = {bucket: float(count) for bucket, count in counts.items() if count > 0}
    if not capture:
        return mix
    if len(mix.reference) < reference:
        return replace(mix, reference=(*mix.reference, capture))
    return replace(mix, recent=(*mix.recent, capture)[-WINDOW:])


def moved(mix: Mix) -> bool:
    """Tell whether the traffic of late is another one."""
    if not mix.recent:
        return False
    apart = distance(shares(mix.reference), shares(mix.recent))
    return apart >= LEAST_MOVED and score(mix) > MOVED


def shares(captures: Sequence[Counts]) -> dict[int, float]:
    """Return each bucket's share of all requests."""
    total = _total(captures)
    whole = sum(total.values())
    return {bucket: count / whole for bucket, count in sorted(total.items())} if whole else {}


def distance(before: Counts, after: Counts) -> float:
    """Return the share of traffic that went to other buckets."""
    buckets = {*before, *after}
    return sum(abs(before.get(bucket, 0.0) - after.get(bucket, 0.0)) for bucket in buckets) / 2


def score(mix: Mix) -> float:
    """Return how unlike the two are, as a deviate of the normal distribution, about."""
    before, after = _total(mix.reference), _total(mix.recent)
    freedom = len({*before, *after}) - 1
    if not freedom or not after:
        return 0.0
    per_freedom = _pearson((before, after)) / freedom / wandering(mix.reference)
    # Wilson and Hilferty: the cube root of a chi-square is nearly normal.
    spread = 2 / (9 * freedom)
    return float((math.cbrt(per_freedom) - (1 - spread)) / math.sqrt(spread))


def wandering(captures: Sequence[Counts]) -> float:
    """Return how much more shares vary between captures than chance lets them; at least 1."""
    buckets = {bucket for counts in captures for bucket in counts}
    freedom = (len(buckets) - 1) * (len(captures) - 1)
    if freedom < 1:
        return 1.0
    return max(1.0, _pearson(captures) / freedom)


def _total(captures: Sequence[Counts]) -> dict[int, float]:
    buckets = {bucket for counts in captures for bucket in counts}
    return {bucket: sum(counts.get(bucket, 0.0) for counts in captures) for bucket in buckets}


def _pearson(rows: Sequence[Counts]) -> float:
    """Return how far counts are, in all, from what rows and buckets alone would give."""
    buckets = sorted({bucket for row in rows for bucket in row})
    seen = np.array([[row.get(bucket, 0.0) for bucket in buckets] for row in rows])
    expected = np.outer(seen.sum(axis=1), seen.sum(axis=0)) / seen.sum()
    return float(((seen - expected)[expected > 0] ** 2 / expected[expected > 0]).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the mean over all traffic, in its two parts."""

    before: float
    after: float
    traffic_moved: float
    """What the new shares alone would have changed."""
    buckets_slower: float
    """What the new levels alone changed, at the new shares."""


def decompose(before: Counts, levels_before: Counts, after: Counts, levels_after: Counts) -> Change:
    """Split a change of the mean into traffic that moved and buckets that changed.

    A bucket that the reference did not have was never faster: what it adds is the traffic's.
    """
    known = [b for b in {*before, *after} if b in levels_before or b in levels_after]
    then = {b: levels_before.get(b, levels_after.get(b, 0.0)) for b in known}
    now = {b: levels_after.get(b, then[b]) for b in known}
    old, new = _normal(before, known), _normal(after, known)
    return Change(
        before=sum(old[b] * then[b] for b in known),
        after=sum(new[b] * now[b] for b in known),
        traffic_moved=sum((new[b] - old[b]) * then[b] for b in known),
        buckets_slower=sum(new[b] * (now[b] - then[b]) for b in known),
    )


def _normal(counts: Counts, known: Sequence[int]) -> dict[int, float]:
    whole = sum(counts.get(bucket, 0.0) for bucket in known) or 1.0
    return {bucket: counts.get(bucket, 0.0) / whole for bucket in known}
