"""A `Program` and `Lengths` in → `Times` out.

A rank runs its passes one after the other. A batch of messages starts after the batch before it on
its queue and after all passes issued before it. A pass waits for the batches that bring its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.simulate.events import NEVER_NS, EventGraph
from debubble.simulate.program import Lengths, Program, Times
from debubble.timeline.model import I64


@dataclass(frozen=True, slots=True)
class _Edges:
    """Events that wait for others, and which of the lengths lies between."""

    target: I64
    source: I64
    length: str
    rows: I64


class Engine:
    """Runs one program with any durations."""

    def __init__(self, program: Program, *, queues: bool = True) -> None:
        """Without `queues` messages overtake each other."""
        self.program = program
        p, b = len(program.passes), len(program.batches)
        # Events: starts of passes, their ends, starts of batches, their ends.
        self._pass_start, self._pass_end = np.arange(p), np.arange(p, 2 * p)
        self._batch_start = np.arange(2 * p, 2 * p + b)
        self._batch_end = np.arange(2 * p + b, 2 * p + 2 * b)
        self._edges = (*self._of_passes(), *self._of_batches(queues=queues))
        self._graph = EventGraph(
            2 * (p + b),
            np.concatenate([edges.target for edges in self._edges]),
            np.concatenate([edges.source for edges in self._edges]),
        )

    def _of_passes(self) -> tuple[_Edges, ...]:
        """Let a pass start after the pass before it and its inputs, and end after its start."""
        passes, messages, needs = self.program.passes, self.program.messages, self.program.needs
        every, follows = np.arange(len(passes)), np.flatnonzero(passes.before >= 0)
        used = np.flatnonzero(messages.consumer >= 0)
        start, end, consumer = self._pass_start, self._pass_end, messages.consumer[used]
        arrived = self._batch_end[messages.received[used]]
        return (
            _Edges(end, start, "passes", every),
            _Edges(start[follows], end[passes.before[follows]], "pass_gaps", follows),
            _Edges(start[consumer], arrived, "pass_gaps", consumer),
            _Edges(start[needs[:, 0]], end[needs[:, 1]], "pass_gaps", needs[:, 0]),
        )

    def _of_batches(self, *, queues: bool) -> tuple[_Edges, ...]:
        """Let a batch start after the passes before it, in its queue's order; both sides end it."""
        batches, messages = self.program.batches, self.program.messages
        after = np.flatnonzero(batches.after >= 0)
        queued = np.flatnonzero((batches.before >= 0) & queues)
        every, meets = np.arange(len(messages)), np.flatnonzero(messages.rendezvous)
        start, end = self._batch_start, self._batch_end
        sent, received = messages.sent, messages.received
        return (
            _Edges(start[after], self._pass_end[batches.after[after]], "batch_gaps", after),
            _Edges(start[queued], end[batches.before[queued]], "batch_gaps", queued),
            _Edges(end[sent], start[sent], "sending", every),
            _Edges(end[sent[meets]], start[received[meets]], "sending", meets),
            _Edges(end[received], start[received], "drain", every),
            _Edges(end[received], start[sent], "wire", every),
        )

    def run(self, lengths: Lengths) -> Times:
        """Return when everything happens; a column for each of many runs."""
        columns = lengths.columns()
        runs = {column.shape[1] for column in columns.values() if column.ndim > 1}
        shape = (runs.pop(),) if runs else ()
        full = {
            name: np.broadcast_to(
                column[:, None] if column.ndim <= len(shape) else column, (len(column), *shape)
            )
            for name, column in columns.items()
        }
        after = np.concatenate([full[edges.length][edges.rows] for edges in self._edges])
        floor = np.full((self._graph.events, *shape), NEVER_NS, dtype=np.int64)
        floor[self._pass_start] = full["pass_floor"]
        floor[self._batch_start] = full["batch_floor"]
        moments = self._graph.run(after, floor)
        return Times(
            pass_start=moments[self._pass_start],
            pass_end=moments[self._pass_end],
            batch_start=moments[self._batch_start],
            batch_end=moments[self._batch_end],
        )
