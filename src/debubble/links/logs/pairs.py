"""Logs in → the hops that they measure, and what they cannot tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from debubble.errors import Code, Gap
from debubble.links.classes import LinkClass
from debubble.links.hop_times import Fit, Hop, fit_line
from debubble.links.judge import Judgement, Past, judge_by_class, judge_time, unknown
from debubble.links.logs.model import (
    CopyLog,
    Log,
    MatrixLog,
    NcclLog,
    NvlinkErrors,
    NvlinkStatus,
)
from debubble.links.wiring import failing_links, inactive_links
from debubble.units import NS_PER_S, show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """Two ranks that sent to each other, both ways at once."""

    file: str
    pair: Hop
    size_bytes: int
    """The largest messages."""
    time_s: float
    fit: Fit | None
    judgement: Judgement

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
    return tuple(found)


def bulk_of(log: NcclLog) -> list[tuple[int, float]]:
    """Return bytes and nanoseconds of each size, the smallest first; host times are no wire."""
    halves = ((row.size_bytes, row.out_of_place) for row in log.rows)
    return sorted(
        (size, half.time_us * 1000)
        for size, half in halves
        if size and half is not None and not half.host_time and half.time_us
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
