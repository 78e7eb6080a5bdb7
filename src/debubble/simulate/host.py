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


@dataclass(slots=True, kw_only=True)  # not frozen: thousands are made, each in a third of the time
class Post:
    """Messages that a host posts as one batch."""

    sends: tuple[Result, ...] = ()
    receives: tuple[Result, ...] = ()
    queue: int | None = 0
    """What is on one queue of a rank keeps its order; None: it overtakes and is overtaken."""
    ahead: bool = False
    """It waits for no pass that was issued before it."""
    in_order: bool = False
    """The device starts it no sooner than the batch launched before it, on whatever queue."""
    waited: bool = False
    """The next pass waits for it, whether it needs it or not."""


HostProgram = list[Cell | Post]


@dataclass(frozen=True, slots=True)
class Wiring:
    """Which results cross from rank to rank."""

    cells: list[list[Cell]]
    home: dict[int, int]
    """The rank of each stage."""
    ahead: frozenset[int]
    """Stages whose next stage is on another rank."""
    back: frozenset[int]
    """Stages whose stage before is on another rank."""

    def sends(self, cell: Cell) -> tuple[Result, ...]:
        """Return what a cell hands on to another rank."""
        if len(cell) == 1:
            return self._sent(cell[0])
        return tuple(result for action in cell for result in self._sent(action))

    def needs(self, cell: Cell) -> tuple[Result, ...]:
        """Return what a cell needs from another rank."""
        if len(cell) == 1:
            return self._needed(cell[0])
        return tuple(result for action in cell for result in self._needed(action))

    def _sent(self, action: Action) -> tuple[Result, ...]:
        stage, kind, microbatch, _ = action
        if kind == "F":
            return (Result(stage + 1, False, microbatch),) if stage in self.ahead else ()
        if kind == "W" or stage not in self.back:
            return ()
        return (Result(stage - 1, True, microbatch),)

    def _needed(self, action: Action) -> tuple[Result, ...]:
        stage, kind, microbatch, _ = action
        if kind == "F":
            return (Result(stage, False, microbatch),) if stage in self.back else ()
        if kind == "W" or stage not in self.ahead:
            return ()
        return (Result(stage, True, microbatch),)

    def source(self, result: Result) -> int:
        """Return the rank that sends a result."""
        return self.home[result.stage + (1 if result.backward else -1)]

    def destination(self, result: Result) -> int:
        """Return the rank that needs a result."""
        return self.home[result.stage]


def wire_up(order: Order) -> Wiring:
    """Find out what an order sends from rank to rank."""
    home = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    return Wiring(
        cells=[list(cells_of(actions)) for actions in order],
        home=home,
        ahead=frozenset(one for one, rank in home.items() if home.get(one + 1, rank) != rank),
        back=frozenset(one for one, rank in home.items() if home.get(one - 1, rank) != rank),
    )


def cells_of(actions: Iterable[Action]) -> Iterator[Cell]:
    """Yield passes, those that run as one together."""
    rest = iter(actions)
    for action in rest:
        yield (action, next(rest)) if action.overlap else (action,)
