"""A what-if of a measured run in → what `debubble simulate TRACES` prints out, as text or JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from debubble.analysis import Analysis
from debubble.errors import Gap
from debubble.plan.ask import Asked
from debubble.report.change import change_json, describe
from debubble.report.inspect import gap_json
from debubble.report.simulate import SCHEMA
from debubble.report.text import Page, Table
from debubble.units import NS_PER_S, counted, show_bytes, show_duration, show_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What was asked, what came out, and what it is held against."""

    asked: Asked
    measured: Analysis
    tokens: float | None
    """Of a measured microbatch, where they were said."""
    hops: tuple[str, ...]
    """As they were typed."""
    gaps: tuple[Gap, ...]

    @property
    def scale(self) -> float:
        """How large a microbatch is against the measured one."""
        return self.asked.baseline.microbatch_scale(self.asked.change)


def what_if_page(report: Reported, next_command: str) -> Page:
    """Lay out the answer: what a batch would take, then the numbers beside the measured ones."""
    page = Page(answer=_answer(report))
    page.findings = _findings(report)
    page.tables = [_number_table(report), _rank_table(report)]
    page.notes = _notes(report)
    page.gaps = list(report.gaps)
    page.next_command = next_command
    return page


def _answer(report: Reported) -> str:
    asked, option = report.asked, report.asked.option
    measured = asked.baseline.window_ns
    if asked.changes_nothing:
        off = option.window_ns / measured - 1
        return (
            f"Simulated as it is, a batch takes {show_duration(option.window_ns)}; "
            f"it took {show_duration(measured)}: {_signed(off, 1)} off."
        )
    if asked.change.microbatches:
        count = counted(asked.microbatches, "microbatch", "microbatches")
        of, before = f" of {count}", f" for {asked.baseline.source.microbatches}"
    else:
        of, before = "", ""
    low, high = show_duration(option.low_ns), show_duration(option.high_ns)
    middle = show_duration(option.window_ns)
    return (
        f"A batch{of} would take {middle} ({_without_unit(low, middle, high)} to "
        f"{_without_unit(high, middle, low)}) instead of {show_duration(measured)}{before}: "
        f"{_signed(option.throughput_gain)} throughput."
    )


def _signed(fraction: float, digits: int = 0) -> str:
    text = f"{100 * fraction:+.{digits}f} %"
    return text if any(digit in text for digit in "123456789") else text.replace("-", "+")


def _without_unit(text: str, *others: str) -> str:
    """Leave a unit out that all of them have."""
    number, unit = text.split(" ")
    return number if all(one.endswith(f" {unit}") for one in others) else text


def _findings(report: Reported) -> list[str]:
    asked, said = report.asked, []
    change = describe(asked.change) if not asked.changes_nothing else ""
    hops = ", ".join(f"hop {hop}" for hop in report.hops)
    if change == "nothing changed" and hops:
        change = ""
    words = ", ".join(part for part in (change, hops) if part)
    if words:
        said.append(f"Asked: {words}.")
    low, high = asked.option.throughput_low, asked.option.throughput_high
    if not asked.changes_nothing and low <= 0 <= high:
        said.append(f"That is within the noise of a run: {_signed(low)} to {_signed(high)}.")
    for rank, room in zip(asked.baseline.ranks, asked.option.headroom or (), strict=False):
        if room.fits is False:
            said.append(f"Rank {rank.rank} does not fit: {room}.")
    return said


def _number_table(report: Reported) -> Table:
    asked, option, run = report.asked, report.asked.option, report.measured
    one = run.pipeline
    simulated = "simulated" if asked.changes_nothing else "would be"
    table = Table(columns=("number", "measured", simulated))
    table.rows = [
        ("bubble", show_share(one.bubble_fraction), show_share(option.bubble_fraction)),
        ("  theory, formula", show_share(run.theory), show_share(asked.theory())),
        (
            "  theory, this schedule",
            show_share(run.theory_of_schedule),
            show_share(asked.theory_of_schedule()),
        ),
        (
            "batch latency",
            show_duration(asked.baseline.window_ns),
            show_duration(option.window_ns),
        ),
        ("microbatches a second", _rate(_per_s(report)), _rate(option.microbatches_per_s)),
    ]
    if report.tokens is not None:
        both = _per_s(report) * report.tokens, option.microbatches_per_s * report.tokens
        table.rows.append(("tokens a second", f"{both[0]:,.0f}", f"{both[1]:,.0f}"))
    peaks = [rank.peak_memory_bytes for rank in one.ranks]
    known = [peak for peak in peaks if peak is not None]
    table.rows.append(
        (
            "peak memory, largest rank",
            show_bytes(max(known)) if known else "–",
            show_bytes(max(_peaks(asked) or [0])) if option.headroom else "–",
        )
    )
    return table


def _rate(per_second: float) -> str:
    return f"{per_second:.1f}"


def _per_s(report: Reported) -> float:
    baseline = report.asked.baseline
    step_ns = baseline.window_ns + baseline.source.outside_ns
    return baseline.source.microbatches * NS_PER_S / step_ns


def _peaks(asked: Asked) -> list[float] | None:
    headroom = asked.option.headroom
    return None if headroom is None else [room.peak_bytes for room in headroom]


def _rank_table(report: Reported) -> Table:
    asked, one = report.asked, report.measured.pipeline
    table = Table(columns=("rank", "stage", "layers", "bubble", "was", "peak", "was", "left"))
    headroom = asked.option.headroom or (None,) * len(asked.order)
    bubbles = asked.rank_bubbles()
    rows = zip(one.ranks, one.shares, headroom, asked.order, bubbles, strict=True)
    for rank, shares, room, actions, bubble in rows:
        stages = sorted({action.stage for action in actions})
        left = None if room is None else room.bytes
        table.rows.append(
            (
                str(rank.rank),
                " ".join(map(str, stages)),
                " ".join(str(asked.split[stage]) for stage in stages) if asked.split else "–",
                show_share(bubble),
                show_share(shares.bubble_fraction),
                "–" if room is None else show_bytes(room.peak_bytes),
                "–" if rank.peak_memory_bytes is None else show_bytes(rank.peak_memory_bytes),
                "–" if left is None else show_bytes(left),
            )
        )
    return table


def _notes(report: Reported) -> list[str]:
    asked = report.asked
    about = (
        f"{asked.change.schedule or asked.baseline.schedule}; messages {asked.communication}; "
        f"against the longest rank {show_share(asked.longest_stage_bubble())}; "
        f"bubble over ideal {show_share(asked.bubble_over_ideal())}"
    )
    notes = [about]
    if not asked.changes_nothing:
        notes.append("in brackets: what four of five such runs lie in")
        if asked.correction != 1.0:
            notes.append(
                f"corrected by {_signed(asked.correction - 1, 1)}, by which what was measured "
                "differs from its own simulation"
            )
    if report.scale != 1.0:
        notes.append("microbatches a second: of the measured size")
    return [*notes, *(f"assumed: {said}" for said in _assumptions(report))]


def _assumptions(report: Reported) -> list[str]:
    asked = report.asked
    memory = asked.baseline.memory
    said = list(asked.option.assumptions)
    if memory is not None and (asked.change.microbatches or asked.change.split):
        said += memory.assumptions
    if asked.baseline.source.outside_ns and not asked.changes_nothing:
        between = show_duration(asked.baseline.source.outside_ns)
        said.append(f"between batches it takes {between}, as measured")
    return said


def what_if_json(report: Reported) -> dict[str, Any]:
    """Return the same as data."""
    asked, option = report.asked, report.asked.option
    return {
        "schema": SCHEMA,
        "given": _given_json(report),
        "numbers": _numbers_json(report),
        "interval": {"batch_latency_s": [option.low_ns / NS_PER_S, option.high_ns / NS_PER_S]},
        "measured": _measured_json(report),
        "latency_gain_fraction": option.latency_gain,
        "throughput_gain_fraction": option.throughput_gain,
        "fits_memory": option.fits_memory,
        "headroom_bytes": None
        if option.headroom is None
        else [None if room.bytes is None else round(room.bytes) for room in option.headroom],
        "theory": {
            "bubble_fraction": asked.theory(),
            "schedule_bubble_fraction": asked.theory_of_schedule(),
        },
        "longest_stage_bubble": asked.longest_stage_bubble(),
        "bubble_over_ideal": asked.bubble_over_ideal(),
        "ranks": [
            {"rank": rank.rank, "bubble_fraction": bubble}
            for rank, bubble in zip(
                report.measured.pipeline.ranks, asked.rank_bubbles(), strict=True
            )
        ],
        "correction_fraction": asked.correction - 1,
        "assumptions": _assumptions(report),
        "verdict": _answer(report),
        "warnings": [gap_json(gap) for gap in report.gaps],
    }


def _given_json(report: Reported) -> dict[str, Any]:
    """Return what was simulated."""
    asked, order = report.asked, report.asked.order
    return {
        "schedule": asked.change.schedule or asked.baseline.schedule,
        "ranks": len(order),
        "stages": asked.stages,
        "chunks": max(len({action.stage for action in actions}) for actions in order),
        "microbatches": asked.microbatches,
        "communication": str(asked.communication),
        "unit": "s",
        "passes": {
            kind: (lengths / NS_PER_S).tolist() for kind, lengths in asked.pass_lengths_ns().items()
        },
        "transfer": None,
        "split": list(asked.split) if asked.split else None,
        "tokens": None if report.tokens is None else report.tokens * report.scale,
        "change": _change(report),
    }


def _numbers_json(report: Reported) -> dict[str, Any]:
    """Return what came out."""
    asked, option = report.asked, report.asked.option
    step_ns = option.window_ns + asked.baseline.source.outside_ns
    return {
        "bubble_fraction": option.bubble_fraction,
        "batch_latency_s": option.window_ns / NS_PER_S,
        "batch_latency_units": None,
        "step_time_s": None
        if report.measured.pipeline.step_time_ns is None
        else step_ns / NS_PER_S,
        "peak_memory_bytes": _rounded(_peaks(asked)),
        "microbatches_per_s": option.microbatches_per_s,
        "tokens_per_s": _tokens(report, option.microbatches_per_s),
    }


def _measured_json(report: Reported) -> dict[str, Any]:
    """Return what it is held against."""
    one = report.measured.pipeline
    return {
        "bubble_fraction": one.bubble_fraction,
        "batch_latency_s": report.asked.baseline.window_ns / NS_PER_S,
        "step_time_s": None if one.step_time_ns is None else one.step_time_ns / NS_PER_S,
        "peak_memory_bytes": [rank.peak_memory_bytes for rank in one.ranks],
        "microbatches_per_s": _per_s(report),
        "tokens_per_s": _tokens(report, _per_s(report)),
    }


def _change(report: Reported) -> dict[str, Any]:
    change = change_json(report.asked.change)
    return {**change, "hops": list(report.hops)} if report.hops else change


def _rounded(sizes: list[float] | None) -> list[int] | None:
    return None if sizes is None else [round(size) for size in sizes]


def _tokens(report: Reported, microbatches_per_s: float) -> float | None:
    return None if report.tokens is None else microbatches_per_s * report.tokens
