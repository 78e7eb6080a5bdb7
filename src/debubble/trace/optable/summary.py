"""An op table in → what it holds."""

from __future__ import annotations

import msgspec

from debubble.trace.columns import OpTable
from debubble.trace.optable import Op
from debubble.units import NS_PER_S


class OpName(msgspec.Struct, frozen=True, kw_only=True):
    """One name in an op table, and what it was taken for."""

    op: str
    name: str
    rows: int
    total_s: float


class OpTableSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What an op table holds."""

    file: str
    format: str
    rows: int
    steps: int
    pipelines: int
    stages: int
    ops: dict[str, int]
    names: tuple[OpName, ...]


def summarise_table(table: OpTable) -> OpTableSummary:
    """Count what is in an op table, operation by operation and name by name."""
    of_names = [table.name == number for number in range(len(table.names))]
    return OpTableSummary(
        file=table.file,
        format=table.format,
        rows=len(table),
        steps=len(set(table.step.tolist())),
        pipelines=len(set(table.pipeline.tolist())),
        stages=len(set(table.stage.tolist())),
        ops={op.name.lower(): int((table.op == op).sum()) for op in Op if (table.op == op).any()},
        names=tuple(
            OpName(
                op=Op(int(table.op[rows][0])).name.lower(),
                name=name,
                rows=int(rows.sum()),
                total_s=float(table.duration_ns[rows].sum()) / NS_PER_S,
            )
            for name, rows in zip(table.names, of_names, strict=True)
            if rows.any()
        ),
    )
