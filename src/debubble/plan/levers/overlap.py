"""The lever of overlap: transfers beside compute, which may slow compute down.

What it does to compute is in the trace only where something overlapped. Else nobody knows: then it
is said so, with the slowdown at which it would no longer pay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from debubble.costs.passes import trailing_activity
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.plan.lever import Lever, Start
from debubble.plan.option import Idea, Option, quick_latency_s, weigh
from debubble.simulate.communication import WAITED
from debubble.simulate.engine import covered_by, covered_ns
from debubble.simulate.predict import mean_lengths
from debubble.timeline.model import F64, Flags, Timeline
from debubble.units import NS_PER_S

# Fewer passes with and without are no comparison.
_FEWEST = 4
# Of a pass, beside messages, for it to count as overlapped; and for it not to.
_SOME, _HARDLY = 0.1, 0.02
# What a moment beside messages costs must be known this well, in moments.
_SURE = 0.1
_TOO_FAR = 2.0
# Beyond this much of a moment, compute all but stands still.
_MOST_LOST = 0.9
# Nobody would try more.
_MOST = 4.0
_TRIED = np.linspace(1.0, _MOST, 13)
# Until slowed passes and the messages beside them agree.
_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What overlap would buy."""

    option: Option
    slowdown: float | None
    """Of compute under transfers, as the trace shows; None where nothing overlapped."""
    break_even: float | None
    """The slowdown at which nothing is gained; None where it gains at any up to 4."""


def consider(baseline: Baseline, timeline: Timeline) -> Overlap | None:
    """Weigh overlap; None where transfers already run beside compute."""
    if baseline.communication not in WAITED:
        return None
    classes = list(_classes(timeline, baseline))
    slowdown = _fit_slowdown(classes)
    lost = 0.0 if slowdown is None else 1 - 1 / slowdown
    worked = sum(float(length.sum()) for length, _ in classes)
    share_beside = sum(float(beside.sum()) for _, beside in classes) / max(worked, 1.0)
    free_share = 1 - lost * share_beside
    option = weigh(
        baseline,
        Idea(
            lever="overlap",
            change=Change(overlap=True),
            assumptions=(say_slowdown(slowdown),),
            slowdown=slowdown or 1.0,
            free_share=free_share,
        ),
    )
    return Overlap(option=option, slowdown=slowdown, break_even=_break_even(baseline, free_share))


def say_slowdown(slowdown: float | None) -> str:
    """Say what is known of compute under transfers."""
    if slowdown is None:
        return "nothing overlaps in this run: what it does to compute is unknown, try it"
    return f"compute takes {slowdown:.2f} times as long beside messages, as seen in this run"


def measure_slowdown(timeline: Timeline, baseline: Baseline) -> float | None:
    """Return how many times as long compute takes beside messages; None where that is not seen."""
    return _fit_slowdown(list(_classes(timeline, baseline)))


def _fit_slowdown(classes: list[tuple[F64, F64]]) -> float | None:
    """Fit what a moment beside messages costs a pass: passes of one class, more and less covered.

    Of a moment beside messages 1 - 1 / slowdown is lost. None where too few passes differ in it,
    or where they do not tell.
    """
    lengths, covered, freedom = [], [], -1
    for length, beside in classes:
        share = beside / np.maximum(length, 1.0)
        if min((share > _SOME).sum(), (share < _HARDLY).sum()) >= _FEWEST:
            lengths.append(length - length.mean())
            covered.append(beside - beside.mean())
            freedom += len(length) - 1
    if not lengths:
        return None
    y, x = np.concatenate(lengths), np.concatenate(covered)
    lost = float(x @ y) / float(x @ x)
    rest = y - lost * x
    unsure = float(np.sqrt(rest @ rest / max(freedom, 1) / (x @ x)))
    if unsure > _SURE or lost < -_TOO_FAR * unsure:
        return None  # compute is not quicker beside messages: something else is at work
    return 1 / (1 - min(max(lost, 0.0), _MOST_LOST))


def _classes(timeline: Timeline, baseline: Baseline) -> Iterator[tuple[F64, F64]]:
    """Yield the passes of each stage and kind: how long they are, and how long beside messages."""
    transfers = timeline.transfers
    begun = np.maximum(transfers.send_start_ns, transfers.receive_start_ns)
    for rank in baseline.ranks:
        touches = (transfers.source == rank.rank) | (transfers.destination == rank.rank)
        mine = timeline.passes.where(
            (timeline.passes.rank == rank.rank) & (timeline.passes.microbatch > 0)
        )
        length = (mine.end_ns - mine.start_ns) * _alone(timeline, baseline, rank.rank)
        beside = covered_by(
            mine.start_ns, mine.end_ns, begun[touches], transfers.receive_end_ns[touches]
        )
        for stage, kind in sorted(set(zip(mine.stage.tolist(), mine.kind.tolist(), strict=True))):
            alike: Flags = (mine.stage == stage) & (mine.kind == kind)
            yield length[alike], beside[alike]


def _alone(timeline: Timeline, baseline: Baseline, rank: int) -> F64:
    """Return what each pass of a rank would take, against now, with all ranks at rest.

    Where ranks share a device they slow each other; that must not be laid on messages.
    """
    passes, slope = timeline.passes, baseline.source.passes.slope
    mine = (passes.rank == rank) & (passes.microbatch > 0)
    factors = np.ones(int(mine.sum()))
    if slope:
        members = np.isin(passes.rank, [member.rank for member in baseline.ranks])
        for step in np.unique(passes.step).tolist():
            here = members & (passes.step == step)
            activity = trailing_activity(passes.start_ns[here], passes.end_ns[here])
            factors[passes.step[mine] == step] = np.exp(-slope * activity[mine[here]])
    return factors


def _break_even(baseline: Baseline, free_share: float) -> float | None:
    """Return the slowdown beside messages at which overlap gains nothing, by means alone.

    `free_share` is what passes would take, against now, if no message had been beside them.
    """
    change = Change(overlap=True)
    engine = baseline.engine(change)
    lengths = mean_lengths(engine.program, baseline.source, baseline.what_if(change))
    alone = lengths.passes[:, None] * np.full(len(_TRIED), free_share)
    beside = np.zeros_like(alone)
    for _ in range(_ROUNDS):
        times = engine.run(replace(lengths, passes=np.rint(alone + beside).astype(np.int64)))
        beside = (1 - 1 / _TRIED) * covered_ns(engine.program, times)
    latencies: F64 = times.window_ns * baseline.correction / NS_PER_S
    gained = quick_latency_s(baseline, Change()) - latencies
    lost = np.flatnonzero(gained <= 0)
    if not len(lost):
        return None
    first = int(lost[0])
    if first == 0:
        return 1.0
    before, after = gained[first - 1], gained[first]
    step = _TRIED[first] - _TRIED[first - 1]
    return float(_TRIED[first - 1] + step * before / (before - after))


def ideas(start: Start) -> Iterator[Overlap]:
    """Yield overlap, weighed, where there is none yet."""
    found = consider(start.baseline, start.timeline)
    if found is not None:
        yield found


def words(change: Change) -> str:
    """Say whether transfers run beside compute."""
    if change.overlap is None:
        return ""
    return "transfers beside compute" if change.overlap else "no overlap"


LEVER = Lever(key="overlap", position=50, ideas=ideas, words=words, probe=Change(overlap=True))
