"""A plan in → the report of `debubble plan --html`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from debubble.plan.ask import ask
from debubble.plan.plan import Plan
from debubble.report.answers.plan import OptionPart, PlanAnswer
from debubble.report.answers.server_plan import ServerPlanAnswer
from debubble.report.html.measured import add_timeline
from debubble.report.html.page import Board, Report, Slot
from debubble.report.html.sections import Pair, board_section, chart_section, pair_bars, safe
from debubble.report.html.views import MOST_BYTES, PipelineView, views_of
from debubble.report.text import Page
from debubble.timeline.figures import measure_pipeline
from debubble.units import (
    NS_PER_S,
    show_bytes,
    show_change,
    show_duration,
    show_gain,
    show_number,
    show_seconds,
    show_share,
)

# Nothing of it scrolls away in a narrow window: there it shrinks, and can still be read.
_WIDTH, _HEIGHT = 860, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 110, 40, 26, 352
_GIB, _MS = 2.0**30, 1e6
# A limit further off than this many times the largest peak would press all points into a corner.
_FAR = 2.5
# Of what a server could do, as many as its table has.
_SERVER_OPTIONS = 8
# A name so far above its point or below stands beside it.
_BESIDE = 12.0


_ADVICE = {"yes": "do", "try": "try", "maybe": "maybe"}
_Box = tuple[float, float, float, float]


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
    advice: str = ""
    """Before its name in the list, where it is not simply left alone."""


def points_of(found: PlanAnswer) -> list[Point]:
    """Return the run as it is, then the options in the order of the table."""
    latency_ns = found.baseline.numbers.batch_latency_s * NS_PER_S
    points = [
        Point(
            name="as it is",
            latency_ns=latency_ns,
            low_ns=latency_ns,
            high_ns=latency_ns,
            peak_bytes=max(found.baseline.predicted_peak_bytes or (), default=None),
            style="now",
        )
    ]
    for option in found.options:
        low, high = option.interval.batch_latency_s or (0.0, 0.0)
        peaks = [peak for peak in option.numbers.peak_memory_bytes or () if peak is not None]
        points.append(
            Point(
                name=option.words + (" (a larger batch)" if option.changes_training else ""),
                latency_ns=option.numbers.batch_latency_s * NS_PER_S,
                low_ns=low * NS_PER_S,
                high_ns=high * NS_PER_S,
                peak_bytes=max(peaks, default=None),
                style="do" if option.recommended else "dont",
                gain=show_gain(option.throughput_gain_fraction),
                advice=_ADVICE.get(option.advice, ""),
            )
        )
    return points


def limit_of(found: PlanAnswer) -> float | None:
    """Return what the smallest device has."""
    limits = [limit for limit in found.baseline.limit_bytes if limit is not None]
    return min(limits, default=None)


def scatter(points: Sequence[Point], limit: float | None) -> str:
    """Draw each option by the memory of its fullest rank (across) and a batch's latency (up)."""
    known = [point.peak_bytes for point in points if point.peak_bytes is not None]
    if len(known) < len(points):
        return ""
    near = limit is not None and limit <= _FAR * max(known)
    reach = [*known, *([limit] if near and limit is not None else [])]
    across = _Scale(min(reach), max(reach), _LEFT, _WIDTH - _RIGHT)
    up = _Scale(
        min(point.low_ns for point in points), max(point.high_ns for point in points), _BOTTOM, _TOP
    )
    parts = [*_axes(across, up), *_room(limit, across, near=near)]
    parts += _placed(points, across, up)
    label = "Options by memory of the fullest rank and latency of a batch"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


class _Scale:
    """Numbers to places, with some air at both ends."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        air = 0.08 * (high - low) or 0.08 * high or 1.0
        self.low, self.high, self.begin, self.end = max(0.0, low - air), high + air, begin, end

    def __call__(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def marks(self, count: int, unit: float) -> list[float]:
        """Return round numbers of a unit over the scale, about so many."""
        wanted = (self.high - self.low) / unit / count
        power = 10.0 ** math.floor(math.log10(wanted))
        step = unit * power * next(digit for digit in (1, 2, 5, 10) if digit * power >= wanted)
        first = math.ceil(self.low / step)
        return [step * number for number in range(first, math.floor(self.high / step) + 1)]


def _axes(across: _Scale, up: _Scale) -> list[str]:
    parts = []
    for value in across.marks(8, _GIB):
        x = across(value)
        parts += [
            f'<path class="rule" d="M{x:.1f} {_TOP}V{_BOTTOM}"/>',
            (
                f'<text class="muted" x="{x:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">'
                f"{show_bytes(value)}</text>"
            ),
        ]
    for value in up.marks(5, _MS):
        y = up(value)
        parts += [
            f'<path class="rule" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>',
            (
                f'<text class="muted" x="{_LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">'
                f"{show_duration(value)}</text>"
            ),
        ]
    parts += [
        (
            f'<text class="muted" x="{_WIDTH - _RIGHT}" y="{_BOTTOM + 38}" text-anchor="end">'
            "memory of the fullest rank</text>"
        ),
        f'<text class="muted" x="{_LEFT}" y="{_TOP - 10}">latency of a batch</text>',
    ]
    return parts


def _room(limit: float | None, across: _Scale, *, near: bool) -> list[str]:
    """Draw the limit and what lies beyond; say it where it is far off the chart."""
    if limit is None:
        return []
    if not near:
        return [
            (
                f'<text class="strong" x="{_WIDTH - _RIGHT}" y="{_TOP - 10}" text-anchor="end">'
                f"limit {show_bytes(limit)}, far to the right →</text>"
            )
        ]
    x = across(limit)
    beyond = max(0.0, _WIDTH - _RIGHT - x)
    return [
        (
            f'<rect class="over" x="{x:.1f}" y="{_TOP}" width="{beyond:.1f}" '
            f'height="{_BOTTOM - _TOP}"/>'
        ),
        f'<path class="limit" d="M{x:.1f} {_TOP}V{_BOTTOM}"/>',
        (
            f'<text class="strong" x="{x - 6:.1f}" y="{_TOP - 10}" text-anchor="end">'
            f"limit {show_bytes(limit)}</text>"
        ),
    ]


def _placed(points: Sequence[Point], across: _Scale, up: _Scale) -> list[str]:
    """Draw points and their intervals; numbers are those of the list below."""
    parts: list[str] = []
    spots = [(across(point.peak_bytes or 0.0), up(point.latency_ns)) for point in points]
    boxes = [(x - 9.0, y - 9.0, x + 9.0, y + 9.0) for x, y in spots]
    for number, (point, (x, y)) in enumerate(zip(points, spots, strict=True)):
        words = (
            f"{point.name}: {show_duration(point.latency_ns)}, {show_bytes(point.peak_bytes or 0)}"
        )
        parts.append(
            f'<path class="mark" d="M{x:.1f} {up(point.low_ns):.1f}V{up(point.high_ns):.1f}"/>'
            f"<g><title>{safe(words)} {safe(point.gain)}</title>{_shape(point.style, x, y)}</g>"
        )
        name = "as it is" if point.style == "now" else str(number)
        box = _free(x, y, 9.0 * len(name), boxes)
        boxes.append(box)
        parts.append(
            f'{_leader(x, y, box)}<text class="strong" x="{box[0]:.1f}" y="{box[3] - 4:.1f}">'
            f"{safe(name)}</text>"
        )
    # The run as it is lies on top: what changes little stands in the same spot.
    return parts[2:] + parts[:2]


def _leader(x: float, y: float, box: _Box) -> str:
    """Draw a line from a point to its name where that does not stand beside it."""
    middle = (box[1] + box[3]) / 2
    if abs(middle - y) < _BESIDE:
        return ""
    near = min(max(x, box[0]), box[2])
    end = box[3] if middle < y else box[1]
    return f'<path class="rule" d="M{x:.1f} {y:.1f}L{near:.1f} {end:.1f}"/>'


def _free(x: float, y: float, width: float, boxes: Sequence[_Box]) -> _Box:
    """Return a place for a name near its point that nothing else has; else the nearest of all."""
    places: list[_Box] = [
        (left, y + up - 9, left + width, y + up + 9)
        for up in (0, -18, 18, -36, 36, -54, 54)
        for left in (x + 12, x - 12 - width)
    ]
    for place in places:
        inside = place[0] >= _LEFT and place[2] <= _WIDTH and place[3] < _BOTTOM
        if inside and not any(_meet(place, other) for other in boxes):
            return place
    return places[0]


def _meet(box: _Box, other: _Box) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def option_list(points: Sequence[Point]) -> str:
    """List the options by the numbers of the chart."""
    rows = "".join(
        f"<li>{f'<b>{safe(point.advice)}:</b> ' if point.advice else ''}{safe(point.name)}: "
        f"<b>{safe(point.gain)}</b>, {safe(show_duration(point.latency_ns))}"
        + ("" if point.peak_bytes is None else f", {safe(show_bytes(point.peak_bytes))}")
        + "</li>"
        for point in points[1:]
    )
    return f'<ol class="options">{rows}</ol>' if rows else ""


def _shape(style: str, x: float, y: float) -> str:
    """Draw what is advised as a disc, what is not as a ring, the run as a diamond."""
    if style == "now":
        return f'<path class="now" d="M{x:.1f} {y - 8:.1f}l8 8l-8 8l-8 -8z"/>'
    return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="6.5"/>'


def planned_view(plan: Plan) -> PipelineView | None:
    """Return a step of the best option as it is predicted; None where nothing is to be done.

    Where only a larger batch gains, that one: the page says so. A replay has no step to draw.
    """
    best = plan.best or next(iter(plan.recommended), None)
    if best is None or best.by_replay:
        return None
    drawn = ask(plan.baseline_for(best), best.idea).draw()
    return PipelineView(timeline=drawn, figures=measure_pipeline(drawn, 0), ledger=None)


def plan_report(
    found: PlanAnswer, shown: PipelineView, planned: PipelineView | None, page: Page, run: str
) -> Report:
    """Lay out the best option beside the run as it is, then all options, then the run."""
    points = points_of(found)
    report = Report(verb="plan", run=run, page=page, tiles=_tiles(found))
    drawn = planned is not None and _add_planned(report, found, shown, planned)
    chart = scatter(points, limit_of(found))
    title = "Options: latency against memory" if chart else "Options"
    words = "Percents are throughput: a larger batch may take longer and still do more a second."
    if chart:
        words = (
            "Disc: do it; ring: not sure to gain, or worse; diamond: the run as it is. Numbers are "
            f"those of the list. Upright strokes: four of five runs. {words}"
        )
    report.sections.append(chart_section(title, words, chart + option_list(points)))
    if not drawn:
        add_timeline(report, [shown])
    return report


def _best(found: PlanAnswer) -> OptionPart:
    """Return the option that is drawn."""
    larger = [option for option in found.options if option.recommended]
    return (found.recommended or larger)[0]


def _add_planned(
    report: Report, found: PlanAnswer, shown: PipelineView, planned: PipelineView
) -> bool:
    """Add a measured step and the planned one on one axis, and their numbers."""
    best = _best(found)
    slots = [
        Slot(title=title, views=report.add_views(views_of(view, MOST_BYTES // 4)[0]))
        for title, view in (("measured", shown), ("planned", planned))
    ]
    if not all(slot.views for slot in slots):
        return False
    number = report.add_board(Board(slots=tuple(slots)))
    report.sections += [
        board_section(
            number,
            "Measured and planned",
            f"A step as it was measured, and one as it is predicted with {best.words}"
            f"{' (a larger batch)' if best.changes_training else ''}, on one axis; the dashed "
            "line is where each ends.",
            names=("measured:", "planned:"),
            memory=False,
        ),
        chart_section(
            "Numbers",
            "As it is, and as it is predicted; each pair on its own scale.",
            pair_bars(_number_pairs(found), "Numbers now and as planned", ("measured", "planned")),
        ),
    ]
    return True


def _number_pairs(found: PlanAnswer) -> list[Pair]:
    now, then = found.baseline.numbers, _best(found).numbers
    pairs = [
        Pair(
            name="bubble",
            before=now.bubble_fraction,
            after=then.bubble_fraction,
            shown=(show_share(now.bubble_fraction), show_share(then.bubble_fraction)),
        ),
        Pair(
            name="batch latency",
            before=now.batch_latency_s,
            after=then.batch_latency_s,
            shown=(show_seconds(now.batch_latency_s), show_seconds(then.batch_latency_s)),
        ),
    ]
    peaks = [
        max((peak for peak in numbers.peak_memory_bytes or () if peak is not None), default=None)
        for numbers in (now, then)
    ]
    if peaks[0] is not None and peaks[1] is not None:
        shown = show_bytes(peaks[0]), show_bytes(peaks[1])
        pairs.append(Pair(name="peak memory", before=peaks[0], after=peaks[1], shown=shown))
    return pairs


def server_plan_report(
    found: ServerPlanAnswer, shown: Sequence[PipelineView], page: Page, run: str
) -> Report:
    """Lay out what a server does now, what each change would do, then its batches."""
    now = found.as_is
    tiles = [
        (show_number(now.tokens_out_per_s), "tokens a second out, now"),
        (show_seconds(now.tpot_s), "a token, now"),
    ]
    if found.recommended is not None:
        best = found.options[found.recommended]
        tiles += [
            (show_number(best.served.tokens_out_per_s), f"with {best.what}"),
            (show_change(best.gain_fraction), "tokens, best option"),
        ]
    report = Report(verb="plan", run=run, page=page, tiles=tiles)
    pairs = [
        Pair(
            name=option.verdict,
            before=now.tokens_out_per_s,
            after=option.served.tokens_out_per_s,
            shown=(
                show_number(now.tokens_out_per_s),
                show_number(option.served.tokens_out_per_s),
            ),
            beside=f"{option.what}: "
            f"{show_gain(option.gain_fraction, option.low_fraction, option.high_fraction)}",
        )
        for option in found.options[:_SERVER_OPTIONS]
    ]
    words = "Tokens out a second now and with each change; whether it is sure stands before it."
    label = "Tokens a second now and with each change"
    body = pair_bars(pairs, label, ("now", "then")) if pairs else ""
    report.sections.append(chart_section("What it would do", words, body))
    add_timeline(report, shown)
    return report


def _tiles(found: PlanAnswer) -> list[tuple[str, str]]:
    now = found.baseline.numbers
    tiles = [
        (show_seconds(now.batch_latency_s), "batch latency now"),
        (show_share(now.bubble_fraction), "bubble now"),
    ]
    if found.recommended:
        best = found.recommended[0]
        tiles += [
            (show_change(best.throughput_gain_fraction), "throughput, best option"),
            (show_seconds(best.numbers.batch_latency_s), "batch latency, best option"),
            (show_share(best.numbers.bubble_fraction), "bubble, best option"),
        ]
    return tiles
