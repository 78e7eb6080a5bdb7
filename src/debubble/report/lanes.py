"""A framed step in → lanes of text.

Every column of a lane says which pass had most of it, by letter and by microbatch, so that a wrong
label stands out without colour too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from debubble.ledger.account import Wait
from debubble.ledger.causes import Cause
from debubble.report.frame import Frame, decimals_of, round_distance
from debubble.report.palette import KINDS
from debubble.timeline.model import I64, Passes, PassKind, RankTimeline, Transfers
from debubble.units import NS_PER_MS, show_duration

# Where stdout is no terminal: wide enough for passes, narrow enough for a mail.
PLAIN_WIDTH = 100
_NARROWEST = 40

_WAIT, _WIRE, _BLANK = "·", "=", " "
# Neighbouring microbatches differ in shade, kinds in colour.
_STYLES = {
    "F": ("black on blue", "black on bright_blue"),
    "B": ("black on green", "black on bright_green"),
    "I": ("black on cyan", "black on bright_cyan"),
    "W": ("black on yellow", "black on bright_yellow"),
}
# What a rank waits for; the signs differ without colour, too.
_SIGNS = {cause: cause.about.sign for cause in Cause if cause.about.sign}
_WAIT_STYLES = {cause.about.sign: cause.about.style for cause in _SIGNS}
# A tick's label and some air.
_TICK_COLUMNS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """The time that is drawn, and how."""

    step: int
    begin_ns: int
    edges_ns: I64
    """Of the columns, after the begin; one more than columns."""
    margin: int
    units: str

    @property
    def column_ns(self) -> float:
        return float(self.edges_ns[-1]) / (len(self.edges_ns) - 1)

    @property
    def column(self) -> str:
        if not self.units:
            return show_duration(self.column_ns)
        return f"{self.column_ns / NS_PER_MS:.3g} {self.units}"


def draw_lanes(frame: Frame, width: int, *, units: str = "") -> list[Text]:
    """Draw a step in lines no wider than `width`; each column in which a rank waits shows why.

    `units` says what a millisecond stands for, where a simulated run has no times but ratios.
    """
    margin = max(len(f"rank {rank.rank} ") for rank in frame.ranks)
    columns = max(width, _NARROWEST) - margin
    view = _View(
        step=frame.step,
        begin_ns=frame.begin_ns,
        edges_ns=np.rint(np.linspace(0, frame.length_ns, columns + 1)).astype(np.int64),
        margin=margin,
        units=units,
    )
    lines = [Text(f"{frame.name}; a column is {view.column}")]
    for rank in frame.ranks:
        arrivals = frame.transfers.where(frame.transfers.destination == rank.rank)
        held = frame.passes.where(frame.passes.rank == rank.rank)
        waits = [wait for wait in frame.waits if wait.rank == rank.rank]
        idle = _idle(arrivals, waits, view)
        lines += _lane(held, idle, rank, view)
    lines.append(Text(_axis(view), style="dim"))
    return [*lines, *_legend(frame, margin + columns), *_longest(frame.waits)]


def _idle(arrivals: Transfers, waits: Sequence[Wait], view: _View) -> NDArray[np.str_]:
    """Return what stands for waiting in each column: its main cause, or wire and no wire."""
    if waits:
        start = np.array([wait.start_ns for wait in waits], dtype=np.int64)
        end = np.array([wait.end_ns for wait in waits], dtype=np.int64)
        share = _share(start, end, view)
        causes = list(_SIGNS)
        by_cause = np.zeros((len(causes), share.shape[1]))
        np.add.at(by_cause, [causes.index(wait.cause) for wait in waits], share)
        signs = np.array([_SIGNS[cause] for cause in causes])
        return np.where(by_cause.any(axis=0), signs[by_cause.argmax(axis=0)], _BLANK)
    both_there = arrivals.met_ns
    wired = _share(both_there, arrivals.receive_end_ns, view).sum(axis=0) >= 0.5
    return np.where(wired, _WIRE, _WAIT)


def _longest(waits: Sequence[Wait]) -> list[Text]:
    """Name whom the longest wait of the step was for."""
    named = [wait for wait in waits if wait.waits_for]
    if not named:
        return []
    longest = max(named, key=lambda wait: wait.end_ns - wait.start_ns)
    length, why = show_duration(longest.end_ns - longest.start_ns), longest.cause.replace("_", " ")
    return [Text(f"longest: rank {longest.rank} waits {length} for {longest.waits_for} ({why})")]


def _lane(passes: Passes, idle: NDArray[np.str_], rank: RankTimeline, view: _View) -> list[Text]:
    """Draw a rank: letters, under them microbatches and, where it holds several, stages."""
    owner = _owners(passes, view)
    kinds = [PassKind(kind).name for kind in passes.kind.tolist()]
    others = passes.step != view.step
    letters = [kind.lower() if other else kind for kind, other in zip(kinds, others, strict=True)]
    styles = [
        _STYLES[kind][number % 2]
        for kind, number in zip(kinds, passes.microbatch.tolist(), strict=True)
    ]
    lines = [
        _paint(f"rank {rank.rank}", letters, styles, owner, idle, view),
        _paint("mb", _digits(passes.microbatch), styles, owner, None, view),
    ]
    if len(rank.stages) > 1:
        lines.append(_paint("stage", _digits(passes.stage), styles, owner, None, view))
    return lines


def _digits(numbers: np.ndarray[tuple[int], np.dtype[np.int32]]) -> list[str]:
    return [str(number % 10) if number >= 0 else "?" for number in numbers.tolist()]


def _owners(passes: Passes, view: _View) -> I64:
    """Return which pass has most of each column; -1 where waiting has."""
    if not len(passes):
        return np.full(len(view.edges_ns) - 1, -1)
    share = _share(passes.start_ns, passes.end_ns, view)
    return np.where(share.sum(axis=0) >= 0.5, share.argmax(axis=0), -1)


def _share(start: I64, end: I64, view: _View) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return how much of each column (across) each interval (down) covers."""
    first, last = view.edges_ns[:-1], view.edges_ns[1:]
    start, end = start - view.begin_ns, end - view.begin_ns
    covered = np.minimum(end[:, None], last) - np.maximum(start[:, None], first)
    share: np.ndarray[tuple[int, int], np.dtype[np.float64]] = np.maximum(covered, 0) / np.maximum(
        last - first, 1
    )
    return share


def _paint(  # noqa: PLR0913, PLR0917 (a row of the drawing)
    name: str,
    signs: list[str],
    styles: list[str],
    owner: I64,
    idle: NDArray[np.str_] | None,
    view: _View,
) -> Text:
    """Write one row: the sign of each column's pass, or what stands for waiting."""
    line = Text(f"{name:>{view.margin - 1}} ")
    for column, row in enumerate(owner.tolist()):
        if row >= 0:
            line.append(signs[row], style=styles[row])
        else:
            sign = _BLANK if idle is None else str(idle[column])
            line.append(sign, style=_WAIT_STYLES.get(sign, "dim"))
    return line


def _axis(view: _View) -> str:
    """Write the time in ms, or in units, under the columns, at round distances."""
    columns = len(view.edges_ns) - 1
    column_ms = view.column_ns / NS_PER_MS
    unit = f" {view.units or 'ms'}"
    apart = round_distance(_TICK_COLUMNS * column_ms)
    decimals = decimals_of(apart)
    # The first label has the unit as well, and the next begins after it.
    if len(f"|{0:.{decimals}f}{unit}") * column_ms >= apart:
        apart = round_distance(2 * apart)
        decimals = decimals_of(apart)
    cells = [_BLANK] * (view.margin + columns)
    for tick in range(int(columns * column_ms / apart) + 1):
        label = f"|{tick * apart:.{decimals}f}" + (unit if tick == 0 else "")
        at = view.margin + round(tick * apart / column_ms)
        if at + len(label) <= len(cells):
            cells[at : at + len(label)] = label
    return "".join(cells).rstrip()


def _legend(frame: Frame, width: int) -> list[Text]:
    passes, waits = frame.passes, frame.waits
    seen = {wait.cause for wait in waits}
    entries = [
        (kind.name, _STYLES[kind.name][0], look.word)
        for kind, look in KINDS.items()
        if (passes.kind == kind).any()
    ]
    entries += [
        (sign, _WAIT_STYLES.get(sign, "dim"), cause.word)
        for cause, sign in _SIGNS.items()
        if cause in seen
    ]
    if not waits:
        entries += [(_WAIT, "", "wait"), (_WIRE, "", "wire")]
    lines = [Text()]
    for sign, style, word in [*entries, ("mb", "", "microbatch")]:
        entry = Text.assemble((sign, style), f" {word}")
        if lines[-1] and len(lines[-1]) + 2 + len(entry) > width:
            lines.append(entry)
        else:
            lines[-1] = Text("  ").join([lines[-1], entry]) if lines[-1] else entry
    more = []
    if passes.microbatch.max(initial=0) > 9 or max(max(r.stages) for r in frame.ranks) > 9:
        more.append("numbers: last digit")
    if (passes.step != frame.step).any():
        more.append("lower case: another step")
    return [*lines, Text("  ".join(more))] if more else lines
