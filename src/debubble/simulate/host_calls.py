"""What hosts did in a measured step in → which of their calls hold up what, and for how long.

A host that runs ahead issues at times of its own. One that synchronises follows its device: what it
issues next is tied to the work that the call waited for. Recorded of Megatron, whose hosts do so
after every exchange (`batch_p2p_sync`), in milliseconds:

    38.3  send and receive issued     on the device from 40.5 to 92.1
    38.6  cudaDeviceSynchronize       returns at 92.1
    93.1  first kernel of B issued    1.0 after the call, whenever that returns

What is concluded: the call waits for that batch (it is over when the call returns), so in a replay
it ends when the batch does; B is issued 1.0 after it, not at 93.1. Had the batch ended at 60, B
would have been issued at 61. Times copied from the trace would hold the device to what was
measured: docs/explanation/where-the-time-goes.md, "Hosts take part".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.simulate.events import NEVER_NS
from debubble.simulate.program import NONE, BatchTable, PassTable, SyncTable, no_syncs
from debubble.timeline.model import I64, NEVER_WAITED_NS, Flags, Passes, RankTimeline

# Stamps of host and device are laid together to about so much; a call returns as late as that.
_STAMPS_NS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Passes and batches of a step with the times of host and device, on one clock."""

    passes: Passes
    table: PassTable
    batches: BatchTable
    batch_issued_ns: I64
    batch_waited_ns: I64
    batch_end_ns: I64
    pass_start_ns: I64
    pass_end_ns: I64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call that kept a host: what it waited for, and how long things took around it."""

    after: int
    """The pass that it waited for; -1 for none."""
    inside: bool
    batches: tuple[int, ...]
    host_ns: int
    tail_ns: int
    start_ns: int
    end_ns: int


def find_waits(hosts: Hosts) -> I64:
    """Return the first pass issued after each wait for a batch, and that batch."""
    pairs = []
    for place in np.unique(hosts.table.place).tolist():
        rows = _in_order(hosts.table.place == place, hosts.passes.issued_ns)
        mine = np.flatnonzero(
            (hosts.batches.place == place) & (hosts.batch_waited_ns < NEVER_WAITED_NS // 2)
        )
        after = np.searchsorted(hosts.passes.issued_ns[rows], hosts.batch_waited_ns[mine])
        pairs += [
            (int(rows[number]), batch)
            for number, batch in zip(after.tolist(), mine.tolist(), strict=True)
            if number < len(rows) and hosts.batch_end_ns[batch] <= hosts.pass_start_ns[rows[number]]
        ]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def find_syncs(
    hosts: Hosts, ranks: tuple[RankTimeline, ...], begin_ns: int
) -> tuple[SyncTable, dict[str, I64]]:
    """Return the calls that kept hosts during a step, and the lengths that go with them.

    Of a pass or batch that follows a call, the moment of its issue counts from that call's end;
    others keep theirs.
    """
    none = no_syncs(len(hosts.passes), len(hosts.batches))
    pass_call, batch_call = none.pass_call, none.batch_call
    calls: list[_Call] = []
    place: list[int] = []
    before: list[int] = []
    for here, rank in enumerate(ranks):
        rows = _in_order(hosts.table.place == here, hosts.passes.issued_ns)
        mine = _in_order(hosts.batches.place == here, hosts.batch_issued_ns)
        found = _calls_of(hosts, rank, rows, mine)
        if not found:
            continue
        begun = np.array([call.start_ns for call in found])
        numbers = len(calls) + np.arange(len(found))
        for targets, called, issued in (
            (rows, pass_call, hosts.passes.issued_ns[rows]),
            (mine, batch_call, hosts.batch_issued_ns[mine]),
        ):
            latest = np.searchsorted(begun, issued) - 1
            called[targets] = np.where(latest >= 0, numbers[np.maximum(latest, 0)], NONE)
        before += [NONE, *numbers[:-1].tolist()]
        place += [here] * len(found)
        calls += found
    if not calls:
        return none, {}
    waits = [(number, batch) for number, call in enumerate(calls) for batch in call.batches]
    table = SyncTable(
        place=np.array(place, dtype=np.int32),
        before=np.array(before, dtype=np.int64),
        after=np.array([call.after for call in calls], dtype=np.int64),
        inside=np.array([call.inside for call in calls], dtype=bool),
        batches=np.array(waits, dtype=np.int64).reshape(-1, 2),
        pass_call=pass_call,
        batch_call=batch_call,
    )
    start, end, host, tail = np.array(
        [(call.start_ns, call.end_ns, call.host_ns, call.tail_ns) for call in calls], dtype=np.int64
    ).T
    return table, {
        "pass_lag": np.where(pass_call >= 0, hosts.passes.issued_ns - end[pass_call], NEVER_NS),
        "batch_lag": np.where(batch_call >= 0, hosts.batch_issued_ns - end[batch_call], NEVER_NS),
        "sync_host": host,
        "sync_tail": tail,
        "sync_floor": np.where(table.before < 0, start - begin_ns, NEVER_NS),
    }


def _in_order(mine: Flags, issued_ns: I64) -> I64:
    rows = np.flatnonzero(mine)
    return rows[np.argsort(issued_ns[rows], kind="stable")]


def _calls_of(hosts: Hosts, rank: RankTimeline, rows: I64, mine: I64) -> list[_Call]:
    """List the calls of one rank between the first and the last thing that it issued in the step.

    A call waits for the last pass issued before it: to its end, or, where it lies in the midst of
    that pass, to what had been launched of it. One for the whole device waits for messages as well.
    """
    passes_ns, batches_ns = hosts.passes.issued_ns[rows], hosts.batch_issued_ns[mine]
    if not len(rows):
        return []
    first = min(int(passes_ns[0]), int(batches_ns.min(initial=passes_ns[0])))
    last = max(int(passes_ns[-1]), int(batches_ns.max(initial=passes_ns[-1])))
    calls = rank.synchronisations
    found: list[_Call] = []
    reached = 0
    for call in np.flatnonzero((calls.start_ns > first) & (calls.start_ns < last)).tolist():
        start, end = int(calls.start_ns[call]), int(calls.end_ns[call])
        number = int(np.searchsorted(passes_ns, start)) - 1
        waited = int(rows[number]) if number >= 0 else NONE
        if waited >= 0 and hosts.pass_start_ns[waited] > end:
            waited = NONE  # another stream's call: it returned before that pass began
        inside = waited >= 0 and bool(hosts.pass_end_ns[waited] > end + _STAMPS_NS)
        done = start
        if waited >= 0:
            done = int((hosts.pass_start_ns if inside else hosts.pass_end_ns)[waited])
        batches: tuple[int, ...] = ()
        if calls.whole[call] and not inside:
            until = int(np.searchsorted(batches_ns, start))
            over = hosts.batch_end_ns[mine[reached:until]] <= end + _STAMPS_NS
            batches = tuple(mine[reached:until][over].tolist())
            done = max([done, *hosts.batch_end_ns[list(batches)].tolist()])
            reached = until
        held = inside or done > start
        since = found[-1].end_ns if found else start
        found.append(
            _Call(
                after=waited,
                inside=inside,
                batches=batches,
                host_ns=start - since + (0 if held else end - start),
                tail_ns=max(0, end - done) if held else 0,
                start_ns=start,
                end_ns=end,
            )
        )
    return found
