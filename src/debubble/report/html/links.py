"""Judged hops in → the report of `debubble links --html`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from debubble.links.hop_times import Hop
from debubble.report.html.charts import MOST_RANKS, Cell, matrix_markup, slowness_of
from debubble.report.html.page import Report
from debubble.report.html.sections import chart_section
from debubble.report.text import Page
from debubble.units import show_rate


def links_report(rates: Mapping[Hop, float], slow: Sequence[Hop], page: Page, run: str) -> Report:
    """Lay out the matrix of hops; their figures follow as in the terminal."""
    report = Report(verb="links", run=run, page=page)
    ranks = sorted({rank for hop in rates for rank in hop})
    if rates and len(ranks) <= MOST_RANKS:
        slowness = slowness_of({hop: 1 / rate for hop, rate in rates.items()})
        cells = {
            hop: Cell(slowness=slowness[hop], lines=(show_rate(rate),), slow=hop in slow)
            for hop, rate in rates.items()
        }
        words = (
            "Rows send, columns receive; the fuller the colour, the slower; a slow hop is framed."
        )
        report.sections.append(chart_section("Hops", words, matrix_markup(ranks, cells)))
    return report
