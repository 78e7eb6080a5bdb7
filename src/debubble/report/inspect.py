"""A run as it was read in → what `debubble inspect` prints out, as text or JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from debubble.errors import Code
from debubble.report.fold import FEW, farthest, show_range
from debubble.report.text import Page, Table
from debubble.trace.optable import Op
from debubble.trace.run import Run, show_ranks
from debubble.trace.summary import RankSummary
from debubble.units import (
    NS_PER_S,
    counted,
    show_bytes,
    show_count,
    show_duration,
    show_share,
)

if TYPE_CHECKING:
    from debubble.errors import Gap
    from debubble.trace.optable import OpTable

SCHEMA = "debubble.inspect/1"
_FILES_NAMED = 2


def inspect_page(run: Run, next_command: str) -> Page:
    """Lay out the answer: a sentence, a table, what is missing, the next command."""
    ranks = list(run.summarised())
    page = Page(answer=_answer(run, ranks))
    if ranks:
        page.tables.append(rank_table(ranks))
    page.tables += [_op_table(table) for table in run.tables]
    if len(run.found.captures) > 1:
        names = ", ".join(
            f"{capture.name} ({counted(len(capture.files), 'file')})"
            for capture in run.found.captures
        )
        page.notes.append(f"captures here: {names}; read: {run.found.capture.name}")
    if run.found.left_alone:
        page.notes.append(f"left alone, no traces: {_briefly(run.found.left_alone)}")
    page.gaps = list(run.gaps)
    page.next_command = next_command
    return page


def inspect_json(run: Run) -> dict[str, Any]:
    """Return the same as data."""
    return {
        "schema": SCHEMA,
        "capture": run.found.capture.name,
        "captures": [
            {"name": capture.name, "files": [file.file for file in capture.files]}
            for capture in run.found.captures
        ],
        "world_size": run.world_size,
        "missing_ranks": list(run.missing_ranks),
        "ranks": [_rank_json(rank) for rank in run.summarised()],
        "op_tables": [_op_table_json(table) for table in run.tables],
        "left_alone": list(run.found.left_alone),
        "warnings": [gap_json(gap) for gap in run.gaps],
    }


def gap_json(gap: Gap) -> dict[str, Any]:
    """Return a gap as every verb's `warnings` hold it."""
    full = {
        "code": gap.code,
        "message": gap.message,
        "hint": gap.hint,
        "rank": gap.rank,
        "file": gap.file,
    }
    return {key: value for key, value in full.items() if value not in {None, ""}}


def _answer(run: Run, ranks: list[RankSummary]) -> str:
    parts = []
    if ranks:
        world = f" of {run.world_size}" if run.world_size else ""
        events = counted(sum(rank.events for rank in ranks), "event")
        parts.append(f"{counted(len(ranks), 'rank')}{world}, {_steps(ranks)}, {events}")
    parts += [f"an op table of {counted(len(table), 'row')}" for table in run.tables]
    if run.missing_ranks:
        parts.append(f"missing: rank {show_ranks(run.missing_ranks)}")
    problems = [gap for gap in run.gaps if gap.code != Code.MISSING_RANKS]
    if problems:
        parts.append(counted(len(problems), "warning"))
    elif not run.missing_ranks:
        parts.append("nothing missing or broken")
    return f"{'; '.join(parts)}."


def _steps(ranks: list[RankSummary]) -> str:
    fewest, most = min(len(r.steps) for r in ranks), max(len(r.steps) for r in ranks)
    if not most:
        return "no profiler steps"
    return f"{counted(most, 'step')} each" if fewest == most else f"{fewest} to {most} steps"


def _briefly(files: tuple[str, ...]) -> str:
    """Name the first few of many files."""
    named = ", ".join(files[:_FILES_NAMED])
    more = len(files) - _FILES_NAMED
    return f"{named} and {counted(more, 'more file')}" if more > 0 else named


def rank_table(ranks: list[RankSummary]) -> Table:
    """Lay out what each rank's trace holds."""
    table = Table(
        columns=(
            "rank",
            "device",
            "steps",
            "events",
            "kernels",
            "span",
            "busy",
            "sent",
            "to",
            "peak",
        )
    )
    shown = set(range(len(ranks)))
    if len(ranks) > 2 * FEW:
        shown = farthest([rank.events for rank in ranks]) | farthest(
            [rank.busy_fraction for rank in ranks]
        )
    for rank in (ranks[place] for place in sorted(shown)):
        table.rows.append(
            (
                str(rank.rank),
                rank.device,
                str(len(rank.steps)),
                show_count(rank.events),
                show_count(rank.kernels),
                "–" if rank.span_ns is None else show_duration(rank.span_ns),
                show_share(rank.busy_fraction),
                _sent(rank),
                show_ranks(rank.peers) or "–",
                "–" if rank.peak_memory_bytes is None else show_bytes(rank.peak_memory_bytes),
            )
        )
    rest = [rank for place, rank in enumerate(ranks) if place not in shown]
    if rest:
        table.rows.append(_other_ranks(rest))
    return table


def _other_ranks(rest: list[RankSummary]) -> tuple[str, ...]:
    """Sum up ranks that do not stand out."""
    spans = [rank.span_ns for rank in rest if rank.span_ns is not None]
    busy = [rank.busy_fraction for rank in rest if rank.busy_fraction is not None]
    sent = [rank.sent_bytes for rank in rest if rank.sent_bytes is not None]
    peaks = [rank.peak_memory_bytes for rank in rest if rank.peak_memory_bytes is not None]
    devices = sorted({rank.device for rank in rest})
    return (
        f"{len(rest)} others",
        devices[0] if len(devices) == 1 else counted(len(devices), "device"),
        show_range([len(rank.steps) for rank in rest], str),
        show_range([rank.events for rank in rest], show_count),
        show_range([rank.kernels for rank in rest], show_count),
        show_range(spans, show_duration) if spans else "–",
        show_range(busy, show_share) if busy else "–",
        show_range(sent, show_bytes) if sent else "–",
        "",
        show_range(peaks, show_bytes) if peaks else "–",
    )


def _sent(rank: RankSummary) -> str:
    if not rank.sends:
        return "–"
    return "size unknown" if rank.sent_bytes is None else show_bytes(rank.sent_bytes)


def _op_table(table: OpTable) -> Table:
    made = Table(columns=("op", "name in the table", "rows", "total"), title=table.file)
    for number, name in enumerate(table.names):
        rows = table.name == number
        if rows.any():
            op = Op(int(table.op[rows][0])).name.lower().replace("_", " ")
            total = show_duration(float(table.duration_ns[rows].sum()))
            made.rows.append((op, name, show_count(int(rows.sum())), total))
    return made


def _rank_json(rank: RankSummary) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "file": rank.file,
        "format": rank.format,
        "device": rank.device,
        "steps": list(rank.steps),
        "events": rank.events,
        "kernels": rank.kernels,
        "communication_kernels": rank.communication_kernels,
        "unjoined_kernels": rank.unjoined_kernels,
        "span_s": None if rank.span_ns is None else rank.span_ns / NS_PER_S,
        "busy_fraction": rank.busy_fraction,
        "sends": rank.sends,
        "receives": rank.receives,
        "collectives": rank.collectives,
        "sent_bytes": rank.sent_bytes,
        "peers": list(rank.peers),
        "peak_memory_bytes": rank.peak_memory_bytes,
    }


def _op_table_json(table: OpTable) -> dict[str, Any]:
    return {
        "file": table.file,
        "format": table.format,
        "rows": len(table),
        "steps": len(set(table.step.tolist())),
        "pipelines": len(set(table.pipeline.tolist())),
        "stages": len(set(table.stage.tolist())),
        "ops": {
            op.name.lower(): int((table.op == op).sum()) for op in Op if (table.op == op).any()
        },
    }
