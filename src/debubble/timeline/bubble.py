"""A rank's busy time in → the bubble of its pipeline, in steps or a stream; what lies outside.

A step has a window, from its first pass to its last. Optimizer, clipping, reductions and data
loading lie outside of it: they are no bubble, and no schedule of the pipeline removes them. Where
batches overlap there is no window per step: it is then the span in which every rank was captured,
and all compute in it counts.

Waits have a shape. Even ones come from the schedule or a steady imbalance; jagged ones from jitter,
hosts or a link that comes and goes. Warm-up and drain, before a rank's first pass and after its
last, do not count there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from debubble.errors import UsageError
from debubble.timeline.model import (
    FEWEST_SAMPLES,
    I32,
    I64,
    MOST_IN_FLIGHT,
    TAIL_PERCENT,
    Flags,
    Intervals,
    Passes,
    PassKind,
    RankTimeline,
    Timeline,
    union_of,
)
from debubble.timeline.turns import Turns
from debubble.timeline.work import Work, host_ranges, names_like, spans_of
from debubble.trace.columns import RankTrace
from debubble.units import NS_PER_S, counted

# Steps of a closed loop follow each other, though a first rank may begin the next one while the
# last weight gradients of the others run. Batches in flight overlap by most of their length.
_OVERLAP_TOLERANCE = 0.2
# Gaps between kernels of one pass are no waits of a pipeline: the shortest pass seen is 1 ms.
_SHORTEST_WAIT_NS = 100_000
# A wait is even if it is within half of its rank's middle wait.
_EVEN_WITHIN = 0.5
# One place stands out if it waits this much more than the ranks do on average.
_STANDS_OUT = 1.5
# Fewer that are seen from end to end tell no turn.
FEWEST_BATCHES = 4
# An instant that is two things at once counts as the first of them.
OPTIMIZER, REDUCTION, CLIPPING, DATA_LOADING = "optimizer", "reduction", "clipping", "data_loading"
OTHER = "other"
_OPTIMIZER = re.compile(r"^Optimizer\.(?:step|zero_grad)#")
_DATA_LOADING = re.compile(r"^enumerate\(DataLoader\)#")
# The operators and kernels of `clip_grad_norm_` and of `GradScaler`, on a CPU and on a GPU. Where a
# step has an optimizer, whatever else comes after its passes is of the kind, too.
_CLIPPING = re.compile(
    r"foreach_norm|vector_norm|LpNorm|foreach_mul_|ScalarTensorFunctor|clamp|clip_grad"
    r"|non_finite|unscale|amp_update_scale",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time of one pipeline: a window of a step, or a stream's; what its ranks did."""

    start_ns: int
    end_ns: int
    bubble_fraction: float
    useful_fraction: float
    apparent_fraction: float

    @property
    def length_ns(self) -> int:
        """Of a step: the batch latency."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Span):
    """One step of one pipeline: from the first pass's start to the last pass's end."""

    step: int
    longest_stage_bubble: float
    """Against the longest single rank's span, as the zero-bubble papers have it."""

    @property
    def bubble_over_ideal(self) -> float:
        """Bubble time over ideal time, as Megatron has it."""
        return self.bubble_fraction / (1 - self.bubble_fraction)


def _fractions(ranks: Sequence[RankTimeline], start_ns: int, end_ns: int) -> dict[str, float]:
    """Return what each definition makes of a stretch of time, over all ranks."""
    whole = len(ranks) * (end_ns - start_ns)

    def share(intervals: Iterable[Intervals]) -> float:
        return sum(ran.inside(start_ns, end_ns) for ran in intervals) / whole

    return {
        "bubble_fraction": 1 - share(rank.occupied for rank in ranks),
        "useful_fraction": share(rank.busy for rank in ranks),
        "apparent_fraction": share(rank.apparent for rank in ranks),
    }


def measure_windows(timeline: Timeline, pipeline: int) -> tuple[Window, ...]:
    """Measure every step in which all captured ranks of the pipeline ran passes.

    None where they are of different runs.
    """
    if pipeline in timeline.mixed:
        return ()
    ranks = timeline.ranks_of(pipeline)
    names = [rank.rank for rank in ranks]
    passes = timeline.passes.where(np.isin(timeline.passes.rank, names))
    windows = []
    for step in timeline.steps:
        here = passes.where(passes.step == step)
        if set(here.rank.tolist()) == set(names):
            windows += _measure(here, ranks, step)
    return tuple(windows)


def _measure(passes: Passes, ranks: Sequence[RankTimeline], step: int) -> list[Window]:
    """Measure one step; nothing where its passes last no time, or hold no work."""
    start, end = int(passes.start_ns.min()), int(passes.end_ns.max())
    spans = []  # of each rank, with what it was occupied of it
    for rank in ranks:
        ran = passes.where(passes.rank == rank.rank)
        first, last = int(ran.start_ns.min()), int(ran.end_ns.max())
        spans.append((last - first, rank.occupied.inside(first, last)))
    longest, occupied = max(spans, key=lambda span: span[0])
    if not any(rank.occupied.inside(start, end) for rank in ranks):
        return []
    return [
        Window(
            step=step,
            start_ns=start,
            end_ns=end,
            longest_stage_bubble=1 - occupied / longest,
            **_fractions(ranks, start, end),
        )
    ]


def steps_overlap(windows: tuple[Window, ...]) -> bool:
    """Tell a stream from a closed loop: a step that begins well before the one before it ends."""
    return any(
        before.end_ns - after.start_ns > _OVERLAP_TOLERANCE * before.length_ns
        for before, after in pairwise(windows)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFigures(Span):
    """One pipeline over the span in which all its ranks were captured."""

    batches_in_flight: float
    """The mean over the span of those that entered the first stage and have no answer yet; where
    no answer is captured, of those that have not left the last stage."""
    most_in_flight: int
    usual_in_flight: int
    """When one has just entered, in the middle: what its driver allows."""
    stated: int | None
    """How many its driver is said to allow."""
    steady: bool
    """Most batches entered with so many in flight."""
    may_be: tuple[int, int | None]
    """How many may be usual, from and to (None: any number): captures may not show which batch of
    one rank is which of the next."""
    hosts_hide_more: bool
    """A broadcast of sampled tokens holds batches up, and no label tells how many wait for it."""
    on_device: int
    """How many are on the devices when the first stage begins one: the others wait in its host."""
    empty_turns: float
    """The share of its scheduler's turns that had no request; 0 where no label tells."""
    turns_out: int | None
    """Turns that the scheduler has out at once, empty ones too; None where no label tells."""
    first_sets_pace: bool
    """Batches enter when the first stage is free, not when one has left: its driver may allow more
    than are ever seen."""
    batch_latency_ns: int | None
    """From the first stage's start to the last stage's end, in the middle."""
    batch_latency_p95_ns: int | None
    batches: int
    """How many were seen from the first stage to the last."""
    batches_per_s: float

    @property
    def in_flight(self) -> float:
        """How many batches the driver keeps in flight: a whole number where it keeps to one."""
        return self.batches_in_flight if self.kept is None else self.kept

    @property
    def kept(self) -> int | None:
        """The number that the driver keeps to, as it is stated or shows; None of none."""
        return self.stated or (self.usual_in_flight if self.steady else None)

    @property
    def sure(self) -> bool:
        """Whether the number in flight can be no other."""
        return self.stated is not None or self.may_be[0] == self.may_be[1]


def is_stream(timeline: Timeline, windows: tuple[Window, ...]) -> bool:
    """Tell whether batches overlap: steps do, or forward passes run on without any step marked."""
    if timeline.steps:
        return steps_overlap(windows)
    return len(timeline.passes) > 0 and bool((timeline.passes.kind == PassKind.F).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batches:
    """The batches of a stream by their numbers, in the order that they are counted in."""

    number: dict[int, int]
    """By microbatch."""
    entered: dict[int, int]
    freed: dict[int, int]
    """When each left the first stage."""
    left: dict[int, int]
    gone: dict[int, int]
    """When the first rank had its answer; where nothing answers it, when it left."""
    everywhere: list[int]
    """Those that were seen on every rank."""


def measure_stream(
    timeline: Timeline, pipeline: int, stated: int | None = None
) -> StreamFigures | None:
    """Measure the span that all ranks of a pipeline share; None where there is none.

    `stated`: how many batches its driver is said to allow, refused where the captures say no.
    """
    ranks = timeline.ranks_of(pipeline)
    span = common_span(ranks)
    if span is None:
        return None
    batches, turns = _batches_of(timeline, ranks), ranks[0].turns
    both = sorted(batches.entered.keys() & batches.left.keys())
    latency = np.array([batches.left[at] - batches.entered[at] for at in both], dtype=np.int64)
    in_flight, lasts, at_entry = _count_in_flight(batches.entered, batches.gone, span)
    usual = on_device = round(float(np.median(list(at_entry.values()) or in_flight[-1:])))
    paced = _first_sets_pace(at_entry, batches)
    turns_out, empty_turns = None, 0.0
    if turns is not None:  # the scheduler sends out what the first host then holds
        taken = zip(turns.number.tolist(), turns.begin_ns.tolist(), strict=True)
        sent_out = {batches.number[at]: begin for at, begin in taken if at in batches.number}
        in_flight, lasts, at_entry = _count_in_flight(sent_out, batches.gone, span)
        usual, paced = round(float(np.median(list(at_entry.values()) or in_flight[-1:]))), False
        turns_out, empty_turns = _turns_out(ranks, batches, span), float(turns.empty.mean())
    if paced:  # how many it would let in does not show: so many at the least
        usual = max(at_entry.values())
    # An asynchronous scheduler is a batch ahead now and then.
    near = [abs(count - usual) <= (turns is not None) for count in at_entry.values()]
    kept = len(near) >= FEWEST_SAMPLES and (paced or sum(near) > len(near) / 2)
    captured = (ranks[0].rank, ranks[-1].rank)
    steady = kept and captured == (ranks[0].members[0], ranks[0].members[-1])
    fewer, more = timeline.unsure.get(pipeline, (0, 0))
    # What waits in hosts for the broadcast of sampled tokens, labels tell alone.
    hidden = turns is None and any(len(rank.meetings) for rank in ranks)
    more = None if hidden else more
    may_be = (max(usual - fewer, 1), None if more is None else usual + more)
    if stated is not None:
        seen = max(at_entry.values(), default=usual) - fewer
        _hold_against(stated, may_be if steady and not paced else (max(seen, 1), None))
    return StreamFigures(
        start_ns=span[0],
        end_ns=span[1],
        **_fractions(ranks, *span),
        batches_in_flight=float((in_flight * lasts).sum() / (span[1] - span[0])),
        most_in_flight=int(in_flight.max(initial=0)),
        usual_in_flight=usual,
        on_device=on_device,
        empty_turns=empty_turns,
        turns_out=turns_out,
        steady=steady,
        stated=stated,
        may_be=may_be,
        hosts_hide_more=hidden,
        first_sets_pace=steady and paced and stated is None,
        batch_latency_ns=round(float(np.median(latency))) if len(latency) else None,
        batch_latency_p95_ns=(
            round(float(np.percentile(latency, TAIL_PERCENT))) if len(latency) else None
        ),
        batches=len(latency),
        batches_per_s=_batches_per_s(
            batches, span, max(usual, len(ranks)) if paced else usual if steady else 1
        ),
    )


def _batches_of(timeline: Timeline, ranks: Sequence[RankTimeline]) -> _Batches:
    names = [rank.rank for rank in ranks]
    passes = timeline.passes
    passes = passes.where(np.isin(passes.rank, names) & (passes.kind == PassKind.F))
    (_, microbatch), row = np.unique(
        np.stack((passes.step, passes.microbatch)), axis=1, return_inverse=True
    )
    row = row.reshape(-1)
    first, last = passes.stage == passes.stage.min(), passes.stage == passes.stage.max()

    def by_batch(rows: Flags, column: I64) -> dict[int, int]:
        return dict(zip(row[rows].tolist(), column[rows].tolist(), strict=True))

    left = by_batch(last, passes.end_ns)
    # The answer to a batch is the last rank's send after it.
    transfers = timeline.transfers
    answers = transfers.where((transfers.source == names[-1]) & (transfers.destination == names[0]))
    sender = np.searchsorted(passes.start_ns[last], answers.send_start_ns, side="right") - 1
    known = sender >= 0
    answered = row[last][sender[known]].tolist()
    gone = dict(zip(answered, answers.receive_end_ns[known].tolist(), strict=True))
    of_rank = np.unique(np.stack((row, passes.rank)), axis=1)[0]
    return _Batches(
        number={batch: at for at, batch in enumerate(microbatch.tolist())},
        entered=by_batch(first, passes.start_ns),
        freed=by_batch(first, passes.end_ns),
        left=left,
        gone=gone or left,
        everywhere=np.flatnonzero(np.bincount(of_rank) == len(ranks)).tolist(),
    )


def _turns_out(
    ranks: Sequence[RankTimeline], batches: _Batches, span: tuple[int, int]
) -> int | None:
    """Return how many turns a scheduler mostly has out when it begins another, empty ones too.

    An empty turn is over when the last rank's host has taken it.
    """
    first, last = ranks[0].turns, ranks[-1].turns
    if first is None or last is None:
        return None

    def keys(turns: Turns) -> list[tuple[int, int]]:
        """Name each turn by the last batch up to it, and how many empty ones followed that."""
        reached = np.maximum.accumulate(turns.number)
        rows = np.arange(len(reached))
        since = rows - np.maximum.accumulate(np.where(turns.empty, 0, rows))
        return list(zip(reached.tolist(), since.tolist(), strict=True))

    gone = {at: batches.gone.get(row) for at, row in batches.number.items()}
    over = {
        key: gone.get(key[0]) if not key[1] else begin
        for key, begin in zip(keys(last), last.begin_ns.tolist(), strict=True)
    }
    begins, out = first.begin_ns.tolist(), []
    for row, moment in enumerate(begins):
        if span[0] <= moment <= span[1]:
            before = [over.get(key) for key in keys(first)[max(row - MOST_IN_FLIGHT, 0) : row]]
            out.append(1 + sum(end is not None and end > moment for end in before))
    return round(float(np.median(out))) if out else None


def _hold_against(stated: int, may_be: tuple[int, int | None]) -> None:
    """Refuse a number in flight that the captures contradict."""
    low, high = may_be
    if low <= stated <= (high or stated):
        return
    shown = f"{low} or more" if high is None else f"{low}" if low == high else f"{low} to {high}"
    raise UsageError(
        f"{counted(stated, 'batch', 'batches')} in flight cannot be: the captures show {shown} "
        "when one enters",
        hint=f"state {shown}, or leave --in-flight-measured out; a server without enough requests "
        "keeps fewer in flight than it may",
    )


def _batches_per_s(batches: _Batches, span: tuple[int, int], filling: int) -> float:
    """Return how many batches leave in a second, of those seen from their entry to their end.

    Where too few are, it is those that leave in the span.
    """
    whole = [batches.left[at] for at in batches.everywhere if batches.entered[at] >= span[0]]
    if len(whole) < FEWEST_BATCHES:
        inside = sum(span[0] <= end <= span[1] for end in batches.left.values())
        return inside * NS_PER_S / (span[1] - span[0])
    return NS_PER_S / turn_of(np.array(whole), min(filling, len(whole) - 1))


def turn_of(ends: I64, filling: int) -> float:
    """Return the time between two batches that leave; those that fill the pipeline do not count."""
    first = max(min(filling, len(ends) // 2), 1)
    return max(float(ends[-1] - ends[first - 1]) / max(len(ends) - first, 1), 1.0)


def common_span(ranks: tuple[RankTimeline, ...]) -> tuple[int, int] | None:
    """Return the span in which every rank was captured; None where there is none."""
    starts = [int(rank.busy.start_ns[0]) for rank in ranks if len(rank.busy.start_ns)]
    ends = [int(rank.busy.end_ns[-1]) for rank in ranks if len(rank.busy.end_ns)]
    if len(starts) < len(ranks) or max(starts) >= min(ends):
        return None
    return max(starts), min(ends)


def _first_sets_pace(at_entry: Mapping[int, int], batches: _Batches) -> bool:
    """Tell whether batches enter as soon as the first stage is free, not when one has left.

    first stage   0000 1111 2222 3333       each as soon as the one before is done:
    last stage         0000 1111 2222       two are in flight, and more may be allowed

    first stage   0000 1111      2222 3333  batch 2 waits until batch 0 has left: two may be
    last stage              0000 1111       in flight, and no more
    """
    waited = []  # for another to leave: it entered sooner after that than after the stage was free
    for batch, count in at_entry.items():
        left, freed = batches.gone.get(batch - count), batches.freed.get(batch - 1)
        if left is not None and freed is not None:
            waited.append(left > freed)
    # With more and more in flight, the first stage runs ahead of the others.
    counts = at_entry.values()
    if len(waited) < FEWEST_SAMPLES or max(counts) - min(counts) >= FEWEST_SAMPLES:
        return False
    return sum(waited) < max(FEWEST_SAMPLES, len(waited) / 4)


def _count_in_flight(
    entered: Mapping[int, int], gone: Mapping[int, int], span: tuple[int, int]
) -> tuple[I64, I64, dict[int, int]]:
    """Count what is in flight through a span: how many, for how long; and when each batch entered.

    While none is gone yet, a driver may still be filling up: no such entry counts.

    Batches keep their order. So those before the first that is seen to enter have entered, those
    before the first that is seen to be gone are gone, and it does not matter where a capture began:

        first rank   7  8  9  ...       nine had entered when batch 8 does,
        last rank          5  6  ...    five were gone: four are in flight
    """
    begins = sorted((moment, 1, batch) for batch, moment in entered.items())
    ends = sorted((moment, 0, batch) for batch, moment in gone.items())
    inside, outside = min(entered, default=0), min(gone, default=0)
    at, counts, lengths = span[0], [], []
    at_entry: dict[int, int] = {}
    any_gone = False
    for moment, kind, batch in sorted([*begins, *ends]):
        if moment > span[1]:
            break
        if moment > span[0]:
            counts.append(inside - outside)
            lengths.append(moment - at)
            at = moment
        inside = batch + 1 if kind else inside
        outside = outside if kind else batch + 1
        any_gone |= not kind
        if kind and moment >= span[0] and any_gone:
            at_entry[batch] = max(inside - outside, 0)
    counts.append(inside - outside)
    lengths.append(span[1] - at)
    return (
        np.maximum(np.array(counts, dtype=np.int64), 0),
        np.array(lengths, dtype=np.int64),
        at_entry,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the waits between a rank's first and last pass look."""

    jagged_fraction: float
    """The share of waiting time that lies in waits unlike the others of their rank."""
    where: str
    """first, last, middle, or everywhere."""
    median_wait_ns: int
    waits: int


def measure_shape(timeline: Timeline, windows: tuple[Window, ...], pipeline: int) -> Shape | None:
    """Describe the waits of a pipeline's steps; None where nobody waits."""
    waits = [_waits(timeline, rank, windows) for rank in timeline.ranks_of(pipeline)]
    idle = [int(mine.sum()) for mine in waits]
    if not sum(idle):
        return None
    jagged = 0
    for mine in waits:
        middle = float(np.median(mine)) if len(mine) else 0.0
        jagged += int(mine[np.abs(mine - middle) > _EVEN_WITHIN * middle].sum())
    worst = int(np.argmax(idle))
    where = "middle"
    if idle[worst] <= _STANDS_OUT * (sum(idle) / len(idle)):
        where = "everywhere"
    elif worst in {0, len(idle) - 1}:
        where = "last" if worst else "first"
    every = np.concatenate(waits)
    return Shape(
        jagged_fraction=jagged / sum(idle),
        where=where,
        median_wait_ns=int(np.median(every)),
        waits=len(every),
    )


def _waits(timeline: Timeline, rank: RankTimeline, windows: tuple[Window, ...]) -> I64:
    found = [np.zeros(0, dtype=np.int64)]
    passes = timeline.passes
    for window in windows:
        mine = (passes.rank == rank.rank) & (passes.step == window.step)
        begin, end = int(passes.start_ns[mine].min()), int(passes.end_ns[mine].max())
        first = np.searchsorted(rank.occupied.end_ns, begin, side="right")
        last = np.searchsorted(rank.occupied.start_ns, end, side="left")
        gaps = rank.occupied.start_ns[first + 1 : last] - rank.occupied.end_ns[first : last - 1]
        found.append(gaps[gaps >= _SHORTEST_WAIT_NS])
    return np.concatenate(found)


def find_outside(
    trace: RankTrace, work: Work, in_pass: Flags, step: I32
) -> tuple[Flags, tuple[tuple[str, Intervals], ...]]:
    """Tell which work is known to be none of the pipeline's, and name what a rank does besides.

    It may run in the window. Not among it are collectives issued while a rank runs its passes,
    gathers of sharded parameters and reductions of gradients, and what follows the passes of a step
    that has no optimizer: torch scales gradients so. Of two names the first wins.
    """
    called = _annotated(trace, _OPTIMIZER)
    optimizes = np.zeros(len(work), dtype=bool)
    if len(called.start_ns):
        row = np.searchsorted(called.start_ns, work.issued_ns, side="right") - 1
        optimizes = ~in_pass & (row >= 0) & (work.issued_ns < called.end_ns[row])
    among, after = np.zeros(len(work), dtype=bool), np.zeros(len(work), dtype=bool)
    rows = np.arange(len(work))
    for number in np.unique(step[in_pass & (step >= 0)]).tolist():
        here = step == number
        mine = np.flatnonzero(in_pass & here)
        among |= (rows >= mine[0]) & (rows <= mine[-1])
        if optimizes[here].any():
            after |= here & (rows > mine[-1])
    reduces = work.collective & ~in_pass & ~among & ~optimizes
    clips = ~in_pass & (names_like(trace, _CLIPPING)[work.name] | after) & ~optimizes & ~reduces
    kinds = ((OPTIMIZER, optimizes), (REDUCTION, reduces), (CLIPPING, clips))
    found = {name: work.union(flags) for name, flags in kinds}
    if not len(trace.kernels):  # where there are kernels, the host's call is no measure of theirs
        ran = found[OPTIMIZER]
        found[OPTIMIZER] = union_of(
            np.concatenate((ran.start_ns, called.start_ns)),
            np.concatenate((ran.end_ns, called.end_ns)),
        )
    found[DATA_LOADING] = _annotated(trace, _DATA_LOADING)
    named = tuple((name, intervals) for name, intervals in found.items() if len(intervals.start_ns))
    return optimizes | reduces | clips, named


def measure_outside(ranks: Sequence[RankTimeline], windows: Sequence[Window]) -> dict[str, int]:
    """Return the mean of each kind over the ranks, the middle of all steps, and the rest; in ns.

    Only between two captured steps: what follows the last one is not captured whole. A rank that
    ends its passes early runs its optimizer inside the window; a mean keeps the sum right.
    """
    lengths: dict[str, list[float]] = {}
    for before, after in pairwise(windows):
        if after.step != before.step + 1 or after.start_ns <= before.end_ns:
            continue
        cuts = [_cut(rank, before.end_ns, after.start_ns) for rank in ranks]
        for name in dict.fromkeys(name for cut in cuts for name in cut):
            lengths.setdefault(name, []).append(fmean(cut.get(name, 0) for cut in cuts))
    return {name: round(median(all_of)) for name, all_of in lengths.items() if any(all_of)}


def measure_side_work(ranks: Sequence[RankTimeline], windows: Sequence[Span]) -> dict[str, float]:
    """Return the share of the windows, on the mean of all ranks, in which each kind ran."""
    whole = len(ranks) * sum(window.end_ns - window.start_ns for window in windows)
    ran: dict[str, int] = {}
    for rank in ranks:
        for name, intervals in rank.side_work:
            inside = sum(intervals.inside(window.start_ns, window.end_ns) for window in windows)
            ran[name] = ran.get(name, 0) + inside
    return {name: length / whole for name, length in sorted(ran.items()) if length}


def _cut(rank: RankTimeline, begin: int, end: int) -> dict[str, int]:
    """Divide one stretch of one rank; the parts add up to it."""
    covered = 0
    parts = {}
    starts, ends = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    known = (OPTIMIZER, REDUCTION, CLIPPING, DATA_LOADING)
    for name in dict.fromkeys((*known, *(kind for kind, _ in rank.outside))):
        for kind, intervals in rank.outside:
            if kind == name:
                starts = np.concatenate((starts, intervals.start_ns))
                ends = np.concatenate((ends, intervals.end_ns))
        reach = union_of(starts, ends).inside(begin, end)
        parts[name] = reach - covered
        covered = reach
    return {**parts, OTHER: end - begin - covered}


def _annotated(trace: RankTrace, pattern: re.Pattern[str]) -> Intervals:
    return spans_of(trace.annotations, host_ranges(trace, names_like(trace, pattern)))
