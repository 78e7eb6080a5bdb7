"""Runs held against others in → what `debubble compare` and `debubble history` print."""

from __future__ import annotations

from collections.abc import Sequence

from debubble.measure.compare import Verdict
from debubble.measure.measurement import Record, middle
from debubble.report.answers.compare import (
    CompareAnswer,
    label_of,
    show_delta,
    show_figure,
    show_interval,
)
from debubble.report.text import Page, Table
from debubble.timeline.job import Basis
from debubble.units import (
    UNKNOWN,
    counted,
    show_bytes,
    show_known,
    show_largest,
    show_seconds,
    show_share,
)

_UNPROFILED = " *"
# Of a batch; what is less on both sides reads as nothing.
_SHOWN = 0.0005


def compare_page(answer: CompareAnswer, next_command: str = "") -> Page:
    """Lay out the verdict, the numbers behind it, memory, and what else differs."""
    notes = [f"times: {answer.basis}", *answer.notes]
    page = Page(answer=answer.sentence, notes=notes, next_command=next_command)
    page.findings = list(answer.reasons) if answer.verdict != Verdict.NOT_COMPARABLE else []
    if answer.predicted is not None:
        sentence = answer.predicted.sentence
        page.findings.insert(0, f"{answer.predicted.change}: {sentence}.")
    numbers = Table(columns=("number", "before", "after", "change", "95 % CI", "p", "n"))
    for name, delta in answer.delta.items():
        first, second = delta.before, delta.after
        if first is None and second is None:
            continue
        numbers.add(
            label_of(answer, name) + (" (decides)" if name == answer.decided_by else ""),
            show_figure(name, first.median if first else None),
            show_figure(name, second.median if second else None),
            show_delta(name, delta.change),
            show_interval(name, delta.ci) or UNKNOWN,
            show_known(delta.p, "{:.2g}".format),
            f"{first.n if first else 0}, {second.n if second else 0}",
        )
    memory = Table(columns=("rank", "peak before", "peak after", "left after", ""))
    for change in answer.memory:
        memory.add(
            str(change.rank),
            show_known(change.before_bytes, show_bytes),
            show_known(change.after_bytes, show_bytes),
            show_known(change.headroom_bytes, show_bytes, "unknown"),
            "unsafe" if change.unsafe else "",
        )
    page.tables = [numbers, *_cause_tables(answer), *([memory] if answer.memory else [])]
    if answer.setting or answer.environment:
        differs = Table(columns=("differs", "before", "after"))
        every = (*answer.setting, *answer.environment)
        differs.rows = [(each.what, each.before, each.after) for each in every]
        page.tables.append(differs)
    page.gaps = list(answer.warnings)
    return page


def _cause_tables(answer: CompareAnswer) -> list[Table]:
    """Lay out where the time went on both sides; nothing where a side has no account."""
    if not answer.causes:
        return []
    table = Table(columns=("cause", "before", "after", "change"), title="where the time goes")
    for cause_change in answer.causes:
        if max(cause_change.before_fraction, cause_change.after_fraction) < _SHOWN:
            continue
        change = cause_change.after_fraction - cause_change.before_fraction
        table.add(
            cause_change.cause.replace("_", " "),
            show_share(cause_change.before_fraction),
            show_share(cause_change.after_fraction),
            show_delta("bubble", change),
        )
    return [table]


def history_page(records: Sequence[Record]) -> Page:
    """List records, a line each, oldest first."""
    names = len({record.name for record in records})
    heading = f"{counted(len(records), 'measurement')} of {counted(names, 'name')}"
    page = Page(answer=f"{heading} in the history.")
    if not records:
        page.answer = "The history is empty."
        page.next_command = "debubble history add TRACES --name NAME"
        return page
    columns = ("name", "kept, UTC", "steps", "bubble", "batch", "peak", "schedule", "m", "tags")
    shown = len(columns) - (not any(record.tags for record in records))
    table = Table(columns=columns[:shown])
    bases = {record.measurement.basis for record in records}
    marked = {Basis.UNPROFILED} if len(bases) > 1 else set()
    page.notes = [f"times: profiled,{_UNPROFILED} unprofiled" if marked else f"times: {min(bases)}"]
    for record in records:
        measurement = record.measurement
        batch = middle(measurement.batch_latencies_s(measurement.basis))
        # To the minute: --json has the seconds.
        kept = record.created[:16].replace("T", " ")
        table.rows.append(
            (
                record.name,
                kept,
                str(len(measurement.samples)),
                show_share(middle(measurement.bubble_fractions)),
                show_known(batch, show_seconds)
                + (_UNPROFILED if measurement.basis in marked else ""),
                show_largest([rank.peak_bytes for rank in measurement.memory], show_bytes),
                measurement.schedule or UNKNOWN,
                show_known(measurement.microbatches),
                " ".join(f"{key}={value}" for key, value in record.tags.items()),
            )[:shown]
        )
    page.tables = [table]
    return page
