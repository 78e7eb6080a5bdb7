"""An answer of `debubble inspect` in → its page for people."""

from __future__ import annotations

from collections.abc import Sequence

from debubble.answers.inspect import InspectAnswer, RankPart
from debubble.report.text import FEW, Page, Table, farthest
from debubble.units import (
    counted,
    show_bytes,
    show_count,
    show_range,
    show_ranks,
    show_seconds,
    show_share,
)

_FILES_NAMED = 2


def inspect_page(found: InspectAnswer, next_command: str = "") -> Page:
    """Lay out the answer: a sentence, a table, what is missing, the next command."""
    page = Page(answer=found.verdict, gaps=list(found.warnings), next_command=next_command)
    if found.ranks:
        page.tables.append(rank_table(found.ranks))
    for held in found.op_tables:
        table = Table(columns=("op", "name in the table", "rows", "total"), title=held.file)
        table.rows = [
            (
                name.op.replace("_", " "),
                name.name,
                show_count(name.rows),
                show_seconds(name.total_s),
            )
            for name in held.names
        ]
        page.tables.append(table)
    if len(found.captures) > 1:
        names = ", ".join(
            f"{capture.name} ({counted(len(capture.files), 'file')})" for capture in found.captures
        )
        page.notes.append(f"captures here: {names}; read: {found.capture}")
    if found.left_alone:
        named = ", ".join(found.left_alone[:_FILES_NAMED])
        more = len(found.left_alone) - _FILES_NAMED
        others = f" and {counted(more, 'more file')}" if more > 0 else ""
        page.notes.append(f"left alone, no traces: {named}{others}")
    return page


def rank_table(ranks: Sequence[RankPart]) -> Table:
    """Lay out what each rank's trace holds; of many, those that stand out."""
    columns = "rank|device|steps|events|kernels|span|busy|sent|to|peak"
    table = Table(columns=tuple(columns.split("|")))
    shown = set(range(len(ranks)))
    if len(ranks) > 2 * FEW:
        shown = farthest([rank.events for rank in ranks])
        shown |= farthest([rank.busy_fraction for rank in ranks])
    for rank in (ranks[place] for place in sorted(shown)):
        size = "size unknown" if rank.sent_bytes is None else show_bytes(rank.sent_bytes)
        peak = rank.peak_memory_bytes
        table.rows.append(
            (
                str(rank.rank),
                rank.device,
                str(len(rank.steps)),
                show_count(rank.events),
                show_count(rank.kernels),
                "–" if rank.span_s is None else show_seconds(rank.span_s),
                show_share(rank.busy_fraction),
                size if rank.sends else "–",
                show_ranks(rank.peers) or "–",
                "–" if peak is None else show_bytes(peak),
            )
        )
    rest = [rank for place, rank in enumerate(ranks) if place not in shown]
    if rest:
        spans = [rank.span_s for rank in rest if rank.span_s is not None]
        busy = [rank.busy_fraction for rank in rest if rank.busy_fraction is not None]
        sent = [rank.sent_bytes for rank in rest if rank.sent_bytes is not None]
        peaks = [rank.peak_memory_bytes for rank in rest if rank.peak_memory_bytes is not None]
        devices = sorted({rank.device for rank in rest})
        table.rows.append(
            (
                f"{len(rest)} others",
                devices[0] if len(devices) == 1 else counted(len(devices), "device"),
                show_range([len(rank.steps) for rank in rest], str),
                show_range([rank.events for rank in rest], show_count),
                show_range([rank.kernels for rank in rest], show_count),
                show_range(spans, show_seconds) if spans else "–",
                show_range(busy, show_share) if busy else "–",
                show_range(sent, show_bytes) if sent else "–",
                "",
                show_range(peaks, show_bytes) if peaks else "–",
            )
        )
    return table
