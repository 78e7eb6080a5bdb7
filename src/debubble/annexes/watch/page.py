"""The journal's views in → the service's page, and its words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from debubble.ledger.causes import Cause
from debubble.report.markup import asset, digest, rect, safe, svg, text
from debubble.report.palette import TILE, cause_rules, hatch_patterns
from debubble.units import (
    counted,
    show_bytes,
    show_change,
    show_count,
    show_number,
    show_seconds,
    show_share,
)

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
    word = Cause(change["cause"]).word if change["cause"] in set(Cause) else "?"
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


_STYLE = asset("watch.css") + cause_rules(Cause)
STYLE_POLICY = f"'{digest(_STYLE)}'"
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
        f"<h1>{safe(pipeline)}: {safe(capture['capture'])}</h1>",
        f"<p>{show_time(capture['captured_s'])}, {safe(capture['state'])}. {_ALL}</p>",
    ]
    if capture.get("problem"):
        parts.append(f"<p class='alert'>{safe(capture['problem'])}</p>")
    if "report" in capture:
        # Sentences wrap, tables do not.
        said, _, tables = capture["report"].partition("\n\n")
        answer, *findings = said.splitlines() or [""]
        context = _context(capture)
        parts.append(f"<p>Of {context}.{_plan(capture)}</p><p><strong>{safe(answer)}</strong></p>")
        items = "".join(f"<li>{safe(line.removeprefix('- '))}</li>" for line in findings)
        parts.append(f"<ul>{items}</ul>" if items else "")
        parts.append(f"<pre>{safe(tables, breaks=True)}</pre>" if tables else "")
    return _document(f"{pipeline}: {capture['capture']}", parts)


def _document(title: str, parts: Sequence[str]) -> str:
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    return (
        f"<!doctype html><html lang='en'><head>{head}<title>{safe(title)}</title>"
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _alert(alert: Mapping[str, Any]) -> str:
    done = alert["acknowledged_s"] is not None
    action = f"/alerts/{int(alert['id'])}/acknowledge"
    form = f"<form method='post' action='{action}'><button>Acknowledge</button></form>"
    words = [f"<strong>{safe(alert['kind'])}</strong> {safe(alert.get('message', ''))}"]
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
    parts = [f"<h2>{safe(pipeline['name'])}</h2>"]
    parts += [f"<p class='alert'>{safe(trouble)}</p>" for trouble in pipeline["troubles"]]
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
        return f" No plan is watched: {safe(why)}." if why else ""
    if not plan["change"]:
        return " By this capture no option is certain to gain."
    gain = show_share(plan["gain"])
    return f" By this capture {safe(plan['change'])} would gain {gain} of throughput."


def _context(capture: Mapping[str, Any]) -> str:
    told = {"label": "its label", "server": "the server's histogram", "tokens": "its tokens"}
    bucket = say_bucket(capture.get("context_bucket") or 0)
    by = told.get(capture.get("context_source") or "")
    return f"{bucket} by {by}" if by else bucket


def _row(pipeline: str, capture: Mapping[str, Any]) -> str:
    numbers = capture.get("numbers", {})
    rate = numbers.get("microbatches_per_s")
    cells = [
        safe(str(capture.get("context_bucket") or "–")),
        show_metric("bubble_fraction", numbers.get("bubble_fraction")),
        show_metric("batch_latency_s", numbers.get("batch_latency_s")),
        "–" if rate is None else show_number(rate),
    ]
    if capture["state"] != "stored":
        cells.append(safe(capture["state"]))
    return _cells(pipeline, capture, *cells)


def _given_up(pipeline: str, capture: Mapping[str, Any]) -> str:
    action = f"{_link(pipeline, capture)}/retry"
    form = f"<form method='post' action='{action}'><button>Try again</button></form>"
    return _cells(pipeline, capture, safe(capture.get("problem") or ""), form)


def _cells(pipeline: str, capture: Mapping[str, Any], *cells: str) -> str:
    when = show_time(capture["captured_s"]).removesuffix(" UTC")
    name = f"<a href='{_link(pipeline, capture)}'>{safe(capture['capture'])}</a>"
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in (when, name, *cells))}</tr>"


def _link(pipeline: str, capture: Mapping[str, Any]) -> str:
    return f"/pipelines/{safe(pipeline)}/captures/{int(capture['id'])}"


_Line = Sequence[Sequence[float]]
"""When, and what."""


def _trend(trend: Mapping[str, Any], alerts: Sequence[Mapping[str, Any]]) -> str:
    """Draw one metric in one bucket over time, and what theory says of it."""
    metric, points, theory = trend["metric"], trend["points"], trend.get("theory")
    now = show_metric(metric, points[-1][1])
    caption = f"{_named(trend)}: {now} in the last of {counted(len(points), 'capture')}"
    lines = {"line": points}
    if theory:
        lines["theory"] = theory
        words = f"theory {show_metric(metric, theory[-1][1])}"
        caption += f"; {_key(rect(0, 0, TILE, TILE, 'theory'), words)}"
    return _figure(trend, caption, alerts, lines=lines)


def _causes(trend: Mapping[str, Any], alerts: Sequence[Mapping[str, Any]]) -> str:
    """Draw what each cause takes of a batch over time, one above the other."""
    times = [at_s for at_s, _ in trend["points"]]
    took = {cause: dict(map(tuple, line)) for cause, line in trend["causes"].items()}
    least = _LEAST_DRAWN * max(sum(line.get(at, 0.0) for line in took.values()) for at in times)
    shown = [cause for cause in Cause if max(took.get(cause, {0: 0.0}).values()) > least]
    areas: dict[Cause, _Line] = {}
    below = [0.0] * len(times)
    for cause in shown:
        above = [low + took[cause].get(at, 0.0) for low, at in zip(below, times, strict=True)]
        edge = [*zip(times, above, strict=True), *zip(times[::-1], below[::-1], strict=True)]
        areas[cause], below = edge, above
    keys = ", ".join(
        _key(rect(0, 0, TILE, TILE, fill=f"url(#h-{cause})"), cause.word) for cause in shown
    )
    caption = f"{_named(trend, 'a batch by cause')}, from below: {keys}"
    return _figure(trend, caption, alerts, areas=areas)


def _key(sign: str, word: str) -> str:
    return f"<svg width='{TILE}' height='{TILE}'>{sign}</svg> {word}"


def _named(trend: Mapping[str, Any], name: str = "") -> str:
    name = safe(name or say_metric(trend["metric"]))
    return f"{name}, {say_bucket(trend['context_bucket'])}" if trend["context_bucket"] else name


def _figure(
    trend: Mapping[str, Any],
    caption: str,
    alerts: Sequence[Mapping[str, Any]],
    *,
    lines: Mapping[str, _Line] = MappingProxyType({}),
    areas: Mapping[Cause, _Line] = MappingProxyType({}),
) -> str:
    """Draw lines or areas in a frame with its axes, the captures that raised an alert marked."""
    values = [value for points in (*lines.values(), *areas.values()) for _, value in points]
    low, high = min(values), max(values)
    height = (high - low) or abs(high) or 1.0
    first, last = trend["points"][0][0], trend["points"][-1][0]
    span = (last - first) or 1.0
    bottom = _HEIGHT - _BELOW

    def place(at_s: float, value: float) -> tuple[float, float]:
        across = _LEFT + (_WIDTH - _LEFT - _MARGIN) * (at_s - first) / span
        down = bottom - _MARGIN - (bottom - 2 * _MARGIN) * (value - low) / height
        return round(across, 1), round(down, 1)

    drawn = rect(_LEFT, 0, _WIDTH - _LEFT, bottom, "frame")
    drawn += f"<defs>{hatch_patterns(areas)}</defs>" if areas else ""
    for cause, points in areas.items():
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
        drawn += f"<polygon points='{path}' fill='url(#h-{cause})'/>"
    for style, points in lines.items():
        corners = [place(*point) for point in points]
        path = " ".join(f"{x},{y}" for x, y in corners)
        end = f"<circle cx='{corners[-1][0]}' cy='{corners[-1][1]}' r='3'/>"
        drawn += f"<g class='{style}'><polyline points='{path}'/>{end}</g>"
    for x, _ in (place(alert["raised_s"], low) for alert in alerts if _concerns(alert, trend)):
        if _LEFT <= x <= _WIDTH:
            drawn += f"<line class='alerted' x1='{x}' x2='{x}' y1='0' y2='{bottom}'/>"
    for value in dict.fromkeys((low, high)):
        words = show_metric(trend["metric"], value)
        drawn += text(_LEFT - 6, place(first, value)[1] + 4, words, anchor="end")
    drawn += text(_LEFT, _HEIGHT - 4, _clock(first))
    if last > first:
        drawn += text(_WIDTH - _MARGIN, _HEIGHT - 4, _clock(last), anchor="end")
    picture = svg(_WIDTH, _HEIGHT, drawn, _named(trend))
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def _clock(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%m-%d %H:%M}"


def _concerns(alert: Mapping[str, Any], trend: Mapping[str, Any]) -> bool:
    same = (trend["metric"], trend["context_bucket"] or 0)
    return alert["kind"] == "traffic_moved" or (
        (alert.get("metric"), alert.get("context_bucket")) == same
    )
