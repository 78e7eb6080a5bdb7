"""A schedule and a server's own metrics in → when to capture it, and which requests it served."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from debubble.capture.fetch import Asked, NoAnswer, fetch
from debubble.errors import CaptureError
from debubble.measure.measurement import context_bucket
from debubble.server_notes import WAITING, samples_of, total_of
from debubble.watch.config import Trigger

# Under pressure a capture waits at first so long, then twice as long each time.
_FIRST_WAIT = 0.05
_LONGEST_WAITS = 4.0
# What engines call the lengths of prompts.
_LENGTHS = ("vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram")
_BOUND = re.compile(r'[{,]\s*le="([0-9.eE+-]+|\+Inf)"')

PATIENCE_S = 5.0
# An engine's page is some hundred kilobytes.
_LARGEST_PAGE = 16 * 1024 * 1024
_HTTP_OK = 200
# No prompt is longer: a bound above is as good as none.
_LONGEST_PROMPT = 1 << 30


def next_capture(trigger: Trigger, last_s: float | None, now_s: float, chance: float) -> float:
    """Return when to capture; `chance` from 0 to 1 spreads servers that were started at once."""
    if last_s is None:
        due = now_s + chance * trigger.jitter * trigger.every_s
    else:
        due = last_s + trigger.every_s * (1 + trigger.jitter * (2 * chance - 1))
    return after_quiet_hours(trigger, max(due, now_s))


def after_quiet_hours(trigger: Trigger, at_s: float) -> float:
    """Return the time itself, or the end of the quiet hours that it lies in."""
    for _ in range(len(trigger.quiet_hours) + 1):
        local = datetime.fromtimestamp(at_s).astimezone()
        for begin, end in trigger.quiet_hours:
            clock = local.time().replace(tzinfo=None)
            inside = begin <= clock < end if begin <= end else clock >= begin or clock < end
            if inside:
                ends = local.replace(hour=end.hour, minute=end.minute, second=0, microsecond=0)
                at_s = (ends if ends > local else ends + timedelta(days=1)).timestamp()
                break
        else:
            return at_s
    return at_s


def back_off(trigger: Trigger, refusals: int) -> float:
    """Return how long to wait for a server that is pressed or does not answer."""
    return float(trigger.every_s * min(_FIRST_WAIT * 2**refusals, _LONGEST_WAITS))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMetrics:
    """What an engine says of itself."""

    lengths: Mapping[float, float] = field(default_factory=dict)
    """Requests since its start up to each length, as histograms count."""
    waiting: float = 0.0


def ask_server(url: str) -> ServerMetrics:
    """Read an engine's metrics; one that has none tells nothing."""
    page = Asked(url=f"{url.rstrip('/')}/metrics", patience_s=PATIENCE_S, most_bytes=_LARGEST_PAGE)
    try:
        reply = fetch(page)
    except NoAnswer as error:
        raise CaptureError(error.message, hint="does the server run?") from error
    if reply.status != _HTTP_OK:
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
