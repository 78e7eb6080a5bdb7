"""A capture, and what was seen before it, in → alerts.

Traffic moved; a bucket of context lengths got slower; the plan is no longer the best.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from debubble import drift
from debubble.report.watch_page import say_bucket, say_metric, show_metric
from debubble.units import counted, show_share
from debubble.watch import mix
from debubble.watch.analyse import Finding
from debubble.watch.config import Drift
from debubble.watch.journal import Alert, Claim, Journal

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
# Times and rates vary by factors, shares by differences.
_BY_FACTORS = frozenset({"batch_latency_s", "microbatches_per_s"})
# A plan counts once so many captures in a row say the same: one may be noise.
_AGREEING = 3
_MIX, _PLAN, TRACKS = "mix", "plan", "drift/"


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
        sides: drift.Sides = "both" if self.settings.sides == "both" else WORSE[metric]
        return drift.Chart(
            sides=sides,
            reference=self.settings.reference,
            rate=self.settings.rate,
            by_factors=metric in _BY_FACTORS,
        )

    def follow(
        self, connection: Connection, claim: Claim, finding: Finding, *, now_s: float
    ) -> list[tuple[str, str]]:
        """Take a capture in; return kind and message of the alerts that it raised."""
        raised: list[tuple[str, str]] = []

        def alert(kind: str, subject: str, data: dict[str, Any]) -> None:
            number = self.journal.raise_alert(
                connection, claim, kind, subject, data, now_s=now_s, targets=self.targets
            )
            if number is not None:
                raised.append((kind, str(data["message"])))

        self._levels(connection, claim.source, finding, alert)
        self._traffic(connection, claim.source, finding, alert)
        self._plan(connection, claim.source, finding, alert)
        return raised

    def _levels(self, connection: Connection, source: str, finding: Finding, alert: Any) -> None:
        for metric, worse in WORSE.items():
            value = finding.metrics.get(metric)
            if value is None or (metric in _BY_FACTORS and value <= 0):
                continue
            chart, name = self.chart(metric), f"{TRACKS}{metric}/{finding.bucket}"
            track = self.journal.state(connection, source, name, drift.Track)
            track = drift.advance(track, value, chart)
            self.journal.remember(connection, source, name, track)
            direction = drift.alarm(track, chart)
            if direction is None or track.centre is None or track.recent is None:
                continue
            before, after = chart.level(track.centre), chart.level(track.recent)
            slower = direction == worse
            if (
                slower
                and metric == "bubble_fraction"
                and self._is_quicker(connection, source, finding.bucket)
            ):
                continue  # ranks wait more, and batches come out sooner: nobody is slower
            data = {
                "metric": metric,
                "context_bucket": finding.bucket,
                "before": before,
                "after": after,
                "message": f"{source}: {say_metric(metric)} at {say_bucket(finding.bucket)} got "
                f"{'worse' if slower else 'better'}, from {show_metric(metric, before)} to "
                f"{show_metric(metric, after)}, with the same context length",
            }
            kind = BUCKET_SLOWER if slower else BUCKET_FASTER
            alert(kind, f"{metric}/{finding.bucket}", data)

    def _is_quicker(self, connection: Connection, source: str, bucket: int) -> bool:
        """Tell whether batches of a bucket take less time, and no fewer come a second."""
        took, now = self._level_of(connection, source, "batch_latency_s", {bucket})
        gave, gives = self._level_of(connection, source, "microbatches_per_s", {bucket})
        if bucket not in took or now[bucket] >= took[bucket]:
            return False
        return bucket not in gave or gives[bucket] >= gave[bucket]

    def _traffic(self, connection: Connection, source: str, finding: Finding, alert: Any) -> None:
        if not finding.counts:
            return
        size = self.settings.reference
        state = self.journal.state(connection, source, _MIX, mix.Mix)
        state = mix.advance(state, finding.counts, size)
        self.journal.remember(connection, source, _MIX, state)
        if not mix.moved(state, size, self.settings.rate):
            return
        before, after = mix.shares(state.reference), mix.shares(state.recent)
        newest = mix.shares(state.recent[-1:])
        old, new = self._level_of(connection, source, "batch_latency_s", {*before, *after})
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
            change = mix.decompose(before, old, after, new)
            data["batch_latency_s"] = {
                "before": change.before,
                "after": change.after,
                "traffic_moved": change.traffic_moved,
                "buckets_slower": change.buckets_slower,
            }
        alert(TRAFFIC_MOVED, "context_length", data)

    def _level_of(
        self, connection: Connection, source: str, metric: str, buckets: set[int]
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Return the level of a metric in each bucket, as it was and as it is."""
        before, after = {}, {}
        chart = self.chart(metric)
        for bucket in buckets:
            name = f"{TRACKS}{metric}/{bucket}"
            track: drift.Track = self.journal.state(connection, source, name, drift.Track)
            if not track.reference:
                continue
            was = fmean(track.reference) if track.centre is None else track.centre
            now = was if track.recent is None else track.recent
            before[bucket], after[bucket] = chart.level(was), chart.level(now)
        return before, after

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
