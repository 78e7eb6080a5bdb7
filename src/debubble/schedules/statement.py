"""What a user says the schedule is, a name or a CSV file, in → the order that a run should have."""

from __future__ import annotations

from dataclasses import dataclass

from debubble.errors import UsageError
from debubble.schedules.model import Order
from debubble.schedules.order_csv import read_order
from debubble.schedules.registry import SCHEDULES, can_have_chunks, order_of, placement_of
from debubble.units import counted

_ORDER_FILES = (".csv", ".csv.gz")


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
            measured = chunks if can_have_chunks(self.text, chunks) else None
            return order_of(self.text, ranks, microbatches, self.chunks or measured)
        written = 1 + max(action.microbatch for actions in self.order for action in actions)
        if (len(self.order), written) != (ranks, microbatches):
            stated = _sizes(len(self.order), written)
            raise UsageError(
                f"the order is for {stated}, the run has {_sizes(ranks, microbatches)}",
                hint="state the order of this run",
            )
        return self.order


def _sizes(ranks: int, microbatches: int) -> str:
    return f"{counted(ranks, 'rank')} and {counted(microbatches, 'microbatch', 'microbatches')}"


def state_schedule(text: str, chunks: int | None = None) -> Statement:
    """Understand what the user says: the name of a schedule, or the path of an order."""
    if text in SCHEDULES:
        placement_of(text, 1, chunks)  # refuses chunks that it cannot have
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
