"""Events, and edges whose lengths have names, in → a graph that is shortened once, run often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from debubble.simulate.events import Delays, EventGraph
from debubble.simulate.shortcuts import Sums, shorten
from debubble.timeline.model import I64, Flags

Columns = Mapping[str, I64]
"""Lengths by name; a second dimension holds many runs."""


@dataclass(frozen=True, slots=True)
class Edges:
    """Events that wait for others, and which rows of which lengths lie between."""

    target: I64
    source: I64
    length: str
    rows: I64


class Network:
    """Runs one set of events with any lengths."""

    def __init__(
        self, events: int, edges: tuple[Edges, ...], *, floored: Flags, used: Flags | None = None
    ) -> None:
        """Only `floored` events, and such without sources, may have floors; unused edges go."""
        self._events = events
        target = np.concatenate([one.target for one in edges])
        source = np.concatenate([one.source for one in edges])
        number = np.concatenate([np.full(len(one.rows), n) for n, one in enumerate(edges)])
        rows = np.concatenate([one.rows for one in edges])
        if used is not None:
            target, source, number, rows = (one[used] for one in (target, source, number, rows))
        short = shorten(events, target, source, ~floored)
        self._kept, self._skipped, self._anchor = short.kept, short.skipped, short.anchor
        self._graph = EventGraph(len(short.kept), short.target, short.source, floored[short.kept])
        stands = np.argsort(self._graph.edge_order)
        names = [one.length for one in edges]
        sums = Sums(new=stands[short.sums.new], old=short.sums.old)
        self._after = _Totals(len(short.target), sums, names, number, rows)
        self._of_later = len(short.skipped), short.skipped_sums, names, number, rows
        self._number = np.full(events, -1)
        self._number[short.kept] = np.arange(len(short.kept))

    @cached_property
    def _later(self) -> _Totals:
        """When what was skipped happens; many runs never ask."""
        return _Totals(*self._of_later)

    def run(self, columns: Columns, floor_ns: I64) -> I64:
        """Return when every event happens."""
        kept = self._graph.run_delays(self._after.of(columns), floor_ns[self._kept])
        later = self._later.of(columns)
        moments = np.empty((self._events, *kept.shape[1:]), dtype=np.int64)
        moments[self._kept] = kept
        steady = later.steady[:, None] if kept.ndim > 1 else later.steady
        moments[self._skipped] = kept[self._anchor] + steady
        if len(later.rows):
            moments[self._skipped[later.rows]] += later.varied
        return moments

    def run_for(self, wanted: I64, columns: Columns, floor_ns: I64) -> I64:
        """Return when some events happen that may have floors, and no others."""
        after, floor = self._after.of(columns), floor_ns[self._kept]
        return self._graph.run_delays(after, floor, self._number[wanted])


class _Totals:
    """Adds up lengths by name."""

    def __init__(self, count: int, sums: Sums, names: list[str], number: I64, rows: I64) -> None:
        self._count = count
        self._parts: dict[str, list[tuple[I64, I64]]] = {}
        """What to add to which total, and from which rows; totals in ascending order."""
        for name in dict.fromkeys(names):
            numbers = [one for one, other in enumerate(names) if other == name]
            mine = np.flatnonzero(np.isin(number[sums.old], numbers))
            chosen = [mine[part] for part in _without_repeats(sums.new[mine])]
            self._parts[name] = [(sums.new[one], rows[sums.old[one]]) for one in chosen]

    def of(self, columns: Columns) -> Delays:
        """Return the totals; those alone in two dimensions of which a part is."""
        total = np.zeros(self._count, dtype=np.int64)
        varies = np.zeros(self._count, dtype=bool)
        wide = []
        for name, parts in self._parts.items():
            for new, rows in parts:
                if columns[name].ndim > 1:
                    varies[new] = True
                    wide.append((new, rows, columns[name]))
                else:
                    total[new] += columns[name][rows]
        chosen = np.flatnonzero(varies)
        if not wide:
            return Delays(steady=total, rows=chosen, varied=total[:0])
        return Delays(steady=total, rows=chosen, varied=_add_up(chosen, wide))


def _add_up(chosen: I64, parts: list[tuple[I64, I64, I64]]) -> I64:
    """Return what is added to the chosen totals in each run."""
    new, rows, column = parts[0]
    if len(new) == len(chosen):
        total, parts = column[rows], parts[1:]
    else:
        total = np.zeros((len(chosen), column.shape[1]), dtype=np.int64)
    for new, rows, column in parts:
        total[np.searchsorted(chosen, new)] += column[rows]
    return total


def _without_repeats(numbers: I64) -> Iterator[I64]:
    """Yield rows of numbers, in as many parts as a number is there, none twice in a part."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    place = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    for part in range(int(place.max(initial=-1)) + 1):
        yield order[place == part]
