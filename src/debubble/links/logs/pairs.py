"""Logs in → the hops that they measure, and what they cannot tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from debubble.errors import Code, Gap
from debubble.links.classes import LinkClass
from debubble.links.expectation import Hop
from debubble.links.hop_times import Fit, fit_line
from debubble.links.judge import SLOW_FOR_ITS_CLASS, Judgement, Past, judge_time, unknown
from debubble.links.logs.model import CopyLog, Log, MatrixLog, NcclLog, NcclRow, NvlinkStatus
from debubble.links.wiring import inactive_links
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
        if not isinstance(log, NcclLog) or log.pair is None:
            continue
        rows = bulk_of(log)
        if rows:
            last = rows[-1]
            time_s = last[1] / NS_PER_S
            found.append(
                PairResult(
                    file=log.file,
                    pair=log.pair,
                    size_bytes=last[0],
                    time_s=time_s,
                    fit=fit_line([size for size, _ in rows], [time for _, time in rows]),
                    judgement=_judge(last, classes.get(log.pair), history, log.pair),
                )
            )
    return tuple(found)


def bulk_of(log: NcclLog) -> list[tuple[int, float]]:
    """Return bytes and nanoseconds of each size, the smallest first; host times are no wire."""
    return sorted(
        (row.size_bytes, time) for row in log.rows if (time := _time_of(row)) and row.size_bytes
    )


def _time_of(row: NcclRow) -> float | None:
    half = row.out_of_place
    return None if half is None or half.host_time else half.time_us * 1000


def _judge(
    last: tuple[int, float], wire: LinkClass | None, history: Mapping[Hop, Past], pair: Hop
) -> Judgement:
    size, time = last
    past = history.get(pair)
    before = past.time_ns(size) if past else None
    if before is not None:
        return judge_time(time, before, "history")
    if wire is not None:
        expected = size / wire.bytes_per_s * NS_PER_S
        return judge_time(time, expected, "class", limit=SLOW_FOR_ITS_CLASS)
    if history:
        hop = f"hop {pair[0]} → {pair[1]} with messages of {show_bytes(size)}"
        return unknown(f"the history has nothing of {hop}, and there is no --class")
    return unknown("no history and no --class to hold it against")


def doubts_about(logs: Sequence[Log]) -> tuple[Gap, ...]:
    """Say what must not be read into logs."""
    gaps: list[Gap] = []
    for log in logs:
        if isinstance(log, NcclLog):
            gaps += _doubts(log)
        elif isinstance(log, NvlinkStatus):
            gaps += inactive_links(log)
        if _by_copy_engine(log):
            gaps.append(
                Gap(
                    code=Code.COPY_ENGINE,
                    message="figures of copy engines; NCCL sends with kernels, and is slower",
                    hint="hold NCCL's figures against those of kernels (_sm), or its own",
                    file=log.file,
                )
            )
        if isinstance(log, MatrixLog) and log.cut:
            gaps.append(
                Gap(
                    code=Code.LOG_CUT,
                    message=f"{log.cut}: tests may be missing",
                    hint="give the whole log, or run it again and write it with -j",
                    file=log.file,
                )
            )
    return tuple(gaps)


def _by_copy_engine(log: Log) -> bool:
    if isinstance(log, MatrixLog):
        return any(test.by_copy_engine and test.cells for test in log.tests)
    return isinstance(log, CopyLog) and any("by_dma" in name for name, _ in log.rates_gb_s)


def _doubts(log: NcclLog) -> list[Gap]:
    gaps = []
    if log.is_send_and_receive and len(log.ranks) > 2:
        gaps.append(
            Gap(
                code=Code.RING_NAMES_NO_HOP,
                message=f"{len(log.ranks)} ranks send in a ring, as fast as its slowest hop: which"
                " hop that is cannot be told",
                hint="run it on two ranks at a time, or torchrun … -m debubble.links",
                file=log.file,
            )
        )
    halves = [half for row in log.rows for half in (row.out_of_place, row.in_place) if half]
    if any(half.host_time for half in halves):
        gaps.append(
            Gap(
                code=Code.HOST_TIMES,
                message="times are the host's (-C 1): they tell no bandwidth",
                hint="run it again without -C",
                file=log.file,
            )
        )
    if log.out_of_bounds or any(half.wrong for half in halves):
        gaps.append(
            Gap(
                code=Code.WRONG_VALUES,
                message="data arrived wrong: this link loses or changes what it carries",
                hint="take the machine out of service and check its links",
                file=log.file,
            )
        )
    return gaps
