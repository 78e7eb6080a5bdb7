"""The types of the ledger: causes, and intervals that each stand under one of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum

import numpy as np

from debubble.timeline.model import I32, I64, U8, Flags


class Cause(StrEnum):
    """What a nanosecond was spent on. What remains is unexplained, never folded into another."""

    COMPUTE = "compute"
    COLLECTIVE = "collective"
    DATA_PARALLEL = "data_parallel"
    WARM_UP = "warm_up"
    TURNAROUND = "turnaround"
    DRAIN = "drain"
    IMBALANCE = "imbalance"
    JITTER = "jitter"
    TRANSFER = "transfer"
    SLOW_LINK = "slow_link"
    HOST = "host"
    HOST_SYNC = "host_sync"
    UNEXPLAINED = "unexplained"


CAUSES = tuple(Cause)
NUMBER_OF = {cause: number for number, cause in enumerate(CAUSES)}


class RootKind(IntEnum):
    """What a wait comes down to in the end: something that is not itself waiting."""

    PASS = 0
    MESSAGE = 1
    HOST = 2
    NOTHING = 3
    HOST_SYNC = 4
    """A host that had been kept until its device was done, and had yet to issue what runs next."""
    COLLECTIVE = 5
    DATA_PARALLEL = 6
    """A gather or reduction that runs beside passes, and that the next one waits for."""


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
