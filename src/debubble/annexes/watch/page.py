"""The board in → the service's page, and the page of a capture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from debubble.annexes.watch.analyse import Finding
from debubble.annexes.watch.board import Board, Pipeline
from debubble.annexes.watch.judge import (
    BUCKET_SLOWER,
    TRAFFIC_MOVED,
    Alert,
    Capture,
    Standing,
    say_bucket,
    say_metric,
    show_metric,
    show_time,
)
from debubble.report.markup import asset, digest, rect, safe, svg, text
from debubble.units import counted, show_change, show_number, show_share

_DRAWN = ("bubble_fraction", "batch_latency_s", "microbatches_per_s", "peak_memory_bytes")
_STYLE = asset("watch.css")
STYLE_POLICY = f"'{digest(_STYLE)}'"
"""What the page's Content-Security-Policy allows: this style sheet and no other."""

_WORDS = (
    "Bubble: the share of a batch in which ranks wait. Batch latency: how long one batch takes. "
    "Throughput: microbatches a second, in a stream batches. Peak memory: of the fullest rank. "
    "Context: how many tokens a request has at most; captures are held against those of the same. "
    "Times are those of the captures, UTC; a red dashed line is an alert. "
    "Theory: the bubble of the schedule alone, with equal stages and zero-cost transfers."
)
_WIDTH, _HEIGHT, _MARGIN = 370, 124, 6
# What is written on the axes has its place left of the curve, and below it.
_LEFT, _BELOW = 118, 18
_LISTED_CAPTURES = 20
_CONTEXT_BY = {
    "label": " by its label",
    "server": " by the server's histogram",
    "tokens": " by its tokens",
}


def status_page(board: Board) -> str:
    """Draw everything: alerts first, then each pipeline with its trends and last captures."""
    alerts = board.open_alerts
    answer = f"{counted(len(alerts), 'alert')} to look at." if alerts else "No alerts."
    states = {standing.state for pipeline in board.pipelines for standing in pipeline.standings}
    if not alerts and states == {"learning"}:
        answer = "No alerts: none is possible before a pipeline has its reference."
    parts = [f"<h1>debubble watch</h1><p>{answer}</p>", *map(_alert, alerts)]
    parts += [_pipeline(pipeline, board.alerts) for pipeline in board.pipelines]
    past = [alert for alert in board.alerts if alert.acknowledged_s is not None]
    if past:
        parts += ["<h2>Acknowledged</h2>", *map(_alert, past[:_LISTED_CAPTURES])]
    parts.append(f"<p><small>{_WORDS}</small></p>")
    return _document("debubble watch", parts)


def capture_page(capture: Capture, report: str) -> str:
    """Draw the report of one capture."""
    title = f"{capture.pipeline}: {capture.name}"
    when = f"{show_time(capture.captured_s)}, {capture.state}"
    parts = [f"<h1>{safe(title)}</h1><p>{when}. <a href='/'>All</a></p>"]
    if capture.problem:
        parts.append(f"<p class='alert'>{safe(capture.problem)}</p>")
    if capture.finding is not None:
        context, plan = _context(capture.finding), _plan(capture.finding)
        parts.append(f"<p>Of {context}. {plan}</p><pre>{safe(report, breaks=True)}</pre>")
    return _document(title, parts)


def _document(title: str, parts: Sequence[str]) -> str:
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    return (
        f"<!doctype html><html lang='en'><head>{head}<title>{safe(title)}</title>"
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _button(action: str, word: str) -> str:
    return f"<form method='post' action='{action}'><button>{word}</button></form>"


def _alert(alert: Alert) -> str:
    words = [f"<strong>{safe(alert.kind)}</strong> {safe(alert.message)}"]
    change = alert.data.get("batch_latency_s")
    if isinstance(change, dict):
        moved, slower = (
            show_metric("batch_latency_s", change[part])
            for part in ("traffic_moved", "buckets_slower")
        )
        words.append(f"Of the change in batch latency {moved} are traffic, {slower} are speed.")
    is_open = alert.acknowledged_s is None
    button = _button(f"/alerts/{alert.id}/acknowledge", "Acknowledge") if is_open else ""
    words.append(f"<small>{show_time(alert.raised_s)}</small> {button}")
    return f"<div class='alert{'' if is_open else ' done'}'>{'<br>'.join(words)}</div>"


def _pipeline(pipeline: Pipeline, alerts: Sequence[Alert]) -> str:
    troubles = sorted(pipeline.health.troubles.items())
    parts = [f"<h2>{safe(pipeline.name)}</h2>"]
    parts += [f"<p class='alert'>{safe(f'{part}: {words}')}</p>" for part, words in troubles]
    parts += [_answers(pipeline), _trends(pipeline, alerts)]
    if pipeline.captures:
        listed = pipeline.captures[:_LISTED_CAPTURES]
        names = ["when, UTC", "capture", "context", "bubble", "batch latency", "microbatches/s"]
        head = "".join(f"<th>{name}</th>" for name in (*names, "problem"))
        rows = f"<tr>{head}</tr>{''.join(map(_row, listed))}"
        # Where the window is narrow, the table scrolls by itself.
        parts.append(f"<h3>Last captures</h3><div class='wide'><table>{rows}</table></div>")
    return "".join(parts)


def _row(capture: Capture) -> str:
    finding, address = capture.finding, f"/captures/{capture.id}"
    metrics = finding.metrics if finding else {}
    rate = metrics.get("microbatches_per_s")
    retry = _button(f"{address}/retry", "Try again") if capture.state == "failed" else ""
    cells = [
        show_time(capture.captured_s).removesuffix(" UTC"),
        f"<a href='{address}'>{safe(capture.name)}</a>",
        str(finding.bucket or "–") if finding else "–",
        show_metric("bubble_fraction", metrics.get("bubble_fraction")),
        show_metric("batch_latency_s", metrics.get("batch_latency_s")),
        "–" if rate is None else show_number(rate),
        f"{safe(capture.problem or '')} {retry}",
    ]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _answers(pipeline: Pipeline) -> str:
    """Answer what somebody who is on call asks: is it worse, since when, why, what to do."""
    latest = pipeline.latest
    if latest is None or latest.finding is None:
        return "<p>No capture yet.</p>"
    finding, known = latest.finding, [s for s in pipeline.standings if s.state != "learning"]
    worse = [standing for standing in known if standing.state == "worse"]
    here = [standing for standing in known if standing.context_bucket == finding.bucket]
    answers = [f"Yes: {'; '.join(map(_change, worse))}"] if worse else []
    if here and not worse:
        names = ", ".join(say_metric(standing.metric) for standing in here)
        answers = [f"No: as in the first {counted(pipeline.reference, 'capture')} ({names})"]
    learning = say_learning(pipeline.standings, pipeline.reference)
    answers += [learning] if known or not learning else [f"Not known yet: {learning}"]
    rows = [("Is it worse?", f"{'; '.join(filter(None, answers))}.")]
    if worse:
        rows.append(("Since when?", show_time(min(s.since_s or 0.0 for s in worse))))
        causes = max((standing.causes for standing in worse), key=len)
        grown = "; ".join(map(str, causes[:3]))
        rows.append(("Which cause grew?", safe(grown or "None: see the report.")))
    rows.append(("What would plan do now?", _plan(finding)))
    figures = ", ".join(
        f"{say_metric(name)} {show_metric(name, value)}" for name, value in finding.metrics.items()
    )
    link = f"<a href='/captures/{latest.id}'>Latest report</a>"
    rows.append(("Latest", f"{figures}; {_context(finding)}. {link}"))
    counts = ", ".join(f"{count} {state}" for state, count in sorted(pipeline.counts.items()))
    rows.append(("Captures", counts))
    return f"<dl>{''.join(f'<dt>{asked}</dt><dd>{answer}</dd>' for asked, answer in rows)}</dl>"


def say_learning(standings: Iterable[Standing], needed: int) -> str:
    """Say how far the reference of each context length has come; empty where all have one."""
    captures = {
        standing.context_bucket: standing.reference_captures
        for standing in standings
        if standing.state == "learning"
    }
    return ", ".join(
        f"learning: {count} of {counted(needed, 'capture')}"
        + (f" of {say_bucket(bucket)}" if bucket else "")
        for bucket, count in captures.items()
    )


def _change(standing: Standing) -> str:
    """Say where a metric was and is."""
    metric, was, now = standing.metric, standing.reference, standing.recent
    is_ratio = metric != "bubble_fraction" and was and now
    shift = f" ({show_change(now / was - 1)})" if is_ratio and was and now else ""
    bucket = standing.context_bucket
    where = f" at {say_bucket(bucket)}" if bucket else ""
    went = f"{show_metric(metric, was)} → {show_metric(metric, now)}"
    return f"{say_metric(metric)}{where} {went}{shift}"


def _plan(finding: Finding) -> str:
    """Say what would gain with today's traffic and costs, or why no plan is watched."""
    if finding.plan is None:
        return f"No plan is watched: {safe(finding.no_plan)}."
    if not finding.plan.change:
        return "By this capture no option is certain to gain."
    gain = show_share(finding.plan.gain)
    return f"By this capture {safe(finding.plan.change)} would gain {gain} of throughput."


def _context(finding: Finding) -> str:
    return f"{say_bucket(finding.bucket)}{_CONTEXT_BY.get(finding.context_source or '', '')}"


_Line = Sequence[tuple[float, float]]
"""When, and what."""


def _trends(pipeline: Pipeline, alerts: Sequence[Alert]) -> str:
    """Draw each metric of each bucket over time, the bubble beside its theory."""
    captures = [capture for capture in reversed(pipeline.captures) if capture.finding is not None]
    captures.sort(key=lambda capture: capture.captured_s)
    lines: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for capture in captures:
        if capture.finding is None:
            continue
        values = capture.finding.metrics | {"theory": capture.finding.theory}
        for name, value in values.items():
            if value is not None:
                points = lines.setdefault((name, capture.finding.bucket), [])
                points.append((capture.captured_s, value))
    figures = []
    for metric in _DRAWN:
        for (name, bucket), points in sorted(lines.items()):
            if name != metric:
                continue
            theory = lines.get(("theory", bucket)) if metric == "bubble_fraction" else None
            marks = [
                alert.raised_s
                for alert in alerts
                if alert.pipeline == pipeline.name
                and (alert.kind, alert.subject)
                in {(TRAFFIC_MOVED, "context_length"), (BUCKET_SLOWER, f"{metric}/{bucket}")}
            ]
            shown = {"line": points} | ({"theory": theory} if theory else {})
            figures.append(_figure(metric, bucket, shown, marks))
    return f"<div class='trends'>{''.join(figures)}</div>"


def _figure(metric: str, bucket: int, lines: Mapping[str, _Line], marks_s: Iterable[float]) -> str:
    """Draw lines in a frame with its axes, the captures that raised an alert marked."""
    values = [value for line in lines.values() for _, value in line]
    low, high = min(values), max(values)
    height = (high - low) or abs(high) or 1.0
    points = lines["line"]
    first, last = points[0][0], points[-1][0]
    span = (last - first) or 1.0
    bottom = _HEIGHT - _BELOW

    def place(at_s: float, value: float) -> tuple[float, float]:
        across = _LEFT + (_WIDTH - _LEFT - _MARGIN) * (at_s - first) / span
        down = bottom - _MARGIN - (bottom - 2 * _MARGIN) * (value - low) / height
        return round(across, 1), round(down, 1)

    drawn = rect(_LEFT, 0, _WIDTH - _LEFT, bottom, "frame")
    for style, line in lines.items():
        corners = [place(*point) for point in line]
        path = " ".join(f"{x},{y}" for x, y in corners)
        end = f"<circle cx='{corners[-1][0]}' cy='{corners[-1][1]}' r='3'/>"
        drawn += f"<g class='{style}'><polyline points='{path}'/>{end}</g>"
    for x, _ in (place(at_s, low) for at_s in marks_s):
        if _LEFT <= x <= _WIDTH:
            drawn += f"<line class='alerted' x1='{x}' x2='{x}' y1='0' y2='{bottom}'/>"
    for value in dict.fromkeys((low, high)):
        words = show_metric(metric, value)
        drawn += text(_LEFT - 6, place(first, value)[1] + 4, words, anchor="end")
    times = [f"{datetime.fromtimestamp(at_s, UTC):%m-%d %H:%M}" for at_s in (first, last)]
    drawn += text(_LEFT, _HEIGHT - 4, times[0])
    if last > first:
        drawn += text(_WIDTH - _MARGIN, _HEIGHT - 4, times[1], anchor="end")
    name = say_metric(metric) + (f", {say_bucket(bucket)}" if bucket else "")
    now = show_metric(metric, points[-1][1])
    caption = f"{name}: {now} in the last of {counted(len(points), 'capture')}"
    if "theory" in lines:
        caption += f"; theory {show_metric(metric, lines['theory'][-1][1])} (dotted)"
    return f"<figure>{svg(_WIDTH, _HEIGHT, drawn, name)}<figcaption>{caption}</figcaption></figure>"
