"""Files that were found, or taken, in → what `inspect`, `capture` and `meter` print of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from debubble.answers.inspect import InspectAnswer, RankPart
from debubble.report.text import FEW, Page, Table, farthest
from debubble.server_notes import NAME, ServerNotes
from debubble.units import (
    NS_PER_S,
    counted,
    show_bytes,
    show_count,
    show_duration,
    show_number,
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
                _without_vendor(rank.device),
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
        devices = sorted({_without_vendor(rank.device) for rank in rest})
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


def _without_vendor(device: str) -> str:
    """Return `H200` for `NVIDIA H200`: the table is for a terminal, the JSON has it in full."""
    return device.removeprefix("NVIDIA ").removeprefix("AMD Instinct ")


SCHEMA = "debubble.capture/1"
METER_SCHEMA = "debubble.meter/1"


class ServerAnswer(Protocol):
    """What a server left, as far as it can be seen from here."""

    @property
    def kind(self) -> str:
        """Which engine it is."""

    @property
    def url(self) -> str:
        """Where it is."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The traces, where their folder is on this machine."""

    @property
    def note(self) -> str:
        """Where else the traces are."""

    @property
    def metrics(self) -> ServerNotes | None:
        """What the server did before, under and after the profiler."""


def capture_page(captures: Sequence[Path], next_command: str) -> Page:
    """Say what a job left."""
    table = Table(columns=("capture", "ranks", "traces"))
    for folder in captures:
        traces = _traces(folder)
        table.rows.append((folder.name, str(len(traces)), str(folder)))
    ranks = max(len(_traces(folder)) for folder in captures)
    return Page(
        answer=f"{counted(len(captures), 'capture')} of {counted(ranks, 'rank')}.",
        tables=[table],
        next_command=next_command,
    )


def capture_json(captures: Sequence[Path]) -> dict[str, Any]:
    """Return the same as data."""
    return {
        "schema": SCHEMA,
        "source": "command",
        "captures": [
            {
                "name": folder.name,
                "folder": str(folder),
                "traces": [str(trace) for trace in _traces(folder)],
            }
            for folder in captures
        ],
    }


def meter_page(segments: Sequence[Path], next_command: str) -> Page:
    """Say what a meter left."""
    table = Table(columns=("segment", "ranks", "tables"))
    for folder in segments:
        table.rows.append((folder.name, str(len(_tables(folder))), str(folder)))
    ranks = max(len(_tables(folder)) for folder in segments)
    return Page(
        answer=f"{counted(len(segments), 'segment')} of {counted(ranks, 'rank')} metered.",
        tables=[table],
        next_command=next_command,
    )


def meter_json(segments: Sequence[Path]) -> dict[str, Any]:
    """Return the same as data."""
    return {
        "schema": METER_SCHEMA,
        "segments": [
            {
                "name": folder.name,
                "folder": str(folder),
                "tables": [str(table) for table in _tables(folder)],
            }
            for folder in segments
        ],
    }


def _tables(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank*.csv"))


def server_page(answer: ServerAnswer, next_command: str) -> Page:
    """Say what a server left."""
    held = f"{counted(len(answer.files), 'trace')} of {answer.kind} at {answer.url}."
    missing = f"{answer.kind} at {answer.url} was profiled."
    page = Page(answer=held if answer.files else missing)
    if answer.files:
        table = Table(columns=("trace",))
        table.rows += [(str(file),) for file in answer.files]
        page.tables.append(table)
        page.next_command = next_command
    if answer.metrics is not None:
        page.tables.append(_metrics_table(answer.metrics))
        page.findings.append(_say_harm(answer.metrics))
        if answer.files:
            page.notes.append(f"noted beside them: {NAME}")
    if answer.note:
        page.notes.append(answer.note)
    return page


def server_json(answer: ServerAnswer) -> dict[str, Any]:
    """Return the same as data."""
    return {
        "schema": SCHEMA,
        "source": answer.kind,
        "url": answer.url,
        "traces": [str(file) for file in answer.files],
        "note": answer.note,
        "metrics": None if answer.metrics is None else msgspec.to_builtins(answer.metrics),
    }


def _say_harm(notes: ServerNotes) -> str:
    slowdown = notes.slowdown
    if slowdown is None:
        return "What the profiler costs is not known: too little was served around it."
    how = "a token took" if notes.ratio("tpot_s") is not None else "tokens came as if each took"
    return f"Under the profiler {how} {slowdown:.1f} times as long as around it."


def _metrics_table(notes: ServerNotes) -> Table:
    table = Table(
        columns=("server", "for", "tokens/s in", "out", "running", "waiting", "TTFT", "TPOT"),
        title="what the server says of itself",
    )
    spans = {"before": notes.before, "under the profiler": notes.during, "after": notes.after}
    for name, span in spans.items():
        if span is None:
            continue
        counts = (
            span.tokens_in_per_s,
            span.tokens_out_per_s,
            span.requests_running,
            span.requests_waiting,
        )
        times = (span.seconds, span.ttft_s, span.tpot_s)
        took, first, later = (
            "–" if time is None else show_duration(time * NS_PER_S) for time in times
        )
        table.rows.append(
            (
                name,
                took,
                *("–" if count is None else show_number(count) for count in counts),
                first,
                later,
            )
        )
    return table


def _traces(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank*.json.gz"))
