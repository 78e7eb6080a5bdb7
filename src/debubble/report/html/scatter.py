"""A plan's options in → latency against memory, with the headroom drawn in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from debubble.plan.change import Change
from debubble.plan.headroom import Headroom
from debubble.plan.option import headroom_after
from debubble.plan.plan import Plan
from debubble.report.change import describe
from debubble.report.html.markup import safe
from debubble.units import show_bytes, show_duration

_WIDTH, _HEIGHT = 1240, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 110, 40, 26, 352
# A limit further off than this many times the largest peak would press all points into a corner.
_FAR = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One option, or the run as it is."""

    name: str
    latency_ns: float
    low_ns: float
    high_ns: float
    peak_bytes: float | None
    """Of the fullest rank."""
    style: str
    gain: str = ""


def points_of(plan: Plan) -> list[Point]:
    """Return the run as it is, then the options in the order of the table."""
    base = plan.baseline
    now = Point(
        name="as it is",
        latency_ns=base.window_ns,
        low_ns=base.window_ns,
        high_ns=base.window_ns,
        peak_bytes=_fullest(headroom_after(base, Change())),
        style="now",
    )
    options = [
        Point(
            name=describe(one.change),
            latency_ns=one.window_ns,
            low_ns=one.low_ns,
            high_ns=one.high_ns,
            peak_bytes=_fullest(one.headroom),
            style="do" if one in plan.recommended else "dont",
            gain=f"{one.throughput_gain:+.0%}",
        )
        for one in plan.options
    ]
    return [now, *options]


def limit_of(plan: Plan) -> float | None:
    """Return what the smallest device has."""
    limits = [one for one in plan.baseline.limits if one is not None]
    return min(limits, default=None)


def _fullest(ranks: Sequence[Headroom] | None) -> float | None:
    return max((one.peak_bytes for one in ranks), default=None) if ranks else None


def scatter(points: Sequence[Point], limit: float | None) -> str:
    """Draw each option by the memory of its fullest rank (across) and a batch's latency (up)."""
    known = [one.peak_bytes for one in points if one.peak_bytes is not None]
    if len(known) < len(points):
        return ""
    near = limit is not None and limit <= _FAR * max(known)
    reach = [*known, *([limit] if near and limit is not None else [])]
    across = _Scale(min(reach), max(reach), _LEFT, _WIDTH - _RIGHT)
    up = _Scale(
        min(one.low_ns for one in points), max(one.high_ns for one in points), _BOTTOM, _TOP
    )
    parts = [*_axes(across, up), *_room(limit, across, near=near)]
    parts += _placed(points, across, up)
    label = "Options by memory of the fullest rank and latency of a batch"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )


class _Scale:
    """Numbers to places, with some air at both ends."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        air = 0.08 * (high - low) or 0.08 * high or 1.0
        self.low, self.high, self.begin, self.end = max(0.0, low - air), high + air, begin, end

    def __call__(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def marks(self, count: int) -> list[float]:
        """Return even values over the scale."""
        step = (self.high - self.low) / count
        return [self.low + step * (number + 0.5) for number in range(count)]


def _axes(across: _Scale, up: _Scale) -> list[str]:
    parts = []
    for value in across.marks(6):
        x = across(value)
        parts += [
            f'<path class="rule" d="M{x:.1f} {_TOP}V{_BOTTOM}"/>',
            f'<text class="muted" x="{x:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">'
            f"{show_bytes(value)}</text>",
        ]
    for value in up.marks(5):
        y = up(value)
        parts += [
            f'<path class="rule" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>',
            f'<text class="muted" x="{_LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">'
            f"{show_duration(value)}</text>",
        ]
    parts += [
        f'<text class="muted" x="{_WIDTH - _RIGHT}" y="{_BOTTOM + 38}" text-anchor="end">'
        "memory of the fullest rank</text>",
        f'<text class="muted" x="{_LEFT}" y="{_TOP - 10}">latency of a batch</text>',
    ]
    return parts


def _room(limit: float | None, across: _Scale, *, near: bool) -> list[str]:
    """Draw the limit and what lies beyond; say it where it is far off the chart."""
    if limit is None:
        return []
    if not near:
        return [
            f'<text class="strong" x="{_WIDTH - _RIGHT}" y="{_TOP - 10}" text-anchor="end">'
            f"limit {show_bytes(limit)}, far to the right →</text>"
        ]
    x = across(limit)
    return [
        f'<rect class="over" x="{x:.1f}" y="{_TOP}" width="{max(0.0, _WIDTH - _RIGHT - x):.1f}" '
        f'height="{_BOTTOM - _TOP}"/>',
        f'<path class="limit" d="M{x:.1f} {_TOP}V{_BOTTOM}"/>',
        f'<text class="strong" x="{x - 6:.1f}" y="{_TOP - 10}" text-anchor="end">'
        f"limit {show_bytes(limit)}</text>",
    ]


def _placed(points: Sequence[Point], across: _Scale, up: _Scale) -> list[str]:
    """Draw points and their intervals; numbers are those of the list below."""
    parts, taken = [], []
    for number, one in enumerate(points):
        x, y = across(one.peak_bytes or 0.0), up(one.latency_ns)
        words = f"{one.name}: {show_duration(one.latency_ns)}, {show_bytes(one.peak_bytes or 0)}"
        parts.append(
            f'<path class="mark" d="M{x:.1f} {up(one.low_ns):.1f}V{up(one.high_ns):.1f}"/>'
            f"<g><title>{safe(words)} {safe(one.gain)}</title>{_shape(one.style, x, y)}</g>"
        )
        at = y + 5
        while any(abs(at - other) < 15 and abs(x - beside) < 90 for beside, other in taken):
            at -= 15
        taken.append((x, at))
        name = "as it is" if one.style == "now" else f"{number} {one.gain}"
        parts.append(f'<text class="strong" x="{x + 11:.1f}" y="{at:.1f}">{safe(name)}</text>')
    return parts


def _shape(style: str, x: float, y: float) -> str:
    """Draw what is advised as a disc, what is not as a ring, the run as a diamond."""
    if style == "now":
        return f'<path class="now" d="M{x:.1f} {y - 8:.1f}l8 8l-8 8l-8 -8z"/>'
    return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="6.5"/>'
