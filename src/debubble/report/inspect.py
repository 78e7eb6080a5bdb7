"""Files that were found, or taken, in → what `inspect`, `capture` and `meter` print of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from debubble.capture.server import ServerCapture
from debubble.report.answers.inspect import InspectAnswer
from debubble.report.text import (
    FEW,
    Page,
    Table,
    fold,
)
from debubble.trace.columns import RankSummary
from debubble.trace.server_notes import NAME, ServerNotes
from debubble.units import (
    UNKNOWN,
    counted,
    show_bytes,
    show_count,
    show_known,
    show_number,
    show_range,
    show_ranks,
    show_seconds,
    show_share,
)

_FILES_NAMED = 2


def inspect_page(answer: InspectAnswer, next_command: str = "") -> Page:
    """Lay out the answer: a sentence, a table, what is missing, the next command."""
    page = Page(answer=answer.verdict, gaps=list(answer.warnings), next_command=next_command)
    if answer.ranks:
        page.tables.append(rank_table(answer.ranks))
    for held in answer.op_tables:
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
    if answer.lacks:
        table = Table(columns=("verbs", "will lack", "record"), title="what is not in these traces")
        for lack in answer.lacks:
            verbs = "all others" if lack.blocks else ", ".join(lack.verbs)
            table.add(verbs, lack.lack, lack.record)
        page.tables.append(table)
    if len(answer.captures) > 1:
        names = ", ".join(
            f"{capture.name} ({counted(len(capture.files), 'file')})" for capture in answer.captures
        )
        page.notes.append(f"captures here: {names}; read: {answer.capture}")
    if answer.left_alone:
        named = ", ".join(answer.left_alone[:_FILES_NAMED])
        more = len(answer.left_alone) - _FILES_NAMED
        others = f" and {counted(more, 'more file')}" if more > 0 else ""
        page.notes.append(f"ignored, not traces: {named}{others}")
    return page


def rank_table(ranks: Sequence[RankSummary]) -> Table:
    """Lay out what each rank's trace holds; of many, those that stand out."""
    columns = "rank|device|steps|events|kernels|span|busy|sent|to|peak"
    table = Table(columns=tuple(columns.split("|")))
    for name, alike in fold(
        ranks, 2 * FEW, lambda rank: rank.events, lambda rank: rank.busy_fraction
    ):
        rank, devices = alike[0], sorted({_without_vendor(rank.device) for rank in alike})
        sent = show_range([rank.sent_bytes for rank in alike], show_bytes, "size unknown")
        table.add(
            name or str(rank.rank),
            devices[0] if len(devices) == 1 else counted(len(devices), "device"),
            show_range([len(rank.steps) for rank in alike], str),
            show_range([rank.events for rank in alike], show_count),
            show_range([rank.kernels for rank in alike], show_count),
            show_range([rank.span_s for rank in alike], show_seconds),
            show_range([rank.busy_fraction for rank in alike], show_share),
            sent if any(rank.sends for rank in alike) else UNKNOWN,
            "" if name else show_ranks(rank.peers) or UNKNOWN,
            show_range([rank.peak_memory_bytes for rank in alike], show_bytes),
        )
    return table.without_unknown()


def _without_vendor(device: str) -> str:
    """Return `H200` for `NVIDIA H200`: the table is for a terminal, the JSON has it in full."""
    return device.removeprefix("NVIDIA ").removeprefix("AMD Instinct ")


# What a job leaves in a folder, by who took it: what a folder is called, what files are, and which.
_LEFT = {
    "capture": ("capture", "traces", "rank*.json.gz"),
    "meter": ("segment", "tables", "rank*.csv"),
}
Taker = Literal["capture", "meter"]


def folders_page(taker: Taker, folders: Sequence[Path], next_command: str) -> Page:
    """Say what a job left, a folder a row."""
    noun, what, pattern = _LEFT[taker]
    table, ranks = Table(columns=(noun, "ranks", what)), 0
    for folder in folders:
        held = len(list(folder.glob(pattern)))
        table.add(folder.name, str(held), str(folder))
        ranks = max(ranks, held)
    sentence = f"{counted(len(folders), noun)} of {counted(ranks, 'rank')}."
    return Page(answer=sentence, tables=[table], next_command=next_command)


def folders_json(taker: Taker, folders: Sequence[Path]) -> dict[str, Any]:
    """Return the same as data."""
    noun, what, pattern = _LEFT[taker]
    held = [
        {
            "name": folder.name,
            "folder": str(folder),
            what: [str(file) for file in sorted(folder.glob(pattern))],
        }
        for folder in folders
    ]
    source = {"source": "command"} if taker == "capture" else {}
    return {"schema": f"debubble.{taker}/1", **source, f"{noun}s": held}


def server_page(answer: ServerCapture, next_command: str) -> Page:
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
        page.findings += [_say_harm(answer.metrics), *_say_length(answer.metrics)]
        if answer.files:
            page.notes.append(f"noted beside them: {NAME}")
    if answer.note:
        page.notes.append(answer.note)
    return page


def server_json(answer: ServerCapture) -> dict[str, Any]:
    """Return the same as data."""
    return {
        "schema": "debubble.capture/1",
        "source": answer.kind,
        "url": answer.url,
        "traces": [str(file) for file in answer.files],
        "note": answer.note,
        "metrics": None if answer.metrics is None else msgspec.to_builtins(answer.metrics),
    }


def _say_length(notes: ServerNotes) -> list[str]:
    """Say how long a capture would hold what this one lacks."""
    seconds, under = notes.seconds_for_both, notes.during
    if seconds is None or under is None or under.first_tokens != 0:
        return []
    sentence = (
        "No prompt was answered while profiling, so plans are of decode only: "
        f"--seconds {seconds:.0f} would hold prompts, too (and a larger max_iterations)."
    )
    return [sentence]


def _say_harm(notes: ServerNotes) -> str:
    slowdown = notes.slowdown
    if slowdown is None:
        return "Profiling overhead unknown: too little comparable load around the capture."
    how = "a token took" if notes.ratio("tpot_s") is not None else "tokens came as if each took"
    return f"Profiled, {how} {slowdown:.1f} times as long as unprofiled."


def _metrics_table(notes: ServerNotes) -> Table:
    table = Table(
        columns=("server", "for", "tokens/s in", "out", "running", "waiting", "TTFT", "TPOT"),
        title="what the server says of itself",
    )
    spans = {"before": notes.before, "profiled": notes.during, "after": notes.after}
    for name, span in spans.items():
        if span is None:
            continue
        table.add(
            name,
            show_known(span.seconds, show_seconds),
            show_known(span.tokens_in_per_s, show_number),
            show_known(span.tokens_out_per_s, show_number),
            show_known(span.requests_running, show_number),
            show_known(span.requests_waiting, show_number),
            show_known(span.ttft_s, show_seconds),
            show_known(span.tpot_s, show_seconds),
        )
    return table
