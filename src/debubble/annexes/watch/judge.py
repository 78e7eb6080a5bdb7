"""A capture, and what was seen before it, in → alerts.

Traffic moved; a bucket of context lengths got slower; the plan is no longer the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from debubble.annexes import drift
from debubble.annexes.watch import mix
from debubble.annexes.watch.analyse import CAUSE, Finding
from debubble.annexes.watch.config import Drift
from debubble.annexes.watch.journal import Alert, Claim, Journal
from debubble.annexes.watch.page import say_bucket, say_cause, say_metric, show_metric, show_time
from debubble.units import counted, show_share

if TYPE_CHECKING:
    from sqlalchemy import Connection

TRAFFIC_MOVED, BUCKET_SLOWER, BUCKET_FASTER, PLAN_OUTDATED = KINDS = (
    "traffic_moved",
    "bucket_slower",
    "bucket_faster",
    "plan_outdated",
)
# Where each metric goes when things get worse.
WORSE: dict[str, drift.Direction] = {
    "bubble_fraction": "up",
    "batch_latency_s": "up",
    "microbatches_per_s": "down",
}
# Captures that are drawn, and that causes are asked of.
LOOKED_BACK = 300
# A plan counts once so many captures in a row say the same: one may be noise.
_AGREEING = 3
_MIX, _PLAN, TRACKS = "mix", "plan", "level/"

Tracks = dict[str, drift.Track]
"""What is remembered of each metric and bucket, by `metric/bucket`."""
Points = Mapping[str, Sequence[tuple[float, int, float]]]
"""By metric: when, which bucket, what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """What the planner said of late, and what is known and accepted."""

    accepted: str | None = None
    recent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Holds each capture against those before it."""

    journal: Journal
    settings: Drift
    targets: tuple[str, ...] = ()

    def chart(self, metric: str) -> drift.Chart:
        """Return how a metric is watched."""
        return drift.Chart(
            sides="both" if self.settings.sides == "both" else WORSE[metric],
            reference=self.settings.reference,
            min_change=self.settings.min_change,
            is_share=metric == "bubble_fraction",
        )

    def follow(
        self, connection: Connection, claim: Claim, finding: Finding
    ) -> list[tuple[str, str]]:
        """Take a capture in; return kind and message of the alerts that it raised."""
        raised: list[tuple[str, str]] = []
        at_s = finding.captured_s or claim.found_s

        def alert(kind: str, subject: str, data: dict[str, Any]) -> None:
            number = self.journal.raise_alert(
                connection, claim, kind, subject, data, at_s=at_s, targets=self.targets
            )
            if number is not None:
                raised.append((kind, str(data["message"])))

        tracks = self.journal.states(claim.source, TRACKS, drift.Track, connection)
        for metric in WORSE:
            value = finding.metrics.get(metric)
            if value is not None:
                subject = f"{metric}/{finding.bucket}"
                track = tracks.get(subject, drift.Track())
                tracks[subject] = drift.advance(track, value, self.chart(metric), at_s)
                name = f"{TRACKS}{subject}"
                self.journal.remember(connection, claim.source, name, tracks[subject])
        self._levels(connection, claim.source, finding.bucket, tracks, alert)
        self._traffic(connection, claim.source, finding, tracks, alert)
        self._plan(connection, claim.source, finding, alert)
        return raised

    def state(self, tracks: Tracks, metric: str, bucket: int) -> str:
        """Say how a figure stands: `learning`, `steady`, `worse` or `better`."""
        track = tracks[f"{metric}/{bucket}"]
        if track.level is None:
            return "learning"
        direction = drift.alarm(track, self.chart(metric))
        if direction is None:
            return "steady"
        if direction != WORSE[metric]:
            return "better"
        # Ranks wait more, and batches come out sooner: nobody is slower.
        waits_more = metric == "bubble_fraction" and _is_quicker(tracks, bucket)
        return "steady" if waits_more else "worse"

    def _levels(
        self, connection: Connection, source: str, bucket: int, tracks: Tracks, alert: Any
    ) -> None:
        for metric in WORSE:
            subject = f"{metric}/{bucket}"
            state = self.state(tracks, metric, bucket) if subject in tracks else ""
            if state not in {"worse", "better"}:
                continue
            track = tracks[subject]
            since_s = track.moving.since or 0.0
            points = self.journal.points(source, most=LOOKED_BACK, connection=connection)
            causes = cause_changes(points, bucket, since_s) if state == "worse" else []
            grown = f"; {say_cause(causes[0])}" if causes else ""
            where = f" of requests {say_bucket(bucket)}" if bucket else ""
            data = {
                "metric": metric,
                "context_bucket": bucket,
                "before": track.level,
                "after": track.recent,
                "since_s": since_s,
                "causes": causes,
                "message": f"{source}: {say_metric(metric)}{where} got {state}, "
                f"from {show_metric(metric, track.level)} to {show_metric(metric, track.recent)}, "
                f"since {show_time(since_s)}{grown}",
            }
            alert(BUCKET_SLOWER if state == "worse" else BUCKET_FASTER, subject, data)

    def _traffic(
        self, connection: Connection, source: str, finding: Finding, tracks: Tracks, alert: Any
    ) -> None:
        if not finding.counts:
            return
        state = self.journal.state(connection, source, _MIX, mix.Mix)
        state = mix.advance(state, finding.counts, self.settings.reference)
        self.journal.remember(connection, source, _MIX, state)
        if not mix.moved(state):
            return
        before, after = mix.shares(state.reference), mix.shares(state.recent)
        newest = mix.shares(state.recent[-1:])
        old, new = _levels_of(tracks, "batch_latency_s", {*before, *after})
        data: dict[str, Any] = {
            "before": {str(bucket): share for bucket, share in before.items()},
            "after": {str(bucket): share for bucket, share in after.items()},
            "captures": len(state.recent),
            "newest": {str(bucket): share for bucket, share in newest.items()},
            "message": f"{source}: {show_share(mix.distance(before, after))} of the requests "
            f"in {counted(len(state.recent), 'capture')} of late moved to other context lengths: "
            f"those of {_say_shift(before, after, newest)}",
        }
        if old or new:
            data["batch_latency_s"] = asdict(mix.decompose(before, old, after, new))
        alert(TRAFFIC_MOVED, "context_length", data)

    def _plan(self, connection: Connection, source: str, finding: Finding, alert: Any) -> None:
        if finding.plan is None:
            return
        change = finding.plan.change
        plans: Plans = self.journal.state(connection, source, _PLAN, Plans)
        plans = replace(plans, recent=(*plans.recent, change)[-_AGREEING:])
        agreed = len(plans.recent) == _AGREEING and set(plans.recent) == {change}
        if agreed and plans.accepted is not None and change and change != plans.accepted:
            data = {
                "tuned_for": plans.accepted,
                "today": change,
                "throughput_gain": finding.plan.gain,
                "message": f"{source}: the plan is outdated: {change} would now gain "
                f"{show_share(finding.plan.gain)} of throughput",
            }
            alert(PLAN_OUTDATED, "plan", data)
        elif agreed:
            plans = replace(plans, accepted=change)
        self.journal.remember(connection, source, _PLAN, plans)

    def accept(self, connection: Connection, alert: Alert) -> None:
        """Take what an alert was about as the new normal."""
        if alert.kind == TRAFFIC_MOVED:
            state = self.journal.state(connection, alert.source, _MIX, mix.Mix)
            moved = replace(mix.Mix(), reference=state.recent)
            self.journal.remember(connection, alert.source, _MIX, moved)
        elif alert.kind == PLAN_OUTDATED:
            plans = Plans(accepted=str(alert.data.get("today", "")))
            self.journal.remember(connection, alert.source, _PLAN, plans)
        else:
            name = f"{TRACKS}{alert.subject}"
            self.journal.remember(connection, alert.source, name, drift.Track())


def _levels_of(
    tracks: Tracks, metric: str, buckets: set[int]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the level of a metric in each bucket, as it was and as it is."""
    before, after = {}, {}
    for bucket in buckets:
        track = tracks.get(f"{metric}/{bucket}")
        if track is not None and track.reference:
            before[bucket] = fmean(track.reference) if track.level is None else track.level
            after[bucket] = before[bucket] if track.recent is None else track.recent
    return before, after


def _is_quicker(tracks: Tracks, bucket: int) -> bool:
    """Tell whether batches of a bucket take less time, and no fewer come a second."""
    took, now = _levels_of(tracks, "batch_latency_s", {bucket})
    gave, gives = _levels_of(tracks, "microbatches_per_s", {bucket})
    quicker = bool(took) and now[bucket] < took[bucket]
    return quicker and (not gave or gives[bucket] >= gave[bucket])


def cause_changes(points: Points, bucket: int, since_s: float) -> list[dict[str, Any]]:
    """Return what each cause took of a batch before a time and since, what grew most first."""
    captures = [at for at, of, _ in points.get("batch_latency_s", ()) if of == bucket]
    before, after = ([at for at in captures if (at >= since_s) == is_after] for is_after in (0, 1))
    if not before or not after:
        return []
    changes: list[dict[str, Any]] = []
    for metric in points:
        if metric.startswith(CAUSE):
            took = {at: value for at, of, value in points[metric] if of == bucket}
            was_s, now_s = (median(took.get(at, 0.0) for at in part) for part in (before, after))
            cause = metric.removeprefix(CAUSE)
            changes.append({"cause": cause, "before_s": was_s, "after_s": now_s})
    grown = [change for change in changes if change["after_s"] > change["before_s"]]
    return sorted(grown, key=lambda change: change["before_s"] - change["after_s"])


def _say_shift(before: mix.Counts, after: mix.Counts, newest: mix.Counts) -> str:
    """Say which lengths grew most and which fell most, from which share to which.

    Those of late hold captures from before the traffic moved; the newest one does not.
    """
    grown = {
        bucket: after.get(bucket, 0.0) - before.get(bucket, 0.0) for bucket in {*before, *after}
    }
    most, least = max(grown, key=lambda one: grown[one]), min(grown, key=lambda one: grown[one])

    def shares(bucket: int) -> str:
        was, now = show_share(before.get(bucket, 0.0)), show_share(after.get(bucket, 0.0))
        return f"{say_bucket(bucket)} went from {was} to {now}"

    now = f"{show_share(newest.get(most, 0.0))} of the newest capture's are {say_bucket(most)}"
    return f"{shares(most)}, {shares(least)}; {now}"
