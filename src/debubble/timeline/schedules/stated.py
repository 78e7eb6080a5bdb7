"""What the user says of the schedule in → its order: a name, or a CSV file as torch writes it.

Empty cells are idle slots, and communication follows from the passes: both are left out. A pair
that runs as one is a cell of its own, `(0F7;7B3)OVERLAP_F_B`.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from typing import cast

from debubble.errors import TraceTooLarge, UsageError
from debubble.timeline.schedules.finish import check_order
from debubble.timeline.schedules.named import (
    SCHEDULES,
    Action,
    Kind,
    Order,
    can_have_chunks,
    count_stages,
    order_of,
)
from debubble.trace.source import Limits, Source
from debubble.units import counted, show_bytes, show_count

_ORDER_FILES = (".csv", ".csv.gz")
# 64 ranks, 512 microbatches and four chunks with all their communication take 10 MB.
MOST_BYTES = 32 * 1024**2
_MOST_SHOWN = 40

_PASS = re.compile(r"([0-9]{1,5})([FBIW])([0-9]{1,6})")
_PAIR = re.compile(r"\(([0-9]{1,5}F[0-9]{1,6});([0-9]{1,5}B[0-9]{1,6})\)OVERLAP_F_B")
_NO_PASS = re.compile(r"[0-9]{1,5}(?:UNSHARD|RESHARD|REDUCE_GRAD|(?:SEND|RECV)_[FB][0-9]{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A schedule as stated, before it is known what was run."""

    text: str
    """The name or the file, as the user wrote it."""
    chunks: int | None = None
    """Stages a rank, where the user said so."""
    order: Order | None = None
    """What the file holds; a name has an order only together with sizes."""

    def order_for(self, ranks: int, microbatches: int, chunks: int) -> Order:
        """Return the order for what was run, or refuse because it cannot be."""
        if self.order is None:
            forwards = microbatches * chunks
            if self.chunks is not None and self.chunks > forwards:
                raise UsageError(
                    f"a rank with {counted(self.chunks, 'chunk')} runs as many forward passes "
                    f"a step, this one runs {show_count(forwards)}",
                    hint="state the chunks of this run",
                )
            measured = chunks if can_have_chunks(self.text, chunks) else None
            return order_of(self.text, ranks, microbatches, self.chunks or measured)
        written = 1 + max(action.microbatch for actions in self.order for action in actions)
        if (len(self.order), written) != (ranks, microbatches):
            raise UsageError(
                f"the order is for {_sizes(len(self.order), written)}, "
                f"the run has {_sizes(ranks, microbatches)}",
                hint="state the order of this run",
            )
        return self.order


def state_schedule(text: str, chunks: int | None = None) -> Statement:
    """Understand what the user says: the name of a schedule, or the path of an order."""
    if text in SCHEDULES:
        count_stages(text, 1, chunks)  # refuses chunks that it cannot have
        return Statement(text=text, chunks=chunks)
    if not text.lower().endswith(_ORDER_FILES):
        raise UsageError(
            f"no schedule is called {text!r}",
            hint=f"one of {', '.join(SCHEDULES)}, or an order as a .csv file",
        )
    if chunks is not None:
        raise UsageError(
            f"{text} tells by itself how many chunks a rank has", hint="leave --chunks out"
        )
    return Statement(text=text, order=read_order(text))


def read_order(file: str) -> Order:
    """Read an order from a file or URL, packed or not, and make sure that it can finish."""
    source = Source(file, Limits(inflated_bytes=MOST_BYTES))
    try:
        content = b"".join(source.pieces())
    except TraceTooLarge:
        raise UsageError(
            f"is larger than {show_bytes(MOST_BYTES)}", hint="no order is so long", file=file
        ) from None
    if source.damage:
        raise UsageError(f"is damaged: {source.damage}", hint="write the file again", file=file)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(
            "is no text", hint="an order is a CSV file such as torchtitan takes", file=file
        ) from None
    return parse_order(text, file)


def parse_order(text: str, file: str = "") -> Order:
    """Read an order, and make sure that it can finish."""
    order: Order = []
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for cells in rows:
            actions = [
                action
                for number, cell in enumerate(cells, start=1)
                for action in _parse_cell(
                    cell.strip(), f"line {rows.line_num}, cell {number}", file
                )
            ]
            if not actions:
                raise UsageError(
                    f"line {rows.line_num}: a rank without a pass",
                    hint="each line is a rank, from the first; leave no line empty",
                    file=file,
                )
            order.append(actions)
    except csv.Error as error:
        raise UsageError(
            f"line {rows.line_num}: {error}", hint="separate cells with commas", file=file
        ) from None
    try:
        check_order(order)
    except UsageError as fault:
        raise UsageError(fault.message, hint=fault.hint, file=file) from None
    return order


def format_order(order: Order) -> str:
    """Write an order as torch's `_dump_csv` does, without idle slots and communication."""
    lines = []
    for actions in order:
        cells: list[str] = []
        before: Action | None = None
        for action in actions:
            if before is not None and before.overlap:
                cells[-1] = f"({before};{action})OVERLAP_F_B"
            else:
                cells.append(str(action))
            before = action
        lines.append(f"{','.join(cells)}\n")
    return "".join(lines)


def _parse_cell(cell: str, where: str, file: str) -> list[Action]:
    """Return the passes of a cell: one, the two of a pair, or none."""
    if not cell or _NO_PASS.fullmatch(cell):
        return []
    if pair := _PAIR.fullmatch(cell):
        return [_parse_pass(pair[1])._replace(overlap=True), _parse_pass(pair[2])]
    if _PASS.fullmatch(cell):
        return [_parse_pass(cell)]
    shown = cell if len(cell) <= _MOST_SHOWN else f"{cell[:_MOST_SHOWN]}…"
    raise UsageError(
        f"{where}: {shown!r} is no action",
        hint="write stage, F, B, I or W, microbatch: 2F0; or a pair: (0F7;7B3)OVERLAP_F_B",
        file=file,
    )


def _parse_pass(text: str) -> Action:
    found = _PASS.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return Action(int(found[1]), cast("Kind", found[2]), int(found[3]))


def _sizes(ranks: int, microbatches: int) -> str:
    return f"{counted(ranks, 'rank')} and {counted(microbatches, 'microbatch', 'microbatches')}"
