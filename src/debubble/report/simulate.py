"""A simulated pipeline in → what `debubble simulate` prints."""

from __future__ import annotations

from debubble.report.answers.change import say_basis
from debubble.report.answers.simulate import MeasuredPart, SimulateAnswer
from debubble.report.text import Page, Table
from debubble.simulate.hand_set import UNIT_NS
from debubble.units import (
    NS_PER_S,
    UNKNOWN,
    show_bytes,
    show_duration,
    show_gain,
    show_known,
    show_largest,
    show_number,
    show_seconds,
    show_share,
)


def simulate_page(answer: SimulateAnswer, next_command: str = "") -> Page:
    """Lay out the answer: what a batch would take, then numbers and ranks."""
    page = Page(answer=answer.verdict, findings=list(answer.findings))
    page.gaps = list(answer.warnings)
    page.next_command = next_command
    bubbles = (
        f"bubble against the longest rank {show_share(answer.longest_stage_bubble)}; "
        f"bubble over ideal {show_share(answer.bubble_over_ideal)}"
    )
    if answer.measured is None:
        latency = _show_length(answer, 1.0)
        page.tables = [_hand_table(answer)]
        page.notes = [f"{answer.given.schedule}; batch latency {latency}; {bubbles}"]
        return page
    page.tables = [_number_table(answer, answer.measured), _rank_table(answer, answer.measured)]
    page.notes.append(say_basis(answer.basis or UNKNOWN, answer.measured.without_profiler))
    asked = answer.given
    page.notes.append(f"{asked.schedule}; messages {asked.communication}; {bubbles}")
    if not asked.changes_nothing:
        page.notes.append("in brackets: 80 % interval")
        by, missed = show_gain(answer.correction_fraction or 0.0), answer.misfit_fraction or 0.0
        if by != show_gain(0.0):
            page.notes.append(f"corrected by {by}, of a simulator error of {show_gain(missed)}")
    if asked.microbatch_scale != 1.0:
        page.notes.append("microbatches/s: of the measured size")
    page.notes += [f"assumed: {sentence}" for sentence in answer.assumptions]
    return page


def _hand_table(answer: SimulateAnswer) -> Table:
    table = Table(columns=("rank", "stage", "computes", "waits", "bubble"))
    for rank in answer.ranks:
        waits = rank.bubble_fraction or 0.0
        table.add(
            str(rank.rank),
            " ".join(map(str, rank.stages)),
            _show_length(answer, 1 - waits),
            _show_length(answer, waits),
            show_share(rank.bubble_fraction),
        )
    return table


def _show_length(answer: SimulateAnswer, share: float) -> str:
    """Write a share of the batch as a time, or in the units that costs were given in."""
    if answer.numbers.batch_latency_units is None:
        return show_duration(round(share * (answer.numbers.batch_latency_s or 0.0) * NS_PER_S))
    length = round(share * answer.numbers.batch_latency_units * UNIT_NS)
    return f"{length / UNIT_NS:.4g} units"


def _number_table(answer: SimulateAnswer, measured: MeasuredPart) -> Table:
    numbers = answer.numbers
    simulated = "simulated" if answer.given.changes_nothing else "predicted"
    table = Table(columns=("number", "measured", simulated))
    table.rows = [
        ("bubble", show_share(measured.bubble_fraction), show_share(numbers.bubble_fraction)),
        (
            "  theory, formula",
            show_share(measured.theory.bubble_fraction),
            show_share(answer.theory.bubble_fraction),
        ),
        (
            "  theory, this schedule",
            show_share(measured.theory.schedule_bubble_fraction),
            show_share(answer.theory.schedule_bubble_fraction),
        ),
        (
            "batch latency",
            show_seconds(measured.batch_latency_s),
            show_seconds(numbers.batch_latency_s or 0.0),
        ),
        (
            "microbatches/s",
            show_number(measured.microbatches_per_s),
            show_number(numbers.microbatches_per_s or 0.0),
        ),
    ]
    if measured.tokens_per_s is not None:
        tokens = measured.tokens_per_s, numbers.tokens_per_s or 0.0
        table.add("tokens/s", *map(show_number, tokens))
    table.add(
        "peak memory, largest rank",
        show_largest(measured.peak_memory_bytes, show_bytes),
        show_largest(numbers.peak_memory_bytes or (), show_bytes),
    )
    return table


def _rank_table(answer: SimulateAnswer, measured: MeasuredPart) -> Table:
    table = Table(columns=("rank", "stage", "layers", "bubble", "was", "peak", "was", "left"))
    unknown, split = [None] * len(answer.ranks), answer.given.split
    memory = zip(
        answer.numbers.peak_memory_bytes or unknown,
        measured.peak_memory_bytes,
        answer.headroom_bytes or unknown,
        strict=True,
    )
    for rank, sizes in zip(answer.ranks, memory, strict=True):
        table.add(
            str(rank.rank),
            " ".join(map(str, rank.stages)),
            " ".join(str(split[stage]) for stage in rank.stages) if split else UNKNOWN,
            show_share(rank.bubble_fraction),
            show_share(rank.measured_bubble_fraction),
            *(show_known(size, show_bytes) for size in sizes),
        )
    return table
