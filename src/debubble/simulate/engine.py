"""A program and lengths in → when each thing happens: one pass of max and add, for many runs.

A rank runs its passes one after the other. A batch of messages starts after the batch before it on
its queue and after all passes issued before it. A pass waits for the batches that bring its inputs,
and for those that its host waited for. Where a host synchronises with its device, what it issues
afterwards follows what the call waited for.

    rank 0   [ F 0 ][ F 1 ]          a pass ends its length after its start,
                  └send┐             a batch starts a gap after the pass before it,
    rank 1         [recv][ F 0 ]     a receive ends a wire after the send's start

Most events wait for one other alone: they happen a fixed while after it, so edges go past them, as
long as the sum of the edges they stand for. A third to two thirds of all events are left to be run.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from debubble.simulate.events import NEVER_NS, Edges, Happened, Network, OrderCycle
from debubble.simulate.lengths import several_partners
from debubble.simulate.program import Lengths, Program, Times, in_exchange
from debubble.timeline.model import I64, Flags

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
        self._queues = queues
        self._first = np.flatnonzero(program.passes.before < 0)
        last = np.ones(p + 1, dtype=bool)
        last[program.passes.before] = False
        self._last = np.flatnonzero(last[:p])
        self._ends = self._pass_start[np.concatenate((self._first, self._last))]

    @cached_property
    def exchanged(self) -> Flags:
        """Tell messages whose two batches carry one the other way, too."""
        return in_exchange(self.program.messages.sent, self.program.messages.received)

    @cached_property
    def first_of_exchange(self) -> I64:
        """The message that stands for each: both messages of an exchange are one."""
        messages = self.program.messages
        first: I64 = np.arange(len(messages))
        two = np.flatnonzero(self.exchanged)
        lower, upper = np.sort(np.stack((messages.sent[two], messages.received[two])), axis=0)
        pair = lower * len(self.program.batches) + upper
        _, begins, number = np.unique(pair, return_index=True, return_inverse=True)
        first[two] = two[begins[number]]
        return first

    @cached_property
    def several_partners(self) -> Flags:
        """Tell messages in a batch that meets more than one other."""
        return several_partners(self.program.messages)

    def run(self, lengths: Lengths) -> Times:
        """Return when everything happens; a column for each of many runs."""
        moments = self._network(lengths).run(lengths.columns(), self._floor(lengths))
        return Times(
            pass_start=moments[self._pass_start],
            pass_end=moments[self._pass_end],
            batch_start=moments[self._batch_start],
            batch_end=moments[self._batch_end],
        )

    def windows(self, lengths: Lengths) -> I64:
        """Return the window of each of many runs, and keep nothing else."""
        columns = lengths.columns()
        runs = max((column.shape[1] for column in columns.values() if column.ndim > 1), default=1)
        network, floor = self._network(lengths), self._floor(lengths)
        found = []
        for first in range(0, runs, _RUNS_AT_ONCE):
            block = slice(first, first + _RUNS_AT_ONCE)
            chosen = {
                name: column[:, block] if column.ndim > 1 else column
                for name, column in columns.items()
            }
            starts = network.run_for(
                self._ends, chosen, floor[:, block] if floor.ndim > 1 else floor
            )
            begun, last = starts[: len(self._first)], starts[len(self._first) :]
            lasted = chosen["passes"][self._last]
            last = last + (lasted[:, None] if lasted.ndim < last.ndim else lasted)
            found.append(np.atleast_1d(last.max(axis=0) - begun.min(axis=0)))
        return np.concatenate(found)

    def waits_in_a_circle(self) -> bool:
        """Tell whether this program can never end."""
        try:
            self._free.refuse_circle()
        except OrderCycle:
            return True
        return False

    def _edges(self) -> tuple[Edges, ...]:
        """Return all that waits; large, and asked for once."""
        hosts = self._of_hosts() if len(self.program.syncs) else ()
        return (*self._of_passes(), *self._of_batches(queues=self._queues), *hosts)

    def measured(self, times: Times) -> Happened:
        """Return when everything on the devices happened in a run, and what it waited for last."""
        moments = (times.pass_start, times.pass_end, times.batch_start, times.batch_end)
        edges = (*self._of_passes(), *self._of_batches(queues=True))
        return Happened(np.concatenate(moments), edges)

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
        # What the batch before it waits for, too, has been there before that one ends.
        said = (batches.before >= 0) & (batches.after == batches.after[batches.before]) & queues
        after = np.flatnonzero((batches.after >= 0) & ~said)
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

    def _network(self, lengths: Lengths) -> Network:
        held = (lengths.pass_floor > NEVER_NS)[self.program.passes.before >= 0].any()
        held |= bool(len(self._call_end)) or (lengths.batch_floor > NEVER_NS).any()
        return self._held if held else self._free

    @cached_property
    def _held(self) -> Network:
        """Events with hosts that may hold up any start."""
        starts = np.zeros(self._events, dtype=bool)
        starts[self._pass_start] = starts[self._batch_start] = starts[self._call_end] = True
        return Network(self._events, self._edges(), floored=starts, asked=self._ends)

    @cached_property
    def _free(self) -> Network:
        """Events with nothing to hold up but first passes: a batch that waits for none is there."""
        edges = self._edges()
        there = np.ones(self._events, dtype=bool)
        there[self._pass_start] = False
        for part in edges:
            there[part.target] = False
        used = np.concatenate([~there[part.source] for part in edges])
        first = np.zeros(self._events, dtype=bool)
        first[self._pass_start[self._first]] = True
        # Of passes that follow the one before alone, every other is skipped at most: long ways back
        # take long to add up.
        program = self.program
        alone = program.passes.before >= 0
        alone[program.messages.consumer] = alone[program.needs[:, 0]] = False
        alone[program.waits[:, 0]] = False
        stays = self._pass_start[alone & alone[program.passes.before]]
        asked = np.concatenate((self._ends, stays))
        return Network(self._events, edges, floored=first, used=used, asked=asked)

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
