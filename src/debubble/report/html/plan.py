"""A plan in → the report of `debubble plan --html`."""

from __future__ import annotations

from debubble.plan.plan import Plan
from debubble.report.html.find import add_timeline
from debubble.report.html.page import Report
from debubble.report.html.scatter import limit_of, option_list, points_of, scatter
from debubble.report.html.sections import chart_section
from debubble.report.html.views import Shown
from debubble.report.text import Page
from debubble.units import show_duration


def plan_report(plan: Plan, shown: Shown, page: Page, run: str) -> Report:
    """Lay out the options, then the run as it is."""
    points = points_of(plan)
    report = Report(verb="plan", run=run, page=page, tiles=_tiles(plan))
    report.sections.append(
        chart_section(
            "Options: latency against memory",
            "Disc: do it; ring: within the noise, or worse; diamond: the run as it is. Percents "
            "are throughput: a larger batch may take longer and still do more a second. Upright "
            "strokes: four of five runs.",
            scatter(points, limit_of(plan)) + option_list(points),
        )
    )
    add_timeline(report, [shown])
    return report


def _tiles(plan: Plan) -> list[tuple[str, str]]:
    base = plan.baseline
    tiles = [
        (show_duration(base.window_ns), "batch latency now"),
        (f"{base.source.bubble_fraction:.0%}", "bubble now"),
    ]
    if plan.recommended:
        best = plan.recommended[0]
        tiles += [
            (f"{best.throughput_gain:+.0%}", "throughput, best option"),
            (show_duration(best.window_ns), "batch latency, best option"),
            (f"{best.bubble_fraction:.0%}", "bubble, best option"),
        ]
    return tiles
