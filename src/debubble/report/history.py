"""Records in → what `debubble history` prints out, as text, JSON or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from debubble.measure.measurement import middle
from debubble.measure.store import Record
from debubble.report.compare import measurement_json
from debubble.report.text import Page, Table
from debubble.units import NS_PER_S, counted, show_bytes, show_duration, show_share

SCHEMA = "debubble.history/1"
_COLUMNS = (
    "name",
    "created",
    "capture",
    "step",
    "bubble_fraction",
    "batch_latency_s",
    "step_time_s",
    "microbatches",
    "schedule",
    "split",
    "tags",
)


def history_page(records: Sequence[Record]) -> Page:
    """List records, a line each, oldest first."""
    names = len({record.name for record in records})
    said = f"{counted(len(records), 'measurement')} of {counted(names, 'name')}"
    page = Page(answer=f"{said} in the history." if records else "The history is empty.")
    table = Table(
        columns=("name", "kept", "steps", "bubble", "batch", "peak", "schedule", "m", "tags")
    )
    for record in records:
        one = record.measurement
        latency = middle(one.batch_latencies_s)
        peaks = [rank.peak_bytes for rank in one.memory if rank.peak_bytes is not None]
        table.rows.append(
            (
                record.name,
                _stamp(record),
                str(len(one.samples)),
                show_share(middle(one.bubble_fractions)),
                "–" if latency is None else show_duration(latency * NS_PER_S),
                show_bytes(max(peaks)) if peaks else "–",
                one.schedule or "–",
                str(one.microbatches or "–"),
                " ".join(f"{key}={value}" for key, value in record.tags.items()),
            )
        )
    page.tables = [table] if records else []
    return page


def history_json(records: Sequence[Record], *, whole: bool = False) -> dict[str, Any]:
    """Return records as data; whole: with every sample."""
    listed = []
    for record in records:
        entry = {
            "number": record.number,
            "name": record.name,
            "created": _stamp(record),
            "tags": record.tags,
            **measurement_json(record.measurement),
        }
        if whole:
            entry["measurement"] = msgspec.to_builtins(record.measurement)
        listed.append(entry)
    return {"schema": SCHEMA, "records": listed, "warnings": []}


def history_csv(records: Sequence[Record]) -> str:
    """Write every sample as a row."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for record in records:
        one = record.measurement
        split = ",".join(map(str, one.split or ()))
        tags = ";".join(f"{key}={value}" for key, value in record.tags.items())
        for sample in one.samples:
            row = (
                record.name,
                _stamp(record),
                sample.capture,
                sample.step,
                sample.bubble_fraction,
                sample.batch_latency_s,
                sample.step_time_s,
                one.microbatches,
                one.schedule,
                split,
                tags,
            )
            writer.writerow(row)
    return out.getvalue()


def _stamp(record: Record) -> str:
    return datetime.fromtimestamp(record.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
