"""Captures in → a page and JSON out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from debubble.report.text import Page, Table
from debubble.server_notes import NAME, ServerNotes
from debubble.units import NS_PER_S, counted, show_duration, show_number

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
