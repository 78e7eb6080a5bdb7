"""Runs held against others in → what `debubble compare` and `debubble history` print."""

from __future__ import annotations

from debubble.measure.compare import Verdict
from debubble.report.answers.compare import (
    CompareAnswer,
    HistoryAnswer,
    label_of,
    show_delta,
    show_figure,
    show_interval,
)
from debubble.report.text import NOTHING, Page, Table
from debubble.units import (
    UNKNOWN,
    counted,
    show_bytes,
    show_known,
    show_largest,
    show_seconds,
    show_share,
)


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
        differs.rows = [(part.what, part.before, part.after) for part in every]
        page.tables.append(differs)
    page.gaps = list(answer.warnings)
    return page


def _cause_tables(answer: CompareAnswer) -> list[Table]:
    """Lay out where the time went on both sides; nothing where a side has no account."""
    if not answer.causes:
        return []
    table = Table(columns=("cause", "before", "after", "change"), title="where the time goes")
    for cause_change in answer.causes:
        if max(cause_change.before_fraction, cause_change.after_fraction) < NOTHING:
            continue
        change = cause_change.after_fraction - cause_change.before_fraction
        table.add(
            cause_change.cause.replace("_", " "),
            show_share(cause_change.before_fraction),
            show_share(cause_change.after_fraction),
            show_delta("bubble", change),
        )
    return [table]


def history_page(answer: HistoryAnswer, next_command: str = "") -> Page:
    """List records, a line each, oldest first."""
    page = Page(answer="The history is empty.", gaps=list(answer.warnings))
    page.next_command = next_command
    if not answer.records:
        page.next_command = "debubble history add TRACES --name NAME"
        return page
    count = counted(len(answer.records), "measurement")
    page.answer = (
        f"{count} of {counted(len({r.name for r in answer.records}), 'name')} in the history."
    )
    bases = {record.basis for record in answer.records}
    mark = {"unprofiled": " *"} if len(bases) > 1 else {}
    page.notes = ["times: profiled, * unprofiled" if mark else f"times: {min(bases)}"]
    columns = ("name", "kept, UTC", "steps", "bubble", "batch", "peak", "schedule", "m", "tags")
    table = Table(columns=columns)
    for record in answer.records:
        batch = show_known(record.numbers.batch_latency_s, show_seconds)
        table.add(
            record.name,
            # To the minute: --json has the seconds.
            record.created[:16].replace("T", " "),
            str(record.n),
            show_share(record.numbers.bubble_fraction),
            batch + mark.get(record.basis, ""),
            show_largest(record.numbers.peak_memory_bytes, show_bytes),
            record.schedule or UNKNOWN,
            show_known(record.microbatches),
            " ".join(f"{key}={value}" for key, value in record.tags.items()),
        )
    page.tables = [table.without_unknown()]
    return page
