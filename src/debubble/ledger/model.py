"""The types of the ledger: intervals that each stand under one cause, and who was waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from debubble.ledger.causes import CAUSES, NUMBER_OF, Cause, RootKind
from debubble.simulate.measured import MeasuredStep
from debubble.timeline.model import I32, I64, U8, Flags, PassKind, RankTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Intervals that cover ranks and window exactly, sorted by rank and start."""

    place: I32
    start_ns: I64
    """From the start of the window."""
    end_ns: I64
    cause: U8
    root_kind: U8
    root: I32
    """The row of the pass or message waited for; the place of the rank whose host was late."""
    queued: Flags
    """Somewhere on the way a message stood behind another one in its queue."""

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def length_ns(self) -> I64:
        """How long each is."""
        length: I64 = self.end_ns - self.start_ns
        return length

    def where(self, kept: Flags | I64) -> Account:
        """Return a part of the rows."""
        return Account(**{column.name: getattr(self, column.name)[kept] for column in fields(self)})

    def total_of(self, cause: Cause) -> int:
        """Return the nanoseconds under a cause."""
        return int(self.length_ns[self.cause == NUMBER_OF[cause]].sum())

    def totals(self) -> dict[Cause, int]:
        """Return the nanoseconds under every cause."""
        sums = np.zeros(len(CAUSES), dtype=np.int64)
        np.add.at(sums, self.cause, self.length_ns)
        return dict(zip(CAUSES, sums.tolist(), strict=True))


_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A wait to look at in a viewer: the waiting rank's file, the moment, the length."""

    file: str
    ts_us: float
    dur_us: float
    rank: int
    waits_for: str
    """`3B5` for a pass (stage, kind, microbatch), `2→3` for a hop, empty for a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """Something that ranks waited for under one cause."""

    cause: Cause
    rank: int
    """Whose pass or host it was; the sender's of a hop."""
    stage: int | None = None
    kind: str | None = None
    hop: tuple[int, int] | None = None
    """Sending and receiving rank."""
    wait_ns: int
    """All ranks and steps together."""
    examples: tuple[Example, ...] = ()


def find_culprits(
    steps: Sequence[MeasuredStep],
    accounts: Sequence[Account],
    ranks: tuple[RankTimeline, ...],
    waiter: int | None = None,
    most: int | None = None,
) -> tuple[Culprit, ...]:
    """List whom ranks waited for, the longest first; or the `most` that one rank (by place) did.

    A pipeline of hundreds of stages has millions of waits: they are grouped as columns, and only
    examples are looked at one by one.
    """
    kept = [_waits_of(account, waiter) for account in accounts]
    number = np.repeat(np.arange(len(steps)), [len(rows) for rows in kept])
    rows = np.concatenate(kept) if kept else np.zeros(0, dtype=np.intp)
    if not len(rows):
        return ()
    pairs = list(zip(steps, accounts, kept, strict=True))
    columns = np.concatenate([_identities(*pair) for pair in pairs], axis=1)
    length = np.concatenate([account.length_ns[mine] for _, account, mine in pairs])
    group = np.zeros(len(rows), dtype=np.int64)
    for column in columns:
        _, value = np.unique(column, return_inverse=True)
        _, group = np.unique(group * (int(value.max()) + 1) + value, return_inverse=True)
    total = np.zeros(int(group.max()) + 1, dtype=np.int64)
    np.add.at(total, group, length)
    longest_first = np.lexsort((-length, group))  # stable: of equal ones, the earlier
    begins = np.searchsorted(group[longest_first], np.arange(len(total)))
    first = np.full(len(total), len(rows))
    np.minimum.at(first, group, np.arange(len(rows)))
    cause, rank = columns[0][first], columns[1][first]
    names = np.array([str(each) for each in CAUSES])[cause]
    found = []
    for row in np.lexsort((first, rank, names, -total))[:most].tolist():
        mine = longest_first[begins[row] : begins[row] + _EXAMPLES]
        examples = [
            _example(steps[number[at]], accounts[number[at]], int(rows[at]), ranks)
            for at in mine[group[mine] == row].tolist()
        ]
        _, _, stage, kind, destination = columns[:, first[row]].tolist()
        found.append(
            Culprit(
                cause=CAUSES[cause[row]],
                rank=int(rank[row]),
                stage=None if stage < 0 else stage,
                kind=None if kind < 0 else PassKind(kind).name,
                hop=None if destination < 0 else (int(rank[row]), destination),
                wait_ns=int(total[row]),
                examples=tuple(examples),
            )
        )
    return tuple(found)


def _waits_of(account: Account, waiter: int | None) -> NDArray[np.intp]:
    """Return the rows that waited for something: of all, or of one rank."""
    first, last = 0, len(account)
    if waiter is not None:
        first, last = np.searchsorted(account.place, (waiter, waiter + 1)).tolist()
    return first + np.flatnonzero(account.root_kind[first:last] != RootKind.NOTHING)


def _identities(step: MeasuredStep, account: Account, rows: NDArray[np.intp]) -> I64:
    """Return what makes waits those for the same: cause, rank, stage, kind of pass, receiver."""
    program, root = step.program, account.root[rows]
    ranks = np.array(program.ranks, dtype=np.int64)
    found = np.full((5, len(rows)), -1, dtype=np.int64)
    found[0] = account.cause[rows]
    kind = account.root_kind[rows]
    passes, messages = kind == RootKind.PASS, kind == RootKind.MESSAGE
    of_rank = ~passes & ~messages
    found[1, passes] = ranks[program.passes.place[root[passes]]]
    found[2, passes] = program.passes.stage[root[passes]]
    found[3, passes] = program.passes.kind[root[passes]]
    places = program.batches.place
    found[1, messages] = ranks[places[program.messages.sent[root[messages]]]]
    found[4, messages] = ranks[places[program.messages.received[root[messages]]]]
    found[1, of_rank] = ranks[root[of_rank]]
    return found


def _name(step: MeasuredStep, account: Account, row: int) -> str:
    """Name the very pass or hop of a wait; nothing for a host."""
    program, root = step.program, int(account.root[row])
    if account.root_kind[row] == RootKind.PASS:
        passes = program.passes
        return f"{passes.stage[root]}{PassKind(passes.kind[root]).name}{passes.microbatch[root]}"
    if account.root_kind[row] == RootKind.MESSAGE:
        ranks, places = program.ranks, program.batches.place
        source = ranks[places[program.messages.sent[root]]]
        return f"{source}→{ranks[places[program.messages.received[root]]]}"
    return ""


def name_root(step: MeasuredStep, account: Account, row: int) -> str:
    """Name what a row of the account waited for; nothing where nobody knows."""
    kind = account.root_kind[row]
    if kind == RootKind.NOTHING:
        return ""
    name = _name(step, account, row)
    if name:
        return name
    rank = step.program.ranks[int(account.root[row])]
    return f"host of rank {rank}" if kind in {RootKind.HOST, RootKind.HOST_SYNC} else f"rank {rank}"


def _example(
    step: MeasuredStep, account: Account, row: int, ranks: tuple[RankTimeline, ...]
) -> Example:
    waiting = ranks[account.place[row]]
    return Example(
        file=waiting.file,
        ts_us=waiting.stamp_us(step.begin_ns + int(account.start_ns[row])),
        dur_us=int(account.end_ns[row] - account.start_ns[row]) / 1000,
        rank=waiting.rank,
        waits_for=_name(step, account, row),
    )
