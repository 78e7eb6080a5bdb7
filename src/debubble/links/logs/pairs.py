"""Logs in → the hops that they measure, and what they cannot tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from debubble.errors import Code, Gap
from debubble.links.hop_times import (
    FEWEST,
    NEARLY_ALL,
    Fit,
    Hop,
    Judgement,
    LinkClass,
    Past,
    decide,
    fit_line,
    judge_by_class,
    judge_ratio,
    judge_time,
    middle_of_others,
    unknown,
)
from debubble.links.logs.model import (
    CopyLog,
    CounterLog,
    Log,
    MatrixLog,
    MessageLog,
    NcclLog,
    NvlinkErrors,
    NvlinkStatus,
)
from debubble.links.wiring import failing_links, inactive_links, rising_counters
from debubble.simulate.costs.wire_pools import SLOW
from debubble.timeline.model import F64
from debubble.units import NS_PER_S, show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """Two ranks that sent to each other, both ways at once; of a job's messages, one way."""

    file: str
    pair: Hop
    size_bytes: int
    """The largest messages."""
    time_s: float
    fit: Fit | None
    judgement: Judgement
    both_ways: bool = True

    @property
    def bytes_per_s(self) -> float:
        """Of one direction."""
        return self.size_bytes / self.time_s


def pairs_in(
    logs: Sequence[Log],
    *,
    classes: Mapping[Hop, LinkClass],
    history: Mapping[Hop, Past],
) -> tuple[PairResult, ...]:
    """Return what logs tell of single hops: tests of two ranks that were timed on their devices."""
    found = []
    for log in logs:
        if not isinstance(log, NcclLog) or log.pair is None or not (rows := bulk_of(log)):
            continue
        size, time_ns = rows[-1]
        found.append(
            PairResult(
                file=log.file,
                pair=log.pair,
                size_bytes=size,
                time_s=time_ns / NS_PER_S,
                fit=fit_line([size for size, _ in rows], [time for _, time in rows]),
                judgement=_judge(size, time_ns, classes.get(log.pair), history, log.pair),
            )
        )
    messages = [log for log in logs if isinstance(log, MessageLog)]
    return (*found, *_message_hops(messages, classes=classes, history=history))


def _message_hops(
    logs: Sequence[MessageLog],
    *,
    classes: Mapping[Hop, LinkClass],
    history: Mapping[Hop, Past],
) -> list[PairResult]:
    """Return every hop of a job's messages, by the largest size that it often has.

    Held against its own past and its kind of wire as tests are, and against the other hops of the
    job that have messages as large.
    """
    took: dict[Hop, dict[int, F64]] = {}
    files: dict[Hop, str] = {}
    for log in logs:
        files |= {message.hop: log.file for message in log.messages}
    for hop in files:
        of_hop = [message for log in logs for message in log.messages if message.hop == hop]
        # What is timed together is as long as the longest of it: only where there is nothing else.
        alone = [message for message in of_hop if message.alone]
        of_hop = alone if len(alone) >= FEWEST else of_hop
        for size in {message.size_bytes for message in of_hop if message.size_bytes}:
            sides = [
                [m.time_ns for m in of_hop if m.size_bytes == size and m.sent == sent]
                for sent in (True, False)
            ]
            both = all(sides)
            # Recorders keep the last calls: the last of both sides are one message.
            count = min(map(len, sides)) if both else max(map(len, sides))
            lengths = np.array([side[-count:] for side in sides if side])
            if count >= FEWEST:
                took.setdefault(hop, {})[size] = lengths.min(axis=0)
    results = []
    for hop, sizes in sorted(took.items()):
        size = max(sizes)
        middle = float(np.median(sizes[size]))
        alike = sorted(float(np.median(other[size])) for other in took.values() if size in other)
        peers = middle_of_others(alike, middle)
        found: list[Judgement | None] = []
        if hop in history or hop in classes:
            found.append(_judge(size, middle, classes.get(hop), history, hop))
        if peers:
            ratios = sizes[size] / peers
            slow = bool(np.quantile(ratios, NEARLY_ALL) > SLOW)
            found.append(judge_ratio(float(np.median(ratios)), slow=slow, against="peers"))
        rungs = sorted((of, float(np.median(times))) for of, times in sizes.items())
        results.append(
            PairResult(
                file=files[hop],
                pair=hop,
                size_bytes=size,
                time_s=middle / NS_PER_S,
                fit=fit_line([of for of, _ in rungs], [time for _, time in rungs]),
                judgement=decide(found),
                both_ways=False,
            )
        )
    return results


def bulk_of(log: NcclLog) -> list[tuple[int, float]]:
    """Return bytes and nanoseconds of each size, the smallest first; host times are no wire."""
    halves = ((row.bytes, row.out_of_place) for row in log.rows)
    return sorted(
        (size, half.time_s * NS_PER_S)
        for size, half in halves
        if size and half is not None and not half.host_time and half.time_s
    )


def _judge(
    size: int, time_ns: float, wire: LinkClass | None, history: Mapping[Hop, Past], pair: Hop
) -> Judgement:
    past = history.get(pair)
    before = past.time_ns(size) if past else None
    if before is not None:
        return judge_time(time_ns, before, "history")
    if wire is not None:
        return judge_by_class(time_ns, size, wire)
    if history:
        hop = f"hop {pair[0]} → {pair[1]} with messages of {show_bytes(size)}"
        return unknown(f"the history has nothing of {hop}, and there is no --class")
    return unknown("no history and no --class to hold it against")


def doubts_about(logs: Sequence[Log]) -> tuple[Gap, ...]:
    """Say what must not be read into logs."""
    gaps: list[Gap] = []
    for log in logs:
        if isinstance(log, NvlinkStatus):
            gaps += inactive_links(log)
        if isinstance(log, NvlinkErrors):
            gaps += failing_links(log)
        if isinstance(log, CounterLog):
            gaps += rising_counters(log)
        for code, message, hint in _doubts(log):
            gaps.append(Gap(code=code, message=message, hint=hint, file=log.file))
    return tuple(gaps)


def _doubts(log: Log) -> Iterator[tuple[Code, str, str]]:
    """Yield a warning's code, its message, and what to do about it."""
    if isinstance(log, NcclLog):
        if log.is_send_and_receive and len(log.ranks) > 2:
            ring = f"{len(log.ranks)} ranks send in a ring, as fast as its slowest hop"
            yield (
                Code.RING_NAMES_NO_HOP,
                f"{ring}: which hop that is cannot be told",
                "run it on two ranks at a time, or torchrun … -m debubble.links",
            )
        if any(half.host_time for half in log.halves):
            yield (
                Code.HOST_TIMES,
                "times are the host's (-C 1): they tell no bandwidth",
                "run it again without -C",
            )
        if log.out_of_bounds or any(half.wrong for half in log.halves):
            yield (
                Code.WRONG_VALUES,
                "data arrived wrong: this link loses or changes what it carries",
                "take the machine out of service and check its links",
            )
    if isinstance(log, MatrixLog | CopyLog) and log.by_copy_engine:
        yield (
            Code.COPY_ENGINE,
            "figures of copy engines; NCCL sends with kernels, and is slower",
            "hold NCCL's figures against those of kernels (_sm), or its own",
        )
    if isinstance(log, MatrixLog) and log.cut:
        yield (
            Code.LOG_CUT,
            f"{log.cut}: tests may be missing",
            "give the whole log, or run it again and write it with -j",
        )
