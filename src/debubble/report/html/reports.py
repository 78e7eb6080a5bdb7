"""Measured and predicted steps in → the reports of `find`, `plan` and `compare` with `--html`.

A report is the page of the terminal, and above its tables what only a picture shows: steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from debubble.analysis import Analysis
from debubble.ledger.causes import Cause
from debubble.plan.plan import Plan
from debubble.report.html.page import Board, Report, Slot
from debubble.report.html.sections import (
    board_section,
    chart_section,
    definitions,
    ledger_bars,
    replay_section,
)
from debubble.report.html.views import MOST_BYTES, PipelineView, View, views_of
from debubble.report.text import Page
from debubble.units import counted


def timeline_report(verb: str, shown: Sequence[PipelineView], page: Page, run: str) -> Report:
    """Lay out the steps of pipelines, the worst first, and where the time of each went."""
    report = Report(verb=verb, run=run, page=page)
    _add_timeline(report, shown)
    for view in shown:
        account = view.ledger or view.stream
        if account is None:
            continue
        of = "Shares of the time"
        if view.ledger is not None:
            of = f"Shares of the batch, median of {counted(len(view.ledger.steps), 'step')}"
        rows = [
            (f"rank {rank.rank}", account.shares(rank_index))
            for rank_index, rank in enumerate(view.figures.ranks)
        ]
        seen = [cause for cause in Cause if any(shares[cause] for _, shares in rows)]
        report.sections.append(
            chart_section(
                "Where the time goes",
                f"{of}; hatches as in the timeline.",
                ledger_bars(rows) + definitions(seen),
                None if len(shown) == 1 else view.figures.pipeline,
            )
        )
    return report


def paired_report(  # noqa: PLR0913, PLR0917 (a report, and what its two steps are)
    verb: str,
    title: str,
    words: str,
    slots: Sequence[tuple[str, Sequence[PipelineView]]],
    page: Page,
    run: str,
) -> Report:
    """Lay out two steps of median length on one axis, each named; none where one has no steps."""
    report = Report(verb=verb, run=run, page=page)
    steps = [[view for run in runs for view in views_of(run)[0]] for _, runs in slots]
    if all(steps):
        board = Board(
            slots=tuple(
                Slot(title=name, views=report.add_views([_median_step(views)]))
                for (name, _), views in zip(slots, steps, strict=True)
            )
        )
        words = f"{words}, on one axis; the dashed line is where each ends."
        names = [f"{name}:" for name, _ in slots]
        number = report.add_board(board)
        report.sections.append(board_section(number, title, words, names=names, memory=False))
    return report


def plan_report(analysis: Analysis, plan: Plan, page: Page, run: str) -> Report:
    """Lay out a step now and the planned one; where nothing is to be done, the run as it is."""
    steps = analysis.planned_steps(plan)
    if not steps:
        shown = PipelineView(
            timeline=analysis.timeline, figures=analysis.pipeline, ledger=analysis.ledger
        )
        return timeline_report("plan", [shown], page, run)
    slots = [
        (
            name,
            [
                PipelineView(
                    timeline=timeline,
                    figures=figures,
                    ledger=analysis.ledger if figures is analysis.pipeline else None,
                )
            ],
        )
        for name, timeline, figures in steps
    ]
    sentence = f"A step now, and the one predicted of the best option ({plan.baseline.basis} times)"
    return paired_report("plan", "Now and planned", sentence, slots, page, run)


def _median_step(views: Sequence[View]) -> View:
    lengths = [view["length"] * view["tick_ns"] for view in views]
    return min(zip(lengths, views, strict=True), key=lambda pair: abs(pair[0] - median(lengths)))[1]


def _add_timeline(report: Report, shown: Sequence[PipelineView]) -> None:
    """Add the lanes of all pipelines and steps, with what comes of the replays."""
    views: list[View] = []
    dropped = 0
    for pipeline in shown:
        more, left_out = views_of(pipeline, MOST_BYTES // len(shown))
        views += more
        dropped += left_out
    if not views:
        return
    tall, example = "passes, with letter and microbatch", "3B5 is stage 3's pass B of microbatch 5"
    if shown[0].figures.stream is not None:
        tall, example = "batches, with their number", "3F5 is batch 5 on stage 3"
    words = (
        f"One lane per rank. Tall: {tall}. Thin and hatched: waits, by cause. Arrows: messages. "
        f"Point at a wait to see who was waited for; {example}, 2→3 a message from rank 2 to "
        "rank 3."
    )
    if not any(view["waits"]["names"] for view in views):
        words = (
            "One lane per rank: passes, with letter and microbatch; arrows are messages. Waits "
            "have no causes here: no whole step, or no batch from end to end, was captured."
        )
    if dropped:
        words += f" {counted(dropped, 'more step')} left out, to keep the file small."
    replays = any(view["replays"] for view in views)
    slot = Slot(title="", views=report.add_views(views))
    number = report.add_board(Board(slots=(slot,), replays=replays))
    memory = any(view["memory"] for view in views)
    report.sections.append(board_section(number, "Timeline", words, memory=memory))
    if replays:
        report.sections.append(replay_section())
