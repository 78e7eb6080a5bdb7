"""An answer of `debubble compare` in → its page for people."""

from __future__ import annotations

from debubble.answers.compare import (
    LABELS,
    CompareAnswer,
    show_change,
    show_interval,
    show_number,
)
from debubble.measure.comparison import Verdict
from debubble.report.text import Page, Table
from debubble.units import show_bytes


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
                show_number(name, first.median if first else None),
                show_number(name, second.median if second else None),
                show_change(name, delta.change),
                show_interval(delta.ci) or "–",
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
    page.tables = [numbers, memory] if found.memory else [numbers]
    if found.setting or found.environment:
        differs = Table(columns=("differs", "before", "after"))
        every = (*found.setting, *found.environment)
        differs.rows = [(each.what, each.before, each.after) for each in every]
        page.tables.append(differs)
    page.gaps = list(found.warnings)
    return page
