"""A plan in → the report of `debubble plan --html`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from debubble.plan.ask import WhatIfAnswer, ask
from debubble.plan.change import Change
from debubble.plan.option import Idea
from debubble.plan.plan import Plan
from debubble.report.answers.plan import OptionPart, PlanAnswer
from debubble.report.answers.server_plan import ServerPlanAnswer
from debubble.report.html.measured import add_timeline
from debubble.report.html.page import Board, Report, Slot
from debubble.report.html.sections import Pair, board_section, chart_section, pair_bars
from debubble.report.html.views import MOST_BYTES, PipelineView, View, views_of
from debubble.report.text import Page
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.job import Basis
from debubble.units import (
    show_between,
    show_bytes,
    show_change,
    show_gain,
    show_number,
    show_seconds,
    show_share,
)

# Of what a server could do, as many as its table has.
_SERVER_OPTIONS = 8


def views_of_plan(
    plan: Plan, measured: PipelineView, traced: Basis
) -> tuple[tuple[str, PipelineView], ...]:
    """Return a step now, and one of the best option as it is predicted, on one basis, by name.

    Of a plan of unprofiled times the step now is simulated: the measured one was profiled. Where
    only a larger batch gains, the option is that one: the page says so. Nothing is returned where
    nothing is to be done, or a replay did it: that has no step to draw.
    """
    best = plan.best or next(iter(plan.recommended), None)
    if best is None or best.by_replay:
        return ()
    now = "measured", measured
    if plan.baseline.basis != traced:
        unchanged = ask(plan.baseline, Idea(lever="", change=Change()))
        now = "now (simulated)", _drawn(replace(unchanged, correction=plan.baseline.correction))
    return now, ("planned", _drawn(ask(plan.baseline_for(best), best.idea)))


def _drawn(predicted: WhatIfAnswer) -> PipelineView:
    timeline = predicted.draw()
    return PipelineView(timeline=timeline, figures=measure_pipeline(timeline, 0), ledger=None)


def plan_report(
    answer: PlanAnswer,
    shown: PipelineView,
    compared: Sequence[tuple[str, PipelineView]],
    page: Page,
    run: str,
) -> Report:
    """Lay out the best option beside the run as it is, then all options, then the run."""
    report = Report(verb="plan", run=run, page=page, tiles=_tiles(answer))
    drawn = bool(compared) and _add_planned(report, answer, compared)
    words = (
        "Batch latency now and with each option, with the advice on the left. Percentages are "
        "throughput gains: a larger batch may take longer and still do more per second."
    )
    pairs = _option_pairs(answer)
    body = pair_bars(pairs, "Options by batch latency", ("now", "then")) if pairs else ""
    report.sections.append(chart_section("Options", words, body))
    if not drawn:
        add_timeline(report, [shown])
    return report


def _option_pairs(answer: PlanAnswer) -> list[Pair]:
    """Hold a batch with each option against the batch as it is, beside what memory it takes."""
    now_s = answer.baseline.numbers.batch_latency_s
    limit = min((limit for limit in answer.baseline.limit_bytes if limit is not None), default=None)
    pairs = []
    for option in answer.options:
        numbers, (low_s, high_s) = option.numbers, option.interval.batch_latency_s or (0.0, 0.0)
        beside = (
            f"{option.words}{_larger(option)}: {show_gain(option.throughput_gain_fraction)}, "
            f"{show_between(show_seconds(low_s), show_seconds(high_s))}"
        )
        peak = _fullest(numbers.peak_memory_bytes)
        if peak is not None:
            beside += f", peak {show_bytes(peak)}"
            beside += "" if limit is None else f" of {show_bytes(limit)}"
        pairs.append(
            Pair(
                name="try" if option.advice == "maybe" else option.advice,
                before=now_s,
                after=numbers.batch_latency_s,
                shown=(show_seconds(now_s), show_seconds(numbers.batch_latency_s)),
                beside=beside,
            )
        )
    return pairs


def _larger(option: OptionPart) -> str:
    return " (a larger batch)" if option.changes_training else ""


def _fullest(peaks: Sequence[float | None] | None) -> float | None:
    """Return the peak of the fullest rank."""
    return max((peak for peak in peaks or () if peak is not None), default=None)


def _best(answer: PlanAnswer) -> OptionPart:
    """Return the option that is drawn."""
    larger = [option for option in answer.options if option.recommended]
    return (answer.recommended or larger)[0]


def _add_planned(
    report: Report, answer: PlanAnswer, compared: Sequence[tuple[str, PipelineView]]
) -> bool:
    """Add a step now and the planned one on one axis, and their numbers."""
    best = _best(answer)
    slots = [
        Slot(title=title, views=report.add_views(_median_step(view))) for title, view in compared
    ]
    if not all(slot.views for slot in slots):
        return False
    number = report.add_board(Board(slots=tuple(slots)))
    report.sections += [
        board_section(
            number,
            "Now and planned",
            f"A step now, and the step predicted with {best.words}{_larger(best)}, on one axis "
            f"({answer.basis} times); the dashed line is where each ends.",
            names=[f"{slot.title}:" for slot in slots],
            memory=False,
        ),
        chart_section(
            "Numbers",
            "Now and predicted; each pair has its own scale.",
            pair_bars(_number_pairs(answer), "Numbers now and as planned", ("now", "planned")),
        ),
    ]
    return True


def _median_step(view: PipelineView) -> list[View]:
    """Return the step whose length is nearest to the median of all."""
    views, _ = views_of(view, MOST_BYTES // 4)
    middle = float(np.median([view["length"] * view["tick_ns"] for view in views] or [0]))
    return sorted(views, key=lambda view: abs(view["length"] * view["tick_ns"] - middle))[:1]


def _number_pairs(answer: PlanAnswer) -> list[Pair]:
    now, then = answer.baseline.numbers, _best(answer).numbers
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
    before, after = _fullest(now.peak_memory_bytes), _fullest(then.peak_memory_bytes)
    if before is not None and after is not None:
        shown = show_bytes(before), show_bytes(after)
        pairs.append(Pair(name="peak memory", before=before, after=after, shown=shown))
    return pairs


def server_plan_report(
    answer: ServerPlanAnswer, shown: Sequence[PipelineView], page: Page, run: str
) -> Report:
    """Lay out what a server does now, what each change would do, then its batches."""
    now = answer.as_is
    tiles = [
        (show_number(now.tokens_out_per_s), "tokens/s out now"),
        (show_seconds(now.tpot_s), "per token now"),
    ]
    if answer.recommended is not None:
        best = answer.options[answer.recommended]
        tiles += [
            (show_number(best.served.tokens_out_per_s), f"with {best.what}"),
            (show_change(best.gain_fraction), "tokens/s, best option"),
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
        for option in answer.options[:_SERVER_OPTIONS]
    ]
    words = "Tokens/s out now and with each change, with the advice on the left."
    label = "Tokens/s now and with each change"
    body = pair_bars(pairs, label, ("now", "then")) if pairs else ""
    report.sections.append(chart_section("Changes", words, body))
    add_timeline(report, shown)
    return report


def _tiles(answer: PlanAnswer) -> list[tuple[str, str]]:
    now = answer.baseline.numbers
    tiles = [
        (show_seconds(now.batch_latency_s), "batch latency now"),
        (show_share(now.bubble_fraction), "bubble now"),
    ]
    if answer.recommended:
        best = answer.recommended[0]
        tiles += [
            (show_change(best.throughput_gain_fraction), "throughput, best option"),
            (show_seconds(best.numbers.batch_latency_s), "batch latency, best option"),
            (show_share(best.numbers.bubble_fraction), "bubble, best option"),
        ]
    return tiles
