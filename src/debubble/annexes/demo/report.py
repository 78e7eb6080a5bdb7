"""An improvement in → what `debubble demo` answers, and prints of it."""

from __future__ import annotations

from pathlib import Path

from debubble.annexes.demo.improve import Improvement
from debubble.ledger.causes import Cause
from debubble.report.answers.base import Answer, AnswerWarning, list_warnings
from debubble.report.answers.change import ChangePart, describe
from debubble.report.answers.compare import CompareAnswer, answer_compare, say_comparison
from debubble.report.answers.find import answer_find
from debubble.report.text import Page, Table
from debubble.units import show_gain, show_number, show_seconds, show_share

SCHEMA = "debubble.demo/1"


class DemoAnswer(Answer, frozen=True, kw_only=True):
    """What `debubble demo` says."""

    schema: str = SCHEMA
    demo: str
    """What is real in it, and what is timed."""
    found: str
    change: ChangePart
    throughput_gain_fraction: float
    """That was predicted of it."""
    compare: CompareAnswer
    records: dict[str, str]
    commands: list[str]
    warnings: list[AnswerWarning]


def answer_demo(made: Improvement, about: str, out: Path, commands: list[str]) -> DemoAnswer:
    """Say what was found, what was predicted, what came, and where it lies."""
    found = answer_find(made.before)
    # An uneven split first: it is what the demo shows.
    named = sorted(found.named, key=lambda cause: cause.cause != Cause.IMBALANCE)
    sentences = [f"{cause.sentence[:1].upper()}{cause.sentence[1:]}." for cause in named[:1]]
    gaps = (*made.before.measured_warnings, *made.after.measured_warnings)
    return DemoAnswer(
        demo=about,
        found=" ".join([found.verdict, *sentences]),
        change=ChangePart.of(made.option.change),
        throughput_gain_fraction=made.option.throughput_gain,
        compare=answer_compare(made.compared, gaps),
        records={name: str(out / name) for name in ("before", "after")},
        commands=commands,
        warnings=list_warnings(made.gaps),
    )


def demo_page(made: Improvement, answer: DemoAnswer, next_command: str) -> Page:
    """Lay the answer out."""
    change, check = describe(made.option.change), made.compared.predicted
    if made.trains and made.option.change.grows_batch:
        change += " (larger batch, which changes training)"
    table = Table(columns=("number", "before", "after"))
    for name in ("bubble", "batch_latency", "step_time", "throughput"):
        delta = made.compared.deltas[name]
        if delta.before and delta.after:
            cells = [_shown(name, side.median) for side in (delta.before, delta.after)]
            table.add(name.replace("_", " "), *cells)
    return Page(
        answer=say_comparison(made.compared),
        findings=[
            f"Found: {answer.found[:1].lower()}{answer.found[1:]}",
            f"Planned: {change}: {show_gain(made.option.throughput_gain)} throughput.",
            *([] if check is None else [f"Measured: a batch {check.sentence}."]),
        ],
        tables=[table],
        gaps=list(made.gaps),
        notes=[
            answer.demo,
            f"times: {made.compared.bases[0]}",
            f"records: {', '.join(answer.records.values())}",
            "the same, command by command:",
        ],
        lines=[f"  {line}" for line in answer.commands],
        next_command=next_command,
    )


def _shown(name: str, value: float) -> str:
    if name == "bubble":
        return show_share(value)
    if name == "throughput":
        return f"{show_number(value)} microbatches/s"
    return show_seconds(value)
