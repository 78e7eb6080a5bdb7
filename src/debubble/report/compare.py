"""An answer of `debubble compare` in → its page for people."""

from __future__ import annotations

from debubble.answers.compare import (
    LABELS,
    CompareAnswer,
    show_delta,
    show_figure,
    show_interval,
)
from debubble.measure.comparison import Verdict
from debubble.report.text import Page, Table
from debubble.units import show_bytes, show_share

# Of a batch; what is less on both sides reads as nothing.
_SHOWN = 0.0005


def compare_page(found: CompareAnswer, next_command: str = "") -> Page:
    """Lay out the verdict, the numbers behind it, memory, and what else differs."""
    page = Page(answer=found.sentence, notes=list(found.notes), next_command=next_command)
    page.findings = list(found.reasons) if found.verdict != Verdict.NOT_COMPARABLE else []
    numbers = Table(columns=("number", "before", "after", "change", "95 % of it in", "p", "n"))
    for name, delta in found.delta.items():
        first, second = delta.before, delta.after
        if first is None and second is None:
            continue
        numbers.rows.append(
            (
                LABELS[name] + (" (decides)" if name == found.decided_by else ""),
                show_figure(name, first.median if first else None),
                show_figure(name, second.median if second else None),
                show_delta(name, delta.change),
                show_interval(name, delta.ci) or "–",
                "–" if delta.p is None else f"{delta.p:.2g}",
                f"{first.n if first else 0}, {second.n if second else 0}",
            )
        )
    memory = Table(columns=("rank", "peak before", "peak after", "left after", ""))
    for change in found.memory:
        left = change.headroom_bytes
        memory.rows.append(
            (
                str(change.rank),
                "–" if change.before_bytes is None else show_bytes(change.before_bytes),
                "–" if change.after_bytes is None else show_bytes(change.after_bytes),
                "not known" if left is None else show_bytes(left),
                "unsafe" if change.unsafe else "",
            )
        )
    page.tables = [numbers, *_cause_tables(found), *([memory] if found.memory else [])]
    if found.setting or found.environment:
        differs = Table(columns=("differs", "before", "after"))
        every = (*found.setting, *found.environment)
        differs.rows = [(each.what, each.before, each.after) for each in every]
        page.tables.append(differs)
    page.gaps = list(found.warnings)
    return page


def _cause_tables(found: CompareAnswer) -> list[Table]:
    """Lay out where the time went on both sides; nothing where a side has no account."""
    if not found.causes:
        return []
    table = Table(
        columns=("cause", "before", "after", "change"), title="where the time goes, on both sides"
    )
    for one in found.causes:
        if max(one.before_fraction, one.after_fraction) < _SHOWN:
            continue
        change = one.after_fraction - one.before_fraction
        table.rows.append(
            (
                one.cause.replace("_", " "),
                show_share(one.before_fraction),
                show_share(one.after_fraction),
                show_delta("bubble", change),
            )
        )
    return [table]
