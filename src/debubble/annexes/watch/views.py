"""The configuration and the journal in → what is shown of them, in sentences and as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from debubble.annexes import drift
from debubble.annexes.watch.analyse import CAUSE, THEORY
from debubble.annexes.watch.config import Config, Source
from debubble.annexes.watch.journal import Alert, CaptureRow, Journal
from debubble.annexes.watch.judge import LOOKED_BACK, TRACKS, WORSE, Judge, Points, cause_changes
from debubble.annexes.watch.page import say_learning
from debubble.trace.digest import BESIDE
from debubble.trace.source import is_url
from debubble.units import counted, show_period, show_share

SCHEMA = "debubble.watch/1"
SHOWN_CAPTURES = 20
METRICS = ("bubble_fraction", "batch_latency_s", "microbatches_per_s", "peak_memory_bytes")


def learning_of(config: Config, journal: Journal | None) -> dict[str, str]:
    """Say of each source how far its references have come; without a journal, nowhere."""
    shown: dict[str, list[dict[str, Any]]] = {source.name: [] for source in config.sources}
    if journal is not None:
        judge = Judge(journal=journal, settings=config.drift)
        shown = {name: drift_view(journal, judge, name, {}) for name in shown}
    return {name: say_learning(of, config.drift.reference) for name, of in shown.items()}


def say_config(config: Config, learning: Mapping[str, str]) -> str:
    """Say in sentences what would be done."""
    listen = config.listen
    guard = "with a token" if listen.token else "without a token: only this machine reaches it"
    lines = [
        (
            f"Would watch {counted(len(config.sources), 'pipeline')} and answer on "
            f"http://{listen.host}:{listen.port}, {guard}."
        ),
        *(
            f"- {source.name}: {'; '.join(filter(None, said))}"
            for source in config.sources
            for said in [(_say_source(source), learning.get(source.name))]
        ),
        (
            f"The first {config.drift.reference} captures of a context length are the reference; "
            f"an alert comes once {drift.STAYS} or more are {show_share(config.drift.min_change)} "
            "worse than those, and beyond their noise."
        ),
    ]
    if config.webhooks:
        lines.append(f"Alerts go to {counted(len(config.webhooks), 'webhook')}.")
    return "\n".join(lines)


def missing_folders(config: Config) -> list[str]:
    """Name sources whose folder is not there (yet): a service waits for it without a word."""
    return [
        f"{source.name}: there is no folder {source.folder}"
        for source in config.sources
        if not is_url(source.folder) and not Path(source.folder).is_dir()
    ]


def _say_source(source: Source) -> str:
    kept = "" if source.keep is None else f", the raw traces of the last {source.keep} kept"
    if source.digests is not None:
        where = "beside them" if source.digests == BESIDE else f"in {source.digests}"
        kept += f", digests of all {where}"
    if source.trigger is None:
        return f"captures that appear in {source.folder}{kept}"
    every = show_period(source.trigger.every_s)
    return f"{source.trigger.url} captured every {every} into {source.folder}{kept}"


def describe_config(config: Config, learning: Mapping[str, str]) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "schema": SCHEMA,
        "listen": {
            "host": config.listen.host,
            "port": config.listen.port,
            "token": config.listen.token is not None,
        },
        "sources": [
            {
                "name": source.name,
                "folder": source.folder,
                "settle_s": source.settle_s,
                "keep": source.keep,
                "digests": source.digests,
                "server": None if source.trigger is None else source.trigger.url,
                "every_s": None if source.trigger is None else source.trigger.every_s,
                "learning": learning.get(source.name) or None,
            }
            for source in config.sources
        ],
        "drift": {
            "reference": config.drift.reference,
            "min_change_fraction": config.drift.min_change,
            "sides": config.drift.sides,
        },
        "webhooks": len(config.webhooks),
    }


def whole_view(
    config: Config, journal: Journal, judge: Judge, troubles: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return everything that is shown; `troubles` are those of each source now."""
    names = [source.name for source in config.sources]
    given_up = journal.given_up(names)
    return {
        "schema": SCHEMA,
        "pipelines": [
            pipeline_view(journal, judge, name)
            | {
                "troubles": list(troubles.get(name, ())),
                "given_up": [
                    capture_view(row, whole=False) for row in given_up if row.source == name
                ],
            }
            for name in names
        ],
        "alerts": [alert_view(alert) for alert in journal.alerts()],
        "open_alerts": [alert_view(alert) for alert in journal.open_alerts()],
    }


def pipeline_view(journal: Journal, judge: Judge, name: str) -> dict[str, Any]:
    """Return all that is shown of one pipeline."""
    latest = journal.latest(name)
    points = journal.points(name, most=LOOKED_BACK)
    return {
        "name": name,
        "captures": journal.outcomes(name),
        # What another version wrote, and this one cannot read, is shown from the next capture on.
        "latest": capture_view(latest, whole=True) if latest and latest.finding else None,
        "recent": [
            capture_view(row, whole=False) for row in journal.captures(name, most=SHOWN_CAPTURES)
        ],
        "trends": trends_view(points),
        "drift": drift_view(journal, judge, name, points),
        "reference": judge.settings.reference,
    }


def capture_view(row: CaptureRow, *, whole: bool) -> dict[str, Any]:
    """Return one capture; whole, with its report."""
    found = row.finding
    data: dict[str, Any] = {
        "id": row.number,
        "capture": row.key.rsplit(" ", 2)[0],
        "state": row.state,
        "captured_s": row.captured_s,
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
            "stages": [asdict(stage) for stage in found.stages],
            "hops": [asdict(hop) for hop in found.hops],
            "warnings": list(found.warnings),
            "report": found.report,
        }
    return data


def trends_view(points: Points) -> list[dict[str, Any]]:
    """Return each metric over time, by context bucket; the bubble with theory and causes."""
    by_bucket: dict[int, dict[str, list[list[float]]]] = {}
    for metric, of_metric in points.items():
        for at_s, bucket, value in of_metric:
            by_bucket.setdefault(bucket, {}).setdefault(metric, []).append([at_s, value])
    trends = []
    for metric in METRICS:
        for bucket, lines in sorted(by_bucket.items()):
            if metric not in lines:
                continue
            trend: dict[str, Any] = {"metric": metric, "context_bucket": bucket or None}
            trend["points"] = lines[metric]
            if metric == "bubble_fraction":
                trend["theory"] = lines.get(THEORY, [])
            if metric == "batch_latency_s":
                trend["causes"] = {
                    name.removeprefix(CAUSE): line
                    for name, line in lines.items()
                    if name.startswith(CAUSE)
                }
            trends.append(trend)
    return trends


def drift_view(journal: Journal, judge: Judge, name: str, points: Points) -> list[dict[str, Any]]:
    """Return how each watched figure stands, and how near it is to an alert."""
    tracks = journal.states(name, TRACKS, drift.Track)
    shown = []
    for subject, track in sorted(tracks.items()):
        metric, _, bucket = subject.partition("/")
        if metric not in WORSE or not bucket.isdecimal():
            continue
        state = judge.state(tracks, metric, int(bucket))
        since_s = track.moving.since if state in {"worse", "better"} else None
        known = track.level is not None
        shown.append(
            {
                "metric": metric,
                "context_bucket": int(bucket) or None,
                "state": state,
                "reference_captures": len(track.reference),
                "reference": track.level,
                "recent": track.recent,
                "score": drift.score(track, judge.chart(metric)) if known else None,
                "since_s": since_s,
                "causes": cause_changes(points, int(bucket), since_s or 0.0),
            }
        )
    return shown


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
