"""Captures in → a page and JSON out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from debubble.report.text import Page, Table
from debubble.units import counted

SCHEMA = "debubble.capture/1"


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
    }


def _traces(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank*.json.gz"))
