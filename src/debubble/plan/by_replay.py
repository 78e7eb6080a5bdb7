"""A run that its own simulation misses → what its replay prices all the same, and where it misses.

The replay moves what was measured and models nothing: it lands on the run where the simulation does
not. What it can put right (hops, hosts, devices, unequal stages) it prices. And it tells what the
simulation has wrong: the measured step is replayed with the simulated lengths of one thing at a
time, and its window moves by what the simulation misses there:

    as measured                                  250 ms
    with the simulated messages of hop 1 → 2     290 ms    40 ms of the error are of that hop
    with the simulated passes of stage 3         247 ms    -3 ms
    the simulation                               299 ms    the rest is in what waits for what
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import hypot
from statistics import median

import numpy as np

from debubble.ledger.causes import Cause
from debubble.ledger.hop_health import LinkHealth, repaired_together
from debubble.ledger.ledger import Ledger
from debubble.ledger.savings import Remedies
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.plan.option import Idea, Option, headroom_after
from debubble.simulate.events import NEVER_NS
from debubble.simulate.lengths import hop_of
from debubble.simulate.predict import FOUR_OF_FIVE, SPREAD, predict
from debubble.simulate.program import Lengths
from debubble.timeline.model import I64, Flags, PassKind
from debubble.units import NS_PER_S

# What somebody can put right, whatever the schedule.
_CURES = (Cause.WORKER, Cause.DATA, Cause.IMBALANCE, Cause.HOST, Cause.HOST_SYNC)
# Enough for the means of lengths.
_DRAWS = 12


def replayed_options(
    baseline: Baseline, ledger: Ledger | None, links: LinkHealth | None
) -> list[Option]:
    """Return what the replay prices: repaired hops, and what else can be put right."""
    if ledger is None or not ledger.replays:
        return []
    slow = [hop.hop for hop in links.slow] if links else []
    saved = [
        (Idea(lever="link", change=Change(repaired=hops)), links.cost_of(hops))
        for hops in repaired_together(slow)
        if links is not None
    ]
    for cause in _CURES:
        saving = ledger.saving_of(cause)
        if saving is not None:
            change = Change(by_hand=cause.about.remedied)
            saved.append((Idea(lever=str(cause), change=change), saving.saved_ns))
    return [
        _option(baseline, ledger, idea, saved_ns)
        for idea, saved_ns in saved
        if saved_ns is not None and saved_ns > 0
    ]


def _option(baseline: Baseline, ledger: Ledger, idea: Idea, saved_ns: int) -> Option:
    source, headroom = baseline.source, headroom_after(baseline, Change())
    left = 1 - saved_ns / ledger.job_latency_ns
    wide = hypot(SPREAD, source.window_spread) * FOUR_OF_FIVE
    wide = hypot(wide, ledger.replay_error or 0.0)
    windows = [baseline.window_ns * left * times for times in (1.0, 1 - wide, 1 + wide)]
    now = baseline.window_ns + source.outside_ns
    gains = [now / (window + source.outside_ns) - 1 for window in windows]
    return Option(
        idea=idea,
        window_ns=round(windows[0]),
        low_ns=round(windows[1]),
        high_ns=round(windows[2]),
        bubble_fraction=max(0.0, 1 - (1 - source.bubble_fraction) / left),
        microbatches_per_s=source.microbatches / (windows[0] + source.outside_ns) * NS_PER_S,
        headroom=headroom,
        latency_gain=1 - left,
        throughput_gain=gains[0],
        throughput_low=gains[2],
        throughput_high=gains[1],
        assumptions=(),
        by_replay=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """What the simulation of the run as it is gets wrong in one part of it."""

    of: str
    """`hop 1 → 2`, `stage 3`, `hosts`; empty for what waits for what, and how messages travel."""
    over_ns: int
    """By how much the window would change with the simulated lengths; below 0 they are short."""


def find_misses(baseline: Baseline, ledger: Ledger | None) -> tuple[Miss, ...]:
    """Tell where the simulation misses the run as it is, the largest part first."""
    if ledger is None or not ledger.replays:
        return ()
    same = Change()
    found = predict(
        baseline.source,
        baseline.what_if(same),
        draws=_DRAWS,
        engine=baseline.engine(same),
        same_launch=True,
    )
    program, lengths = found.program, found.lengths
    passes, hops = program.passes, hop_of(program)
    names = [rank.rank for rank in baseline.ranks]
    simulated = _Simulated(
        hops={
            int(hop): {
                name: float(getattr(lengths, name)[hops == hop].mean())
                for name in ("sending", "wire", "drain")
            }
            for hop in np.unique(hops)
        },
        passes={
            (stage, kind): float(lengths.passes[own_saving].mean())
            for stage in np.unique(passes.stage).tolist()
            for kind in PassKind
            if (own_saving := (passes.stage == stage) & (passes.kind == kind)).any()
        },
        pass_gap_ns=round(float(lengths.pass_gaps.mean())),
        batch_gap_ns=round(float(lengths.batch_gaps.mean())),
    )
    moved: dict[str, list[int]] = {}
    for remedies in ledger.remedies:
        parts = dict(simulated.parts_of(remedies, names))
        before, *after = remedies.replay([remedies.step.lengths, *parts.values()])
        for name, window in zip(parts, after, strict=True):
            moved.setdefault(name, []).append(window - before)
    misses = [Miss(of=name, over_ns=round(median(by))) for name, by in moved.items()]
    rest = found.window_ns - baseline.source.window_ns - sum(miss.over_ns for miss in misses)
    misses.append(Miss(of="", over_ns=rest))
    return tuple(sorted(misses, key=lambda miss: -abs(miss.over_ns)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Simulated:
    """What the simulation takes things to last, on the mean."""

    hops: dict[int, dict[str, float]]
    passes: dict[tuple[int, int], float]
    pass_gap_ns: int
    batch_gap_ns: int

    def parts_of(self, remedies: Remedies, names: list[int]) -> Iterator[tuple[str, Lengths]]:
        """Yield the lengths of a measured step with those of one part as they are simulated."""
        lengths, program = remedies.step.lengths, remedies.step.program
        hop, passes = hop_of(program), program.passes
        for number, took in self.hops.items():
            if (hop == number).any():
                changed = {
                    name: _of_mean(getattr(lengths, name), hop == number, mean)
                    for name, mean in took.items()
                }
                here, there = divmod(number, len(names))
                yield f"hop {names[here]} → {names[there]}", replace(lengths, **changed)
        for stage in np.unique(passes.stage).tolist():
            column = lengths.passes
            for kind in PassKind:
                own_saving = (passes.stage == stage) & (passes.kind == kind)
                if (stage, kind) in self.passes:
                    column = _of_mean(column, own_saving, self.passes[stage, kind])
            yield f"stage {stage}", replace(lengths, passes=column)
        hosts = remedies.no_host()
        yield (
            "hosts",
            replace(
                hosts,
                pass_gaps=np.full_like(lengths.pass_gaps, self.pass_gap_ns),
                batch_gaps=np.full_like(lengths.batch_gaps, self.batch_gap_ns),
                sync_tail=np.full_like(lengths.sync_tail, NEVER_NS),
            ),
        )


def _of_mean(column: I64, own_saving: Flags, mean: float) -> I64:
    """Stretch some lengths so that their mean is another: they still vary as they did."""
    now = float(column[own_saving].mean()) if own_saving.any() else 0.0
    times = mean / now if now > 0 else 0.0
    return np.where(own_saving, np.rint(column * times if times else mean), column).astype(np.int64)
