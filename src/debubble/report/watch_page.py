"""The journal's views in → the service's page, and its words."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape as escape_html
from typing import Any

from debubble.ledger.causes import Cause
from debubble.report.palette import CAUSES, TILE
from debubble.units import (
    counted,
    printable,
    show_bytes,
    show_change,
    show_count,
    show_number,
    show_seconds,
    show_share,
)


def escape(text: str) -> str:
    """Return a stranger's text as the page may hold it."""
    return escape_html(printable(text, breaks=True))


_METRICS = {
    "bubble_fraction": "bubble",
    "batch_latency_s": "batch latency",
    "microbatches_per_s": "throughput",
    "peak_memory_bytes": "peak memory",
}


def say_metric(metric: str) -> str:
    """Name a metric."""
    return _METRICS.get(metric, metric)


def say_bucket(bucket: int) -> str:
    """Name a bucket of context lengths; 0 is one that nobody told."""
    return f"up to {show_count(bucket)} tokens" if bucket else "an unknown context length"


def say_learning(drifts: Iterable[Mapping[str, Any]], needed: int) -> str:
    """Say how far the reference of each context length has come; empty where all have one."""
    captures = {
        figure["context_bucket"]: figure["reference_captures"]
        for figure in drifts
        if figure["state"] == "learning"
    }
    if not drifts:
        captures[None] = 0
    return ", ".join(
        f"learning: {count} of {counted(needed, 'capture')}"
        + (f" of {say_bucket(bucket)}" if bucket else "")
        for bucket, count in captures.items()
    )


def say_cause(change: Mapping[str, Any]) -> str:
    """Say what a cause takes of a batch, and what it took."""
    word = next((look.word for cause, look in CAUSES.items() if cause == change["cause"]), "?")
    before, after = show_seconds(change["before_s"]), show_seconds(change["after_s"])
    return f"{word} went from {before} to {after} of a batch"


def show_time(at_s: float) -> str:
    """Write a moment."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def show_metric(metric: str, value: float | None) -> str:
    """Write a value of a metric with its unit."""
    if value is None:
        return "–"
    if metric == "bubble_fraction":
        return show_share(value)
    if metric == "batch_latency_s":
        return show_seconds(value)
    return (
        show_bytes(value)
        if metric == "peak_memory_bytes"
        else f"{show_number(value)} microbatches/s"
    )


_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:70rem;margin:2rem auto;
padding:0 1rem;color:#1b1f24}
h1{font-size:1.4rem}h2{margin-top:2.2rem;font-size:1.15rem}h3{font-size:1rem;margin:1rem 0 .2rem}
table{border-collapse:collapse;margin:.6rem 0}td,th{padding:.25rem .6rem;text-align:left;
border-bottom:1px solid #d8dee4;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}td:first-child{white-space:nowrap}td:nth-child(2){overflow-wrap:anywhere;min-width:8rem}
.alert{border-left:4px solid #b42318;background:#fef3f2;padding:.5rem .9rem;margin:.5rem 0}
.done{border-color:#8c959f;background:#f6f8fa}.trends{display:flex;flex-wrap:wrap;gap:1rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;margin:.8rem 0}
dt{font-weight:600}dd{margin:0}figure{margin:0;max-width:370px}figcaption{font-size:.85rem;color:#57606a}pre{overflow:auto;background:#f6f8fa;
padding:1rem;font-size:13px}form{display:inline}button{font:inherit}small{color:#57606a}
"""
STYLE_POLICY = f"'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"
"""What the page's Content-Security-Policy allows: this style sheet and no other."""

_WORDS = (
    "Bubble: the share of a batch in which ranks wait. Batch latency: how long one batch takes. "
    "Throughput: microbatches a second, in a stream batches. Peak memory: of the fullest rank. "
    "Context: how many tokens a request has at most; captures are held against those of the same. "
    "Times are those of the captures, UTC; a dashed line is an alert. "
    "Theory: the bubble of the schedule alone, with equal stages and zero-cost transfers."
)
_WIDTH, _HEIGHT, _MARGIN = 370, 124, 6
# What is written on the axes has its place left of the curve, and below it.
_LEFT, _BELOW = 118, 18
_LINE, _ALERT, _GRID, _INK = "#0969da", "#b42318", "#d8dee4", "#57606a"
_THEORY = "#b35900"
_ALL = "<a href='/'>All</a>"
# Of causes: what is less than this of a batch in every capture is not drawn.
_LEAST_DRAWN = 0.01


def status_page(view: Mapping[str, Any]) -> str:
    """Draw everything: alerts first, then each pipeline with its trends and last captures."""
    waiting = view["open_alerts"]
    answer = (
        f"{len(waiting)} alert{'' if len(waiting) == 1 else 's'} to look at."
        if waiting
        else "No alerts."
    )
    figures = [figure for pipeline in view["pipelines"] for figure in pipeline["drift"]]
    if not waiting and figures and all(figure["state"] == "learning" for figure in figures):
        answer = "No alerts: none is possible before a pipeline has its reference."
    parts = [f"<h1>debubble watch</h1><p>{answer}</p>"]
    parts += [_alert(alert) for alert in waiting]
    parts += [_pipeline(pipeline, view["alerts"]) for pipeline in view["pipelines"]]
    past = [alert for alert in view["alerts"] if alert["acknowledged_s"] is not None]
    if past:
        parts.append("<h2>Acknowledged</h2>")
        parts += [_alert(alert) for alert in past[:20]]
    if view["pipelines"]:
        parts.append(f"<p><small>{_WORDS}</small></p>")
    return _document("debubble watch", parts)


def capture_page(pipeline: str, capture: Mapping[str, Any]) -> str:
    """Draw the report of one capture."""
    parts = [
        f"<h1>{escape(pipeline)}: {escape(capture['capture'])}</h1>",
        f"<p>{show_time(capture['captured_s'])}, {escape(capture['state'])}. {_ALL}</p>",
    ]
    if capture.get("problem"):
        parts.append(f"<p class='alert'>{escape(capture['problem'])}</p>")
    if "report" in capture:
        # Sentences wrap, tables do not.
        said, _, tables = capture["report"].partition("\n\n")
        answer, *findings = said.splitlines() or [""]
        context = _context(capture)
        parts.append(
            f"<p>Of {context}.{_plan(capture)}</p><p><strong>{escape(answer)}</strong></p>"
        )
        items = "".join(f"<li>{escape(line.removeprefix('- '))}</li>" for line in findings)
        parts.append(f"<ul>{items}</ul>" if items else "")
        parts.append(f"<pre>{escape(tables)}</pre>" if tables else "")
    return _document(f"{pipeline}: {capture['capture']}", parts)


def _document(title: str, parts: Sequence[str]) -> str:
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    return (
        f"<!doctype html><html lang='en'><head>{head}<title>{escape(title)}</title>"
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _alert(alert: Mapping[str, Any]) -> str:
    done = alert["acknowledged_s"] is not None
    action = f"/alerts/{int(alert['id'])}/acknowledge"
    form = f"<form method='post' action='{action}'><button>Acknowledge</button></form>"
    words = [f"<strong>{escape(alert['kind'])}</strong> {escape(alert.get('message', ''))}"]
    change = alert.get("batch_latency_s")
    if isinstance(change, dict):
        moved, slower = (
            show_metric("batch_latency_s", change[part])
            for part in ("traffic_moved", "buckets_slower")
        )
        words.append(f"Of the change in batch latency {moved} are traffic, {slower} are speed.")
    words.append(f"<small>{show_time(alert['raised_s'])}</small> {'' if done else form}")
    return f"<div class='alert{' done' if done else ''}'>{'<br>'.join(words)}</div>"


def _pipeline(pipeline: Mapping[str, Any], alerts: Sequence[Mapping[str, Any]]) -> str:
    mine = [alert for alert in alerts if alert["pipeline"] == pipeline["name"]]
    parts = [f"<h2>{escape(pipeline['name'])}</h2>"]
    parts += [f"<p class='alert'>{escape(trouble)}</p>" for trouble in pipeline["troubles"]]
    parts += [_answers(pipeline), _latest(pipeline)]
    drawn = [_trend(trend, mine) for trend in pipeline["trends"]]
    drawn += [_causes(trend, mine) for trend in pipeline["trends"] if trend.get("causes")]
    parts.append(f"<div class='trends'>{''.join(drawn)}</div>")
    if pipeline["recent"]:
        rows = "".join(_row(pipeline["name"], capture) for capture in pipeline["recent"])
        heads = ["when, UTC", "capture", "context", "bubble", "batch latency", "microbatches/s"]
        # How a capture ended is worth a column where one ended otherwise than well.
        heads += [""] * any(capture["state"] != "stored" for capture in pipeline["recent"])
        head = "".join(f"<th>{name}</th>" for name in heads)
        parts.append(f"<h3>Last captures</h3>{_wide(f'<tr>{head}</tr>{rows}')}")
    if pipeline["given_up"]:
        lines = "".join(_given_up(pipeline["name"], capture) for capture in pipeline["given_up"])
        parts.append(f"<h3>Given up</h3>{_wide(lines)}")
    return "".join(parts)


def _wide(rows: str) -> str:
    """Draw a table that scrolls by itself where the window is narrow."""
    return f"<div class='wide'><table>{rows}</table></div>"


def _answers(pipeline: Mapping[str, Any]) -> str:
    """Answer what somebody who is on call asks: is it worse, since when, why, what to do."""
    latest, figures = pipeline["latest"], pipeline["drift"]
    if latest is None:
        return ""
    worse = [figure for figure in figures if figure["state"] == "worse"]
    known = [figure for figure in figures if figure["state"] != "learning"]
    here = [figure for figure in known if figure["context_bucket"] == latest.get("context_bucket")]
    said = [f"Yes: {'; '.join(map(_change, worse))}"] if worse else []
    if here and not worse:
        names = ", ".join(say_metric(figure["metric"]) for figure in here)
        said = [f"No: as in the first {counted(pipeline['reference'], 'capture')} ({names})"]
    learning = say_learning(figures, pipeline["reference"])
    said += [learning] if known or not learning else [f"Not known yet: {learning}"]
    rows = [("Is it worse?", "; ".join(filter(None, said)) + ".")]
    if worse:
        first = min(worse, key=lambda figure: figure["since_s"])
        rows.append(("Since when?", show_time(first["since_s"])))
        causes = max((figure["causes"] for figure in worse), key=len)
        grown = "; ".join(map(say_cause, causes[:3]))
        rows.append(("Which cause grew?", grown or "None: see the report."))
    rows.append(("What would plan do now?", _plan(latest).strip() or "No plan was made."))
    return f"<dl>{''.join(f'<dt>{asked}</dt><dd>{said}</dd>' for asked, said in rows)}</dl>"


def _change(figure: Mapping[str, Any]) -> str:
    """Say where a metric was and is."""
    metric, was, now = figure["metric"], figure["reference"], figure["recent"]
    shift = "" if metric == "bubble_fraction" or not was else f" ({show_change(now / was - 1)})"
    where = f" at {say_bucket(figure['context_bucket'])}" if figure["context_bucket"] else ""
    went = f"{show_metric(metric, was)} → {show_metric(metric, now)}"
    return f"{say_metric(metric)}{where} {went}{shift}"


def _latest(pipeline: Mapping[str, Any]) -> str:
    latest, counts = pipeline["latest"], pipeline["captures"]
    broken, given_up = counts.get("unreadable", 0), counts.get("given_up", 0)
    tail = f", {broken} unreadable" if broken else ""
    tail += f", {given_up} given up" if given_up else ""
    if latest is None:
        return f"<p>No capture yet{tail}.</p>"
    numbers = latest["numbers"]
    figures = ", ".join(
        f"{say_metric(name)} {show_metric(name, value)}" for name, value in numbers.items()
    )
    link = _link(pipeline["name"], latest)
    said = f"{figures}; {_context(latest)}. <a href='{link}'>Latest report</a>"
    return f"<p>{said}<br><small>{counted(counts.get('stored', 0), 'capture')}{tail}</small></p>"


def _plan(capture: Mapping[str, Any]) -> str:
    """Say what would gain with today's traffic and costs, or why no plan is watched."""
    plan = capture.get("plan")
    if plan is None:
        why = capture.get("no_plan")
        return f" No plan is watched: {escape(why)}." if why else ""
    if not plan["change"]:
        return " By this capture nothing that was tried is sure to gain."
    gain = show_share(plan["gain"])
    return f" By this capture {escape(plan['change'])} would gain {gain} of throughput."


def _context(capture: Mapping[str, Any]) -> str:
    told = {"label": "its label", "server": "the server's histogram", "tokens": "its tokens"}
    bucket = say_bucket(capture.get("context_bucket") or 0)
    by = told.get(capture.get("context_source") or "")
    return f"{bucket} by {by}" if by else bucket


def _row(pipeline: str, capture: Mapping[str, Any]) -> str:
    numbers = capture.get("numbers", {})
    rate = numbers.get("microbatches_per_s")
    cells = [
        escape(str(capture.get("context_bucket") or "–")),
        show_metric("bubble_fraction", numbers.get("bubble_fraction")),
        show_metric("batch_latency_s", numbers.get("batch_latency_s")),
        "–" if rate is None else show_number(rate),
    ]
    if capture["state"] != "stored":
        cells.append(escape(capture["state"]))
    return _cells(pipeline, capture, *cells)


def _given_up(pipeline: str, capture: Mapping[str, Any]) -> str:
    action = f"{_link(pipeline, capture)}/retry"
    form = f"<form method='post' action='{action}'><button>Try again</button></form>"
    return _cells(pipeline, capture, escape(capture.get("problem") or ""), form)


def _cells(pipeline: str, capture: Mapping[str, Any], *cells: str) -> str:
    when = show_time(capture["captured_s"]).removesuffix(" UTC")
    name = f"<a href='{_link(pipeline, capture)}'>{escape(capture['capture'])}</a>"
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in (when, name, *cells))}</tr>"


def _link(pipeline: str, capture: Mapping[str, Any]) -> str:
    return f"/pipelines/{escape(pipeline)}/captures/{int(capture['id'])}"


_Layer = tuple[Sequence[Sequence[float]], str, str]
"""When and what along a line, its colour, and what fills it."""


def _trend(trend: Mapping[str, Any], alerts: Sequence[Mapping[str, Any]]) -> str:
    """Draw one metric in one bucket over time, and what theory says of it."""
    metric, points, theory = trend["metric"], trend["points"], trend.get("theory")
    now = show_metric(metric, points[-1][1])
    caption = f"{_named(trend)}: {now} in the last of {counted(len(points), 'capture')}"
    layers: list[_Layer] = [(points, _LINE, "none")]
    if theory:
        layers.append((theory, _THEORY, "none"))
        caption += f"; {_key(_THEORY, f'theory {show_metric(metric, theory[-1][1])}')}"
    return _figure(trend, caption, layers, alerts)


def _causes(trend: Mapping[str, Any], alerts: Sequence[Mapping[str, Any]]) -> str:
    """Draw what each cause takes of a batch over time, one above the other."""
    times = [at_s for at_s, _ in trend["points"]]
    took = {cause: dict(map(tuple, line)) for cause, line in trend["causes"].items()}
    least = _LEAST_DRAWN * max(sum(line.get(at, 0.0) for line in took.values()) for at in times)
    shown = [cause for cause in Cause if max(took.get(cause, {0: 0.0}).values()) > least]
    layers: list[_Layer] = []
    below = [0.0] * len(times)
    for cause in shown:
        above = [low + took[cause].get(at, 0.0) for low, at in zip(below, times, strict=True)]
        edge = [*zip(times, above, strict=True), *zip(times[::-1], below[::-1], strict=True)]
        layers.append((edge, "none", f"url(#{cause})"))
        below = above
    keys = ", ".join(_key(f"url(#{cause})", CAUSES[cause].word) for cause in shown)
    caption = f"{_named(trend, 'a batch by cause')}, from below: {keys}"
    return _figure(trend, caption, layers, alerts, "".join(map(_pattern, shown)))


def _pattern(cause: Cause) -> str:
    """Draw a tile of a cause as it looks in every picture."""
    look = CAUSES[cause]
    return (
        f"<pattern id='{cause}' width='{TILE}' height='{TILE}' patternUnits='userSpaceOnUse'>"
        f"<rect width='{TILE}' height='{TILE}' fill='{look.colour}'/>"
        f"<path d='{look.hatch}' fill='{cause.about.ink}'/></pattern>"
    )


def _key(fill: str, word: str) -> str:
    size = f"width='{TILE}' height='{TILE}'"
    return f"<svg {size}><rect {size} fill='{fill}'/></svg> {word}"


def _named(trend: Mapping[str, Any], name: str = "") -> str:
    name = escape(name or say_metric(trend["metric"]))
    return f"{name}, {say_bucket(trend['context_bucket'])}" if trend["context_bucket"] else name


def _figure(
    trend: Mapping[str, Any],
    caption: str,
    layers: Sequence[_Layer],
    alerts: Sequence[Mapping[str, Any]],
    patterns: str = "",
) -> str:
    """Draw lines in a frame with its axes, the captures that raised an alert marked."""
    values = [value for points, *_ in layers for _, value in points]
    low, high = min(values), max(values)
    height = (high - low) or abs(high) or 1.0
    first, last = trend["points"][0][0], trend["points"][-1][0]
    span = (last - first) or 1.0
    bottom = _HEIGHT - _BELOW

    def place(at_s: float, value: float) -> tuple[float, float]:
        across = _LEFT + (_WIDTH - _LEFT - _MARGIN) * (at_s - first) / span
        down = bottom - _MARGIN - (bottom - 2 * _MARGIN) * (value - low) / height
        return round(across, 1), round(down, 1)

    drawn = f"<defs>{patterns}</defs>" if patterns else ""
    for points, colour, fill in layers:
        corners = [place(*point) for point in points]
        path = " ".join(f"{x},{y}" for x, y in corners)
        drawn += f"<polyline points='{path}' fill='{fill}' stroke='{colour}' stroke-width='1.5'/>"
        drawn += f"<circle cx='{corners[-1][0]}' cy='{corners[-1][1]}' r='3' fill='{colour}'/>"
    for x, _ in (place(alert["raised_s"], low) for alert in alerts if _concerns(alert, trend)):
        if _LEFT <= x <= _WIDTH:
            drawn += f"<line x1='{x}' x2='{x}' y1='0' y2='{bottom}' stroke='{_ALERT}' "
            drawn += "stroke-dasharray='3 3'/>"
    for value in dict.fromkeys((low, high)):
        said = show_metric(trend["metric"], value)
        drawn += _tick(_LEFT - 6, place(first, value)[1] + 4, said, "end")
    drawn += _tick(_LEFT, _HEIGHT - 4, _clock(first), "start")
    if last > first:
        drawn += _tick(_WIDTH - _MARGIN, _HEIGHT - 4, _clock(last), "end")
    return (
        f"<figure><svg width='{_WIDTH}' height='{_HEIGHT}' role='img' "
        f"aria-label='{_named(trend)}'><rect x='{_LEFT}' width='{_WIDTH - _LEFT}' "
        f"height='{bottom}' fill='none' stroke='{_GRID}'/>{drawn}</svg>"
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _tick(x: float, y: float, words: str, anchor: str) -> str:
    return (
        f"<text x='{x}' y='{y}' text-anchor='{anchor}' font-size='11' fill='{_INK}'>"
        f"{escape(words)}</text>"
    )


def _clock(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%m-%d %H:%M}"


def _concerns(alert: Mapping[str, Any], trend: Mapping[str, Any]) -> bool:
    same = (trend["metric"], trend["context_bucket"] or 0)
    return alert["kind"] == "traffic_moved" or (
        (alert.get("metric"), alert.get("context_bucket")) == same
    )
