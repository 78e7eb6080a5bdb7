"""What must hold of every answer, however damaged the files were."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from debubble.errors import Gap
from debubble.trace.columns import Header, RankTrace, Table
from debubble.trace.optable import OpTable
from debubble.trace.run import Run


def check_run(run: Run) -> None:
    """Raise AssertionError where an answer contradicts itself or cannot be printed."""
    assert run.ranks or run.tables
    ranks = [trace.rank for trace in run.ranks]
    assert ranks == sorted(set(ranks))
    assert not set(run.missing_ranks) & set(ranks)
    for trace in run.ranks:
        _check_trace(trace)
    for table in run.tables:
        _check_op_table(table)
    check_gaps(run.gaps)


def check_gaps(gaps: tuple[Gap, ...]) -> None:
    """Gaps can be printed on one screen, and none hides that memory ran out."""
    for gap in gaps:
        assert gap.code
        assert gap.message
        check_message(gap.message)


def check_message(message: str) -> None:
    """Messages are for people: printable in UTF-8 (file names may hold anything), and short."""
    message.encode("utf-8", "surrogateescape")
    assert len(message) < 20_000, "a message that nobody can read"
    assert "fit into memory" not in message, message


def _check_trace(trace: RankTrace) -> None:
    assert trace.events >= sum(map(len, trace.tables)) - len(trace.operators)
    assert trace.events >= max(map(len, trace.tables))
    for table in trace.tables:
        _check_table(table)
        assert_within(getattr(table, "name", None), len(trace.names))
        assert_within(getattr(table, "thread", None), len(trace.threads))
    assert_within(trace.kernels.launch, len(trace.launches))
    assert_within(trace.operators.kernel, len(trace.kernels))
    assert_within(trace.operators.group, len(trace.groups))
    assert_within(trace.operators.dtype, len(trace.names))
    for text in (*trace.names, *(t.name for t in trace.threads), *_header_texts(trace.header)):
        text.encode()
    for group in trace.groups:
        (group.name + group.description).encode()


def _header_texts(header: Header) -> tuple[str, ...]:
    versions = (part for pair in header.versions for part in pair)
    return (header.host, header.backend, *(d.name for d in header.devices), *versions)


def _check_table(table: Table) -> None:
    for column in fields(table):
        assert len(getattr(table, column.name)) == len(table)
    assert np.all(np.diff(table.start_ns) >= 0)
    duration = getattr(table, "duration_ns", np.zeros(len(table), dtype=np.int64))
    assert np.all(duration >= 0)
    assert np.all(table.start_ns + duration >= table.start_ns), "an end beyond 64 bits"


def _check_op_table(table: OpTable) -> None:
    assert table.events >= len(table) > 0
    order = np.lexsort((table.start_ns, table.step))
    assert np.array_equal(table.start_ns[order], table.start_ns)
    assert np.all(table.duration_ns >= 0)
    assert np.all(table.start_ns + table.duration_ns >= table.start_ns)
    assert_within(table.name, len(table.names))
    "".join(table.names).encode()


def assert_within(indices: object, count: int) -> None:
    """Indices point into their table; -1 is for unknown."""
    if isinstance(indices, np.ndarray) and len(indices):
        assert int(indices.min()) >= -1
        assert int(indices.max()) < count
