"""A `Program` and `Lengths` in → `Times` out.

A rank runs its passes one after the other. A batch of messages starts after the batch before it on
its queue and after all passes issued before it. A pass waits for the batches that bring its inputs,
and for those that its host waited for. Where a host synchronises with its device, what it issues
afterwards follows what the call waited for.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from debubble.simulate.events import NEVER_NS
from debubble.simulate.network import Columns, Edges, Network
from debubble.simulate.program import Lengths, Program, Times
from debubble.timeline.model import I64

# Many runs go through in blocks that a processor's cache can hold.
_RUNS_AT_ONCE = 256


class Engine:
    """Runs one program with any durations; refuses, when run, one that waits in a circle."""

    def __init__(self, program: Program, *, queues: bool = True) -> None:
        """Without `queues` messages overtake each other."""
        self.program = program
        p, b = len(program.passes), len(program.batches)
        # Events: starts of passes, their ends, starts of batches, their ends, ends of calls.
        self._pass_start, self._pass_end = np.arange(p), np.arange(p, 2 * p)
        self._batch_start = np.arange(2 * p, 2 * p + b)
        self._batch_end = np.arange(2 * p + b, 2 * p + 2 * b)
        self._call_end = np.arange(2 * (p + b), 2 * (p + b) + len(program.syncs))
        self._events = 2 * (p + b) + len(program.syncs)
        self._edges = (
            *self._of_passes(),
            *self._of_batches(queues=queues),
            *(self._of_hosts() if len(program.syncs) else ()),
        )
        self._first = np.flatnonzero(program.passes.before < 0)
        self._last = np.setdiff1d(np.arange(p), program.passes.before)

    def _of_passes(self) -> tuple[Edges, ...]:
        """Let a pass start after the pass before it and its inputs, and end after its start."""
        passes, messages, needs = self.program.passes, self.program.messages, self.program.needs
        waits = self.program.waits
        every, follows = np.arange(len(passes)), np.flatnonzero(passes.before >= 0)
        used = np.flatnonzero(messages.consumer >= 0)
        start, end, consumer = self._pass_start, self._pass_end, messages.consumer[used]
        arrived = self._batch_end[messages.received[used]]
        return (
            Edges(end, start, "passes", every),
            Edges(start[follows], end[passes.before[follows]], "pass_gaps", follows),
            Edges(start[consumer], arrived, "pass_gaps", consumer),
            Edges(start[needs[:, 0]], end[needs[:, 1]], "pass_gaps", needs[:, 0]),
            Edges(start[waits[:, 0]], self._batch_end[waits[:, 1]], "pass_gaps", waits[:, 0]),
        )

    def _of_batches(self, *, queues: bool) -> tuple[Edges, ...]:
        """Let a batch start after the passes before it, in its queue's order; both sides end it."""
        batches, messages = self.program.batches, self.program.messages
        after = np.flatnonzero(batches.after >= 0)
        queued = np.flatnonzero((batches.before >= 0) & queues)
        launched = np.flatnonzero((batches.launched_after >= 0) & queues)
        every, meets = np.arange(len(messages)), np.flatnonzero(messages.rendezvous)
        start, end = self._batch_start, self._batch_end
        sent, received = messages.sent, messages.received
        return (
            Edges(start[after], self._pass_end[batches.after[after]], "batch_gaps", after),
            Edges(start[queued], end[batches.before[queued]], "batch_gaps", queued),
            Edges(start[launched], start[batches.launched_after[launched]], "batch_gaps", launched),
            Edges(end[sent], start[sent], "sending", every),
            Edges(end[sent[meets]], start[received[meets]], "sending", meets),
            Edges(end[received], start[received], "drain", every),
            Edges(end[received], start[sent], "wire", every),
        )

    def _of_hosts(self) -> tuple[Edges, ...]:
        """Let a call end when the host has come to it and the device is done; and let go on."""
        syncs, end = self.program.syncs, self._call_end
        follows = np.flatnonzero(syncs.before >= 0)
        whole = np.flatnonzero((syncs.after >= 0) & ~syncs.inside)
        within = np.flatnonzero((syncs.after >= 0) & syncs.inside)
        passes = np.flatnonzero(syncs.pass_call >= 0)
        batches = np.flatnonzero(syncs.batch_call >= 0)
        call, batch = syncs.batches[:, 0], syncs.batches[:, 1]
        return (
            Edges(end[follows], end[syncs.before[follows]], "sync_host", follows),
            Edges(end[whole], self._pass_end[syncs.after[whole]], "sync_tail", whole),
            Edges(end[within], self._pass_start[syncs.after[within]], "sync_tail", within),
            Edges(end[call], self._batch_end[batch], "sync_tail", call),
            Edges(self._pass_start[passes], end[syncs.pass_call[passes]], "pass_lag", passes),
            Edges(self._batch_start[batches], end[syncs.batch_call[batches]], "batch_lag", batches),
        )

    @cached_property
    def _held(self) -> Network:
        """Events with hosts that may hold up any start."""
        starts = np.zeros(self._events, dtype=bool)
        starts[self._pass_start] = starts[self._batch_start] = starts[self._call_end] = True
        return Network(self._events, self._edges, floored=starts)

    @cached_property
    def _free(self) -> Network:
        """Events with nothing to hold up but first passes: a batch that waits for none is there."""
        passes = np.zeros(self._events, dtype=bool)
        passes[self._pass_start] = True
        waits = np.zeros(self._events, dtype=bool)
        for one in self._edges:
            waits[one.target] = True
        there = ~waits
        there[self._pass_start] = False
        used = np.concatenate([~there[one.source] for one in self._edges])
        return Network(self._events, self._edges, floored=passes, used=used)

    def run(self, lengths: Lengths) -> Times:
        """Return when everything happens; a column for each of many runs."""
        floor = self._floor(lengths)
        moments = self._network(lengths).run(lengths.columns(), floor)
        return Times(
            pass_start=moments[self._pass_start],
            pass_end=moments[self._pass_end],
            batch_start=moments[self._batch_start],
            batch_end=moments[self._batch_end],
        )

    def windows(self, lengths: Lengths) -> I64:
        """Return the window of each of many runs, and keep nothing else."""
        columns = lengths.columns()
        runs = max((one.shape[1] for one in columns.values() if one.ndim > 1), default=1)
        network, floor = self._network(lengths), self._floor(lengths)
        ends = np.concatenate((self._first, self._last))
        found = []
        for first in range(0, runs, _RUNS_AT_ONCE):
            block = slice(first, first + _RUNS_AT_ONCE)
            chosen: Columns = {
                name: one[:, block] if one.ndim > 1 else one for name, one in columns.items()
            }
            here = floor[:, block] if floor.ndim > 1 else floor
            starts = network.run_for(self._pass_start[ends], chosen, here)
            begun, last = starts[: len(self._first)], starts[len(self._first) :]
            lasted = chosen["passes"][self._last]
            last = last + (lasted[:, None] if lasted.ndim < last.ndim else lasted)
            found.append(np.atleast_1d(last.max(axis=0) - begun.min(axis=0)))
        return np.concatenate(found)

    def _network(self, lengths: Lengths) -> Network:
        held = (lengths.pass_floor > NEVER_NS)[self.program.passes.before >= 0].any()
        held |= bool(len(self._call_end)) or (lengths.batch_floor > NEVER_NS).any()
        return self._held if held else self._free

    def _floor(self, lengths: Lengths) -> I64:
        """Return the floors of all events."""
        wide = max(lengths.pass_floor.shape[1:], lengths.batch_floor.shape[1:])
        floor = np.full((self._events, *wide), NEVER_NS, dtype=np.int64)
        for rows, given in (
            (self._pass_start, lengths.pass_floor),
            (self._batch_start, lengths.batch_floor),
            (self._call_end, lengths.sync_floor),
        ):
            floor[rows] = given[:, None] if given.ndim < floor.ndim else given
        return floor
