"""A file in → what the whole run must know of its ranks; the ranks themselves go into digests.

Who talks to whom, which groups there are, whether steps are marked: a few rows a rank. So a
thousand ranks are told apart on a machine that could not hold ten of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from debubble.timeline.steps import marks_steps
from debubble.trace.columns import Group, Operation, Operators, RankTrace, Table
from debubble.trace.digest import pack_digest
from debubble.trace.digest.place import DigestPlace
from debubble.trace.formats import Format, Recognised
from debubble.trace.reading import Reading, read_file
from debubble.trace.source import Limits
from debubble.trace.summary import RankSummary, summarise

_TableType = TypeVar("_TableType", bound=Table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scout:
    """One rank, seen from afar."""

    light: RankTrace
    summary: RankSummary
    marked: bool
    digest: bytes | None
    """None where the file is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scouted:
    """What came of one file."""

    reading: Reading
    """With light ranks."""
    scouts: tuple[Scout, ...] = ()


def scout_file(known: Recognised, limits: Limits, digests: DigestPlace | None = None) -> Scouted:
    """Read a file and send back little; the rest comes as digests."""
    reading = read_file(known, limits, digests)
    is_digest = known.format is Format.DIGEST
    scouts = tuple(
        Scout(
            light=lighten(trace),
            summary=summarise(trace),
            marked=marks_steps(trace),
            digest=None if is_digest else pack_digest(trace, None),
        )
        for trace in reading.traces
    )
    light = tuple(scout.light for scout in scouts)
    return Scouted(reading=replace(reading, traces=light), scouts=scouts)


def lighten(trace: RankTrace) -> RankTrace:
    """Keep of each table its first row, so that one sees that it has any; of messages who with.

    All messages are kept where a peer is not known: how many those are is told.
    """
    return replace(
        trace,
        names=(),
        threads=(),
        kernels=_first(trace.kernels),
        launches=_first(trace.launches),
        operators=_peers(trace.operators),
        annotations=_first(trace.annotations),
        memory=_first(trace.memory),
        cpu_operators=_first(trace.cpu_operators),
    )


def _peers(operators: Operators) -> Operators:
    posts = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
    unnamed = posts & (operators.peer < 0) & (operators.local_peer >= 0)
    if unnamed.any():
        return _rows(operators, np.flatnonzero(posts))
    keys = np.stack(
        [
            getattr(operators, name)[posts].astype(np.int64)
            for name in ("operation", "peer", "local_peer", "group")
        ]
    )
    _, first = np.unique(keys, axis=1, return_index=True)
    return _rows(operators, np.flatnonzero(posts)[np.sort(first)])


def _first(table: _TableType) -> _TableType:
    return _rows(table, np.arange(min(1, len(table))))


def _rows(table: _TableType, rows: np.ndarray[tuple[int], np.dtype[np.intp]]) -> _TableType:
    columns = {column.name: getattr(table, column.name)[rows] for column in fields(table)}
    return type(table)(**columns)


class Interning:
    """Keeps what thousands of ranks say alike only once: the members of their groups above all."""

    def __init__(self) -> None:
        self._groups: dict[Group, Group] = {}
        self._tuples: dict[tuple[Group, ...], tuple[Group, ...]] = {}

    def intern(self, trace: RankTrace) -> RankTrace:
        """Return the same rank with shared groups."""
        header = replace(trace.header, groups=self._shared(trace.header.groups))
        return replace(trace, header=header, groups=self._shared(trace.groups))

    def _shared(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        one_by_one = tuple(self._groups.setdefault(group, group) for group in groups)
        return self._tuples.setdefault(one_by_one, one_by_one)
