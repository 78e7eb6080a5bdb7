"""The types of the ledger: intervals that each stand under one cause, and who was waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

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

    def where(self, kept: Flags) -> Account:
        """Return a part of the rows."""
        return Account(**{one.name: getattr(self, one.name)[kept] for one in fields(self)})

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


Identity = tuple[Cause, int, int | None, str | None, tuple[int, int] | None]


def find_culprits(
    steps: Sequence[MeasuredStep],
    accounts: Sequence[Account],
    ranks: tuple[RankTimeline, ...],
    waiter: int | None = None,
) -> tuple[Culprit, ...]:
    """List whom ranks waited for, the longest first; or whom one rank (by its place) did."""
    waits: defaultdict[Identity, list[tuple[int, Example]]] = defaultdict(list)
    for step, account in zip(steps, accounts, strict=True):
        kept = np.flatnonzero(account.root_kind != RootKind.NOTHING)
        for row in kept.tolist():
            place = int(account.place[row])
            if waiter is None or place == waiter:
                who, name = _identify(step, account, row)
                length = int(account.end_ns[row] - account.start_ns[row])
                waits[who].append((length, _example(step, account, row, ranks, name)))
    culprits = [_culprit(who, all_of) for who, all_of in waits.items()]
    return tuple(sorted(culprits, key=lambda one: (-one.wait_ns, one.cause, one.rank)))


def _identify(step: MeasuredStep, account: Account, row: int) -> tuple[Identity, str]:
    """Name what was waited for, and the very pass or hop of this wait."""
    cause = CAUSES[account.cause[row]]
    program, root = step.program, int(account.root[row])
    if account.root_kind[row] == RootKind.PASS:
        passes = program.passes
        kind, stage = PassKind(passes.kind[root]).name, int(passes.stage[root])
        name = f"{stage}{kind}{passes.microbatch[root]}"
        return (cause, program.ranks[passes.place[root]], stage, kind, None), name
    if account.root_kind[row] == RootKind.MESSAGE:
        places = program.batches.place
        source = program.ranks[places[program.messages.sent[root]]]
        destination = program.ranks[places[program.messages.received[root]]]
        return (cause, source, None, None, (source, destination)), f"{source}→{destination}"
    return (cause, program.ranks[root], None, None, None), ""


def name_root(step: MeasuredStep, account: Account, row: int) -> str:
    """Name what a row of the account waited for; nothing where nobody knows."""
    if account.root_kind[row] == RootKind.NOTHING:
        return ""
    who, name = _identify(step, account, row)
    of_host = account.root_kind[row] in {RootKind.HOST, RootKind.HOST_SYNC}
    return name or (f"host of rank {who[1]}" if of_host else f"rank {who[1]}")


def _example(
    step: MeasuredStep, account: Account, row: int, ranks: tuple[RankTimeline, ...], name: str
) -> Example:
    waiting = ranks[account.place[row]]
    return Example(
        file=waiting.file,
        ts_us=waiting.stamp_us(step.begin_ns + int(account.start_ns[row])),
        dur_us=int(account.end_ns[row] - account.start_ns[row]) / 1000,
        rank=waiting.rank,
        waits_for=name,
    )


def _culprit(who: Identity, waits: Iterable[tuple[int, Example]]) -> Culprit:
    by_length = sorted(waits, key=lambda one: -one[0])
    cause, rank, stage, kind, hop = who
    return Culprit(
        cause=cause,
        rank=rank,
        stage=stage,
        kind=kind,
        hop=hop,
        wait_ns=sum(length for length, _ in by_length),
        examples=tuple(example for _, example in by_length[:_EXAMPLES]),
    )
