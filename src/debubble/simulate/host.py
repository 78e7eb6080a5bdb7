"""An order in → what each pass hands on and needs: the words in which a host's program is written.

A host runs cells, a pass or a pair that overlaps, and between them posts messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from debubble.schedules import Action, Order

Cell = tuple[Action, ...]
"""A pass, or two that run as one: both inputs are needed, both results come at the end."""


class Result(NamedTuple):
    """What a pass hands on to a neighbouring stage."""

    stage: int
    """That needs it."""
    backward: bool
    """A gradient; else activations."""
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Messages that a host posts as one batch."""

    sends: tuple[Result, ...] = ()
    receives: tuple[Result, ...] = ()
    queue: int | None = 0
    """What is on one queue of a rank keeps its order; None: it overtakes and is overtaken."""
    ahead: bool = False
    """It waits for no pass that was issued before it."""


HostProgram = list[Cell | Post]


@dataclass(frozen=True, slots=True)
class Wiring:
    """Which results cross from rank to rank."""

    cells: list[list[Cell]]
    home: dict[int, int]
    """The rank of each stage."""

    def sends(self, cell: Cell) -> Iterator[Result]:
        """Yield what a cell hands on to another rank."""
        for stage, kind, microbatch, _ in cell:
            target = stage + 1 if kind == "F" else stage - 1
            if kind != "W" and self._crosses(stage, target):
                yield Result(target, kind != "F", microbatch)

    def needs(self, cell: Cell) -> Iterator[Result]:
        """Yield what a cell needs from another rank."""
        for stage, kind, microbatch, _ in cell:
            source = stage - 1 if kind == "F" else stage + 1
            if kind != "W" and self._crosses(stage, source):
                yield Result(stage, kind != "F", microbatch)

    def source(self, result: Result) -> int:
        """Return the rank that sends a result."""
        return self.home[result.stage + (1 if result.backward else -1)]

    def destination(self, result: Result) -> int:
        """Return the rank that needs a result."""
        return self.home[result.stage]

    def _crosses(self, stage: int, neighbour: int) -> bool:
        return self.home.get(neighbour, self.home[stage]) != self.home[stage]


def wire_up(order: Order) -> Wiring:
    """Find out what an order sends from rank to rank."""
    home = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    return Wiring([list(cells_of(actions)) for actions in order], home)


def cells_of(actions: Iterable[Action]) -> Iterator[Cell]:
    """Yield passes, those that run as one together."""
    rest = iter(actions)
    for action in rest:
        yield (action, next(rest)) if action.overlap else (action,)
