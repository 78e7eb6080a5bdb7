"""A comparison in → the report of `debubble compare --html`."""

from __future__ import annotations

from collections.abc import Sequence

from debubble.answers.compare import LABELS, CompareAnswer, show_delta, show_figure
from debubble.ledger.causes import CAUSES
from debubble.report.html.page import Board, Report, Slot
from debubble.report.html.sections import (
    Pair,
    board_section,
    chart_section,
    definitions,
    ledger_bars,
    pair_bars,
)
from debubble.report.html.views import MOST_BYTES, PipelineView, views_of
from debubble.report.text import Page
from debubble.units import show_bytes


def compare_report(
    found: CompareAnswer, sides: Sequence[Sequence[PipelineView]], page: Page, run: str
) -> Report:
    """Lay out before and after: their steps on one axis, their numbers, their memory.

    A side that is only a name in the history has numbers and no steps.
    """
    report = Report(verb="compare", run=run, page=page)
    report.sections += [
        f'<div class="sides">{_numbers(found)}{_memory(found)}</div>',
    ]
    if found.causes:
        named = {str(cause): cause for cause in CAUSES}
        rows = [
            ("before", {named[one.cause]: one.before_fraction for one in found.causes}),
            ("after", {named[one.cause]: one.after_fraction for one in found.causes}),
        ]
        words = "Shares of the batch, all ranks together; hatches as in the timeline."
        body = ledger_bars(rows) + definitions([named[one.cause] for one in found.causes])
        report.sections.append(chart_section("Where the time goes", words, body))
    _add_steps(report, sides)
    return report


def _numbers(found: CompareAnswer) -> str:
    pairs = []
    for name, delta in found.delta.items():
        if delta.before is None and delta.after is None:
            continue
        before = delta.before.median if delta.before else None
        after = delta.after.median if delta.after else None
        decides = "; decides" if name == found.decided_by else ""
        pairs.append(
            Pair(
                name=LABELS[name],
                before=before,
                after=after,
                shown=(show_figure(name, before), show_figure(name, after)),
                beside=f"{show_delta(name, delta.change)}, {delta.direction}{decides}",
            )
        )
    words = "Medians; each pair on its own scale."
    return chart_section("Numbers", words, pair_bars(pairs, "Numbers before and after"))


def _memory(found: CompareAnswer) -> str:
    pairs = []
    for change in found.memory:
        left = change.headroom_bytes
        beside = ""
        if left is not None:
            short = ": too little" if change.unsafe else ""
            beside = f"{show_bytes(left)} left of {show_bytes(change.limit_bytes or 0)}{short}"
        pairs.append(
            Pair(
                name=f"rank {change.rank}",
                before=change.before_bytes,
                after=change.after_bytes,
                shown=(_bytes(change.before_bytes), _bytes(change.after_bytes)),
                beside=beside,
                limit=change.limit_bytes,
            )
        )
    if not pairs:
        return ""
    words = "Peaks of each rank; a dashed line is the device's limit."
    return chart_section("Memory", words, pair_bars(pairs, "Peak memory before and after"))


def _bytes(count: int | None) -> str:
    return "not known" if count is None else show_bytes(count)


def _add_steps(report: Report, sides: Sequence[Sequence[PipelineView]]) -> None:
    slots = []
    for title, captures in zip(("before", "after"), sides, strict=True):
        views = [view for capture in captures for view in views_of(capture, MOST_BYTES // 4)[0]]
        if not views:
            return
        slots.append(Slot(title=title, views=report.add_views(views)))
    number = report.add_board(Board(slots=tuple(slots)))
    report.sections.append(
        board_section(
            number,
            "Before and after",
            "A step of each on one axis; the dashed line is where it ends.",
            names=("before:", "after:"),
            memory=False,
        )
    )
