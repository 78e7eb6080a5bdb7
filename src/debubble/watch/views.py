"""The journal in → what the API answers and the page draws: plain data, one shape for both."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from debubble.watch import drift
from debubble.watch.config import Config
from debubble.watch.describe import SCHEMA
from debubble.watch.journal import Alert, CaptureRow, Journal
from debubble.watch.judge import TRACKS, WORSE, Judge

SHOWN_CAPTURES = 20
SHOWN_POINTS = 300
METRICS = ("bubble_fraction", "batch_latency_s", "microbatches_per_s", "peak_memory_bytes")


def pipeline_view(journal: Journal, judge: Judge, name: str) -> dict[str, Any]:
    """Return all that is shown of one pipeline."""
    latest = journal.latest(name)
    return {
        "name": name,
        "captures": journal.outcomes(name),
        "latest": None if latest is None else capture_view(latest, whole=True),
        "recent": [
            capture_view(one, whole=False) for one in journal.captures(name, most=SHOWN_CAPTURES)
        ],
        "trends": trends_view(journal, name),
        "drift": drift_view(journal, judge, name),
    }


def capture_view(row: CaptureRow, *, whole: bool) -> dict[str, Any]:
    """Return one capture; whole, with its report."""
    found = row.finding
    data: dict[str, Any] = {
        "id": row.number,
        "capture": row.key.rsplit(" ", 2)[0],
        "state": row.state,
        "found_s": row.found_s,
        "finished_s": row.finished_s,
        "problem": row.problem,
    }
    if found is None:
        return data
    data |= {
        "context_bucket": found.bucket or None,
        "context_source": found.context_source,
        "requests": {str(bucket): count for bucket, count in found.counts.items()},
        "numbers": found.metrics,
        "schedule": found.schedule,
        "theory_bubble_fraction": found.theory,
        "plan": None if found.plan is None else asdict(found.plan),
        "no_plan": found.no_plan or None,
    }
    if whole:
        data |= {
            "causes": found.causes,
            "stages": [asdict(one) for one in found.stages],
            "hops": [asdict(one) for one in found.hops],
            "warnings": list(found.warnings),
            "report": found.report,
        }
    return data


def trends_view(journal: Journal, name: str) -> list[dict[str, Any]]:
    """Return each metric over time, by context bucket."""
    trends = []
    for metric in METRICS:
        lines: dict[int, list[list[float]]] = {}
        for at_s, bucket, value in journal.points(name, metric, most=SHOWN_POINTS):
            lines.setdefault(bucket, []).append([at_s, value])
        for bucket, points in sorted(lines.items()):
            trends.append({"metric": metric, "context_bucket": bucket or None, "points": points})
    return trends


def drift_view(journal: Journal, judge: Judge, name: str) -> list[dict[str, Any]]:
    """Return how near each watched figure is to an alert."""
    found = []
    for subject, track in sorted(journal.states(name, TRACKS, drift.Track).items()):
        metric, _, bucket = subject.partition("/")
        if metric not in WORSE:
            continue
        chart = judge.chart(metric)
        known = track.centre is not None
        found.append(
            {
                "metric": metric,
                "context_bucket": int(bucket) or None,
                "reference_captures": len(track.reference),
                "reference": chart.level(track.centre) if known else None,
                "recent": chart.level(track.recent) if track.recent is not None else None,
                "score": drift.score(track, chart) if known else None,
            }
        )
    return found


def alert_view(alert: Alert) -> dict[str, Any]:
    """Return one alert."""
    return {
        "id": alert.number,
        "pipeline": alert.source,
        "kind": alert.kind,
        "subject": alert.subject,
        "raised_s": alert.raised_s,
        "capture_id": alert.capture,
        "acknowledged_s": alert.acknowledged_s,
        **alert.data,
    }


def whole_view(config: Config, journal: Journal, judge: Judge) -> dict[str, Any]:
    """Return everything that is shown."""
    return {
        "schema": SCHEMA,
        "pipelines": [pipeline_view(journal, judge, one.name) for one in config.sources],
        "alerts": [alert_view(one) for one in journal.alerts()],
        "open_alerts": [alert_view(one) for one in journal.open_alerts()],
    }
