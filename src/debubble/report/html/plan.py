"""A plan in → the report of `debubble plan --html`."""

from __future__ import annotations

from debubble.answers.plan import PlanAnswer
from debubble.report.html.find import add_timeline
from debubble.report.html.page import Report
from debubble.report.html.scatter import limit_of, option_list, points_of, scatter
from debubble.report.html.sections import chart_section
from debubble.report.html.views import Shown
from debubble.report.text import Page
from debubble.units import show_seconds


def plan_report(found: PlanAnswer, shown: Shown, page: Page, run: str) -> Report:
    """Lay out the options, then the run as it is."""
    points = points_of(found)
    report = Report(verb="plan", run=run, page=page, tiles=_tiles(found))
    report.sections.append(
        chart_section(
            "Options: latency against memory",
            "Disc: do it; ring: within the noise, or worse; diamond: the run as it is. Percents "
            "are throughput: a larger batch may take longer and still do more a second. Upright "
            "strokes: four of five runs.",
            scatter(points, limit_of(found)) + option_list(points),
        )
    )
    add_timeline(report, [shown])
    return report


def _tiles(found: PlanAnswer) -> list[tuple[str, str]]:
    now = found.baseline.numbers
    tiles = [
        (show_seconds(now.batch_latency_s), "batch latency now"),
        (f"{now.bubble_fraction:.0%}", "bubble now"),
    ]
    if found.recommended:
        best = found.recommended[0]
        tiles += [
            (f"{best.throughput_gain_fraction:+.0%}", "throughput, best option"),
            (show_seconds(best.numbers.batch_latency_s), "batch latency, best option"),
            (f"{best.numbers.bubble_fraction:.0%}", "bubble, best option"),
        ]
    return tiles
