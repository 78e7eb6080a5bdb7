"""A capture, and what was seen before it, in → alerts; nothing here reads or writes the store.

Traffic moved; a bucket of context lengths got slower; the plan is no longer the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from debubble.annexes import drift
from debubble.annexes.watch import mix
from debubble.annexes.watch.analyse import Finding, PlannedChange
from debubble.annexes.watch.config import Drift
from debubble.ledger.causes import Cause
from debubble.units import (
    counted,
    show_bytes,
    show_count,
    show_number,
    show_seconds,
    show_share,
)

TRAFFIC_MOVED, BUCKET_SLOWER, PLAN_OUTDATED = KINDS = (
    "traffic_moved",
    "bucket_slower",
    "plan_outdated",
)
# Where each metric goes when things get worse.
WORSE: dict[str, drift.Direction] = {
    "bubble_fraction": "up",
    "batch_latency_s": "up",
    "microbatches_per_s": "down",
}
_METRIC_WORDS = {
    "bubble_fraction": "bubble",
    "batch_latency_s": "batch latency",
    "microbatches_per_s": "throughput",
    "peak_memory_bytes": "peak memory",
}
# A plan counts once so many captures in a row say the same: one may be noise.
_AGREEING = 3


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a pipeline from capture to capture."""

    tracks: dict[str, drift.Track] = {}
    """Of each metric and bucket, by `metric/bucket`."""
    mix: mix.Mix = mix.Mix()
    plans: tuple[str, ...] = ()
    """What the planner said of late."""
    accepted_plan: str | None = None


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """A capture of a pipeline as it stands."""

    id: int
    pipeline: str
    key: str
    """Its first file, with size and time: another one whenever the file is another."""
    state: str
    found_s: float
    attempts: int
    """How often its analysis was begun."""
    files: tuple[str, ...]
    problem: str | None
    finding: Finding | None

    @property
    def name(self) -> str:
        """Its first file, below the folder of its source."""
        return self.key.rsplit(" ", 2)[0]

    @property
    def captured_s(self) -> float:
        """When it was captured; when it was found where nothing tells."""
        return (self.finding and self.finding.captured_s) or self.found_s


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """Something that changed."""

    id: int = 0
    """0 of one that is not stored yet."""
    pipeline: str
    kind: str
    subject: str
    """Until it is acknowledged, there is one alert of a kind and a subject."""
    message: str
    raised_s: float
    """When the capture that raised it was taken."""
    capture_id: int
    acknowledged_s: float | None = None
    data: dict[str, Any]


class CauseShift(msgspec.Struct, frozen=True, kw_only=True):
    """What a cause took of a batch, and takes now."""

    cause: str
    before_s: float
    after_s: float

    def __str__(self) -> str:
        word = next((cause.word for cause in Cause if cause == self.cause), self.cause)
        before, after = show_seconds(self.before_s), show_seconds(self.after_s)
        return f"{word} went from {before} to {after} of a batch"


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a metric of one bucket stands."""

    metric: str
    context_bucket: int
    """0: unknown."""
    state: str
    """learning, steady or worse."""
    reference_captures: int
    reference: float | None
    recent: float | None
    score: float | None
    """1 or more is an alert; None while learning."""
    since_s: float | None
    causes: tuple[CauseShift, ...]
    """What grew most first."""


def judge(
    state: State, capture: Capture, earlier: Sequence[Capture], settings: Drift
) -> tuple[State, list[Alert]]:
    """Take a capture in; return the alerts that are up, whether they were raised before or not."""
    finding = capture.finding
    if finding is None:
        return state, []
    tracks = dict(state.tracks)
    for metric in WORSE:
        if metric in finding.metrics:
            subject = f"{metric}/{finding.bucket}"
            track, value = tracks.get(subject, drift.Track()), finding.metrics[metric]
            chart = _chart(metric, settings)
            tracks[subject] = drift.advance(track, value, chart, capture.captured_s)
    plans = state.plans if finding.plan is None else (*state.plans, finding.plan.change)
    state = replace(
        state,
        tracks=tracks,
        mix=mix.advance(state.mix, finding.requests, settings.reference),
        plans=plans[-_AGREEING:],
    )
    alerts: list[Alert] = []

    def alert(kind: str, subject: str, message: str, data: dict[str, Any]) -> None:
        alerts.append(
            Alert(
                pipeline=capture.pipeline,
                kind=kind,
                subject=subject,
                message=f"{capture.pipeline}: {message}",
                raised_s=capture.captured_s,
                capture_id=capture.id,
                data=data,
            )
        )

    for standing in standings(tracks, (*earlier, capture), settings):
        if standing.state == "worse" and standing.context_bucket == finding.bucket:
            subject = f"{standing.metric}/{standing.context_bucket}"
            alert(BUCKET_SLOWER, subject, _say_slower(standing), asdict(standing))
    if finding.requests and mix.moved(state.mix):
        alert(TRAFFIC_MOVED, "context_length", *_describe_shift(state))
    state, outdated = _settle_plan(state, finding.plan)
    if outdated:
        gain, change = show_share(outdated["throughput_gain"]), outdated["today"]
        words = f"the plan is outdated: {change} would now gain {gain} of throughput"
        alert(PLAN_OUTDATED, "plan", words, outdated)
    return state, alerts


def _settle_plan(state: State, plan: PlannedChange | None) -> tuple[State, dict[str, Any] | None]:
    """Accept the first plan that captures agree on; return what is known of one beside that."""
    if plan is None or len(state.plans) < _AGREEING or len(set(state.plans)) > 1:
        return state, None
    known = state.accepted_plan
    if known is None or not plan.change:
        return replace(state, accepted_plan=plan.change), None
    if plan.change == known:
        return state, None
    return state, {"tuned_for": known, "today": plan.change, "throughput_gain": plan.gain}


def accept(state: State, alert: Alert) -> State:
    """Take what an alert was about as the new normal."""
    if alert.kind == TRAFFIC_MOVED:
        return replace(state, mix=mix.Mix(reference=state.mix.recent))
    if alert.kind == PLAN_OUTDATED:
        return replace(state, plans=(), accepted_plan=str(alert.data["today"]))
    tracks = {subject: track for subject, track in state.tracks.items() if subject != alert.subject}
    return replace(state, tracks=tracks)


def standings(
    tracks: Mapping[str, drift.Track], captures: Sequence[Capture], settings: Drift
) -> tuple[Standing, ...]:
    """Return how each metric of each bucket stands, and why by what captures show."""
    result = []
    for subject, track in sorted(tracks.items()):
        metric, _, number = subject.partition("/")
        bucket, chart = int(number), _chart(metric, settings)
        state = "learning" if track.level is None else "steady"
        if drift.is_alarm(track, chart):
            # Ranks wait more, and batches come out sooner: nobody is slower.
            waits_more = metric == "bubble_fraction" and _is_quicker(tracks, bucket)
            state = "steady" if waits_more else "worse"
        since_s = track.moving.since if state == "worse" else None
        result.append(
            Standing(
                metric=metric,
                context_bucket=bucket,
                state=state,
                reference_captures=len(track.reference),
                reference=track.level,
                recent=track.recent,
                score=None if state == "learning" else drift.score(track, chart),
                since_s=since_s,
                causes=() if since_s is None else _shifts(captures, bucket, since_s),
            )
        )
    return tuple(result)


def _chart(metric: str, settings: Drift) -> drift.Chart:
    return drift.Chart(
        worse=WORSE[metric],
        reference=settings.reference,
        min_change=settings.min_change,
        is_share=metric == "bubble_fraction",
    )


def _say_slower(standing: Standing) -> str:
    metric, bucket, since_s = standing.metric, standing.context_bucket, standing.since_s or 0.0
    where = f" of requests {say_bucket(bucket)}" if bucket else ""
    was, now = (show_metric(metric, value) for value in (standing.reference, standing.recent))
    grown = f"; {standing.causes[0]}" if standing.causes else ""
    since = f"since {show_time(since_s)}{grown}"
    return f"{say_metric(metric)}{where} got worse, from {was} to {now}, {since}"


def _describe_shift(state: State) -> tuple[str, dict[str, Any]]:
    """Say which lengths grew most and which fell most, from which share to which."""
    recent = state.mix.recent
    before, after, newest = map(mix.shares, (state.mix.reference, recent, recent[-1:]))
    old, new = _levels_of(state.tracks, "batch_latency_s", {*before, *after})
    data: dict[str, Any] = {"before": before, "after": after, "newest": newest}
    if old or new:
        data["batch_latency_s"] = mix.decompose(before, old, after, new)
    growth = {
        bucket: after.get(bucket, 0.0) - before.get(bucket, 0.0) for bucket in {*before, *after}
    }
    most, least = (pick(growth, key=growth.__getitem__) for pick in (max, min))
    shifts = [
        f"{say_bucket(bucket)} went from {show_share(before.get(bucket, 0.0))} to "
        f"{show_share(after.get(bucket, 0.0))}"
        for bucket in (most, least)
    ]
    # Those of late hold captures from before the traffic moved; the newest one does not.
    message = (
        f"{show_share(mix.distance(before, after))} of the requests in "
        f"{counted(len(recent), 'capture')} of late moved to other context lengths: those of "
        f"{', '.join(shifts)}; {show_share(newest.get(most, 0.0))} of the newest capture's are "
        f"{say_bucket(most)}"
    )
    return message, data


def _levels_of(
    tracks: Mapping[str, drift.Track], metric: str, buckets: set[int]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the level of a metric in each bucket, as it was and as it is."""
    before, after = {}, {}
    for bucket in buckets:
        track = tracks.get(f"{metric}/{bucket}")
        if track is not None and track.reference:
            before[bucket] = fmean(track.reference) if track.level is None else track.level
            after[bucket] = before[bucket] if track.recent is None else track.recent
    return before, after


def _is_quicker(tracks: Mapping[str, drift.Track], bucket: int) -> bool:
    """Tell whether batches of a bucket take less time, and no fewer come a second."""
    took, takes = _levels_of(tracks, "batch_latency_s", {bucket})
    gave, gives = _levels_of(tracks, "microbatches_per_s", {bucket})
    quicker = bool(took) and takes[bucket] < took[bucket]
    return quicker and (not gave or gives[bucket] >= gave[bucket])


def _shifts(captures: Sequence[Capture], bucket: int, since_s: float) -> tuple[CauseShift, ...]:
    """Return which causes took less of a batch before a time than since."""
    known = [(capture.captured_s, capture.finding) for capture in captures]
    sides = [
        [
            {cause: share * (finding.batch_s or 0.0) for cause, share in finding.causes.items()}
            for at_s, finding in known
            if finding is not None and finding.bucket == bucket and (at_s >= since_s) == is_after
        ]
        for is_after in (False, True)
    ]
    if not all(sides):
        return ()
    shifts = []
    for cause in {cause for side in sides for took in side for cause in took}:
        before_s, after_s = (median(took.get(cause, 0.0) for took in side) for side in sides)
        if after_s > before_s:
            shifts.append(CauseShift(cause=cause, before_s=before_s, after_s=after_s))
    return tuple(sorted(shifts, key=lambda shift: shift.before_s - shift.after_s))


def say_metric(metric: str) -> str:
    """Name a metric."""
    return _METRIC_WORDS[metric]


def say_bucket(bucket: int) -> str:
    """Name a bucket of context lengths; 0 is one that nothing tells."""
    return f"up to {show_count(bucket)} tokens" if bucket else "an unknown context length"


def show_metric(metric: str, value: float | None) -> str:
    """Write a value of a metric with its unit."""
    if value is None:
        return "–"
    shown = {"bubble_fraction": show_share, "batch_latency_s": show_seconds,
             "peak_memory_bytes": show_bytes}.get(metric)  # fmt: skip
    return shown(value) if shown else f"{show_number(value)} microbatches/s"


def show_time(at_s: float) -> str:
    """Write a moment."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
