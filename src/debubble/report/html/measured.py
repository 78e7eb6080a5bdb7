"""Measured pipelines, hops, comparisons in → the reports of `find`, `links`, `compare --html`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from debubble.ledger.causes import Cause
from debubble.links.hop_times import Hop
from debubble.report.answers.compare import LABELS, CompareAnswer, show_delta, show_figure
from debubble.report.html.page import Board, Report, Slot
from debubble.report.html.sections import (
    MOST_RANKS,
    Cell,
    Pair,
    advice_section,
    board_section,
    chart_section,
    definitions,
    ledger_bars,
    matrix_markup,
    pair_bars,
    replay_section,
    saving_bars,
    slowness_of,
)
from debubble.report.html.views import MOST_BYTES, PipelineView, View, views_of
from debubble.report.text import Page
from debubble.units import counted, show_bytes, show_duration, show_number, show_rate, show_share


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
        words = "Rows send, columns receive; darker is slower; a slow hop is framed."
        report.sections.append(chart_section("Hops", words, matrix_markup(ranks, cells)))
    return report


def find_report(shown: Sequence[PipelineView], page: Page, run: str) -> Report:
    """Lay out the report; the worst pipeline comes first and is shown first."""
    report = Report(verb="find", run=run, page=page, tiles=tiles_of(shown[0]))
    report.sections.append(advice_section(_advice(page), page.next_command))
    add_timeline(report, shown)
    for pipeline in shown:
        _add_charts(report, pipeline, alone=len(shown) == 1)
    return report


_NEXT = {
    "links": "Next, debubble links shows what each hop does and costs.",
    "plan": "Next, debubble plan predicts what each change gains, and whether it fits.",
}


def _advice(page: Page) -> str:
    """Say what to do first, and what the next command shows; nothing where no cause is known."""
    verb = page.next_command.removeprefix("debubble ").partition(" ")[0]
    return f"{page.findings[0]} {_NEXT.get(verb, '')}".rstrip() if page.findings else ""


def tiles_of(view: PipelineView) -> list[tuple[str, str]]:
    """Return the figures that a reader wants first; of a stream in batches and tokens."""
    figures, stream = view.figures, view.figures.stream
    peaks = [rank.peak_memory_bytes for rank in figures.ranks if rank.peak_memory_bytes is not None]
    shown: list[tuple[Any, Callable[[Any], str], str]] = [
        (figures.bubble_fraction, show_share, "bubble"),
        (figures.batch_latency_ns, show_duration, "batch latency"),
        (figures.step_time_ns, show_duration, "step time"),
        (figures.apparent_fraction, show_share, "device utilisation"),
        (figures.useful_fraction, show_share, "useful compute"),
        (stream and stream.in_flight, "{:.3g}".format, "batches in flight"),
        (stream and stream.batches_per_s, show_number, "batches/s"),
        (view.stream and view.stream.tokens_out_per_s, show_number, "tokens/s out (profiled)"),
        (max(peaks, default=None), show_bytes, "peak memory, fullest rank"),
        (figures.schedule, str, "schedule"),
        (figures.microbatches, str, "microbatches"),
    ]
    return [(show(value), words) for value, show, words in shown if value is not None]


def add_timeline(report: Report, shown: Sequence[PipelineView]) -> None:
    """Add the lanes of all pipelines and steps, with what comes of the replays."""
    views: list[View] = []
    dropped = 0
    for pipeline in shown:
        more, left_out = views_of(pipeline, MOST_BYTES // len(shown))
        views += more
        dropped += left_out
    if not views:
        return
    numbers = report.add_views(views)
    words = (
        "One lane per rank. Tall: passes, with letter and microbatch. Thin and hatched: waits, by "
        "cause. Arrows: messages. Point at a wait to see who was waited for; 3B5 is stage 3's "
        "backward pass of microbatch 5, 2→3 a message from rank 2 to rank 3."
    )
    if shown[0].figures.stream is not None:
        words = (
            "One lane per rank. Tall: batches, with their number. Thin and hatched: waits, by "
            "cause. Arrows: messages. Point at a wait to see who was waited for; 3F5 is batch 5 on "
            "stage 3, 2→3 a message from rank 2 to rank 3."
        )
    if not any(view["waits"]["names"] for view in views):
        words = (
            "One lane per rank: passes, with letter and microbatch; arrows are messages. Waits "
            "have no causes here: no whole step, or no batch from end to end, was captured."
        )
    if dropped:
        words += f" {counted(dropped, 'more step')} left out, to keep the file small."
    replays = any(view["replays"] for view in views)
    number = report.add_board(Board(slots=(Slot(title="", views=numbers),), replays=replays))
    memory = any(view["memory"] for view in views)
    report.sections.append(board_section(number, "Timeline", words, memory=memory))
    if replays:
        report.sections.append(replay_section())


def _add_charts(report: Report, shown: PipelineView, *, alone: bool) -> None:
    pipeline = None if alone else shown.figures.pipeline
    account = shown.ledger or shown.stream
    if account is not None:
        what, of = "batches", "Shares of the time"
        if shown.ledger is not None:
            steps = counted(len(shown.ledger.steps), "step")
            what, of = "steps", f"Shares of the batch, median of {steps}"
        rows = [
            (f"rank {rank.rank}", account.shares(ranks_pair))
            for ranks_pair, rank in enumerate(shown.figures.ranks)
        ]
        seen = [cause for cause in Cause if any(shares[cause] for _, shares in rows)]
        report.sections += [
            chart_section(
                "Where the time goes",
                f"{of}; hatches as in the timeline.",
                ledger_bars(rows) + definitions(seen),
                pipeline,
            ),
            chart_section(
                "What fixing it would save",
                f"Replays of the measured {what} with one cause removed, or two together. "
                "Savings do not add up.",
                saving_bars(account.savings),
                pipeline,
            ),
        ]
    report.sections.append(
        chart_section(
            "Hops",
            "Median rate, wire time and wait of a message; darker is slower.",
            _hops(shown),
            pipeline,
        )
    )


def _hops(pipeline: PipelineView) -> str:
    hops = pipeline.figures.hops
    if not hops or len(pipeline.figures.ranks) > MOST_RANKS:
        return ""
    wires = {(hop.source, hop.destination): hop.wire_ns for hop in hops}
    slowness = slowness_of({hop: float(wire) for hop, wire in wires.items() if wire is not None})
    cells = {}
    for hop in hops:
        where = hop.source, hop.destination
        health = (
            pipeline.ledger.links.of(where) if pipeline.ledger and pipeline.ledger.links else None
        )
        rate = hop.bytes_per_s
        wire = "hidden" if hop.wire_ns is None else show_duration(hop.wire_ns)
        cells[where] = Cell(
            slowness=slowness.get(where, 0.0),
            lines=(
                show_rate(rate) if rate else f"wire {wire}",
                *((f"wire {wire}",) if rate else ()),
                f"wait {show_duration(hop.wait_ns)}",
            ),
            slow=health is not None and health.slow,
        )
    ranks = [rank.rank for rank in pipeline.figures.ranks]
    return matrix_markup(ranks, cells)


def compare_report(
    answer: CompareAnswer, sides: Sequence[Sequence[PipelineView]], page: Page, run: str
) -> Report:
    """Lay out before and after: their steps on one axis, their numbers, their memory.

    A side that is only a name in the history has numbers and no steps.
    """
    report = Report(verb="compare", run=run, page=page)
    report.sections += [
        f'<div class="sides">{_numbers(answer)}{_memory(answer)}</div>',
    ]
    if answer.causes:
        seen = [next(cause for cause in Cause if cause == part.cause) for part in answer.causes]
        rows = [
            (
                "before",
                dict(zip(seen, (part.before_fraction for part in answer.causes), strict=True)),
            ),
            (
                "after",
                dict(zip(seen, (part.after_fraction for part in answer.causes), strict=True)),
            ),
        ]
        words = "Shares of the batch, all ranks together; hatches as in the timeline."
        body = ledger_bars(rows) + definitions(seen)
        report.sections.append(chart_section("Where the time goes", words, body))
    _add_steps(report, sides)
    return report


def _numbers(answer: CompareAnswer) -> str:
    pairs = []
    for name, delta in answer.delta.items():
        if delta.before is None and delta.after is None:
            continue
        before = delta.before.median if delta.before else None
        after = delta.after.median if delta.after else None
        unit = f"; {answer.throughput_unit} a second" if name == "throughput" else ""
        decides = "; decides" if name == answer.decided_by else ""
        pairs.append(
            Pair(
                name=LABELS[name],
                before=before,
                after=after,
                shown=(show_figure(name, before), show_figure(name, after)),
                beside=f"{show_delta(name, delta.change)}, {delta.direction}{decides}{unit}",
            )
        )
    words = "Medians; each pair has its own scale."
    return chart_section("Numbers", words, pair_bars(pairs, "Numbers before and after"))


def _memory(answer: CompareAnswer) -> str:
    pairs = []
    for change in answer.memory:
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
    return "unknown" if count is None else show_bytes(count)


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
