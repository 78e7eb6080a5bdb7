"""A `Ledger` in → its waits on the timeline's clock, each with its cause and whom it was for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from debubble.ledger.causes import CAUSES, Cause
from debubble.ledger.ledger import Ledger
from debubble.ledger.model import Account, name_root
from debubble.simulate.measured import MeasuredStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A stretch in which a rank waited for one thing."""

    rank: int
    step: int | None
    """None in a stream, which has none."""
    start_ns: int
    end_ns: int
    cause: Cause
    waits_for: str
    """`3B5` for a pass, `2→3` for a hop, `host of rank 1`; empty where nobody knows."""


def list_waits(ledger: Ledger) -> tuple[Wait, ...]:
    """Return every wait; gaps that touch and have one cause and one culprit are one wait."""
    waits: list[Wait] = []
    for step, account in zip(ledger.steps, ledger.accounts, strict=True):
        kept = account.where(account.cause > CAUSES.index(Cause.COLLECTIVE))
        same = np.stack((kept.place, kept.cause, kept.root_kind, kept.root))
        breaks = (np.diff(same, axis=1) != 0).any(axis=0) | (kept.start_ns[1:] != kept.end_ns[:-1])
        cuts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(kept)] if len(kept) else []
        waits += [_wait(step, kept, begin, end - 1) for begin, end in pairwise(cuts)]
    return tuple(waits)


def _wait(step: MeasuredStep, account: Account, begin: int, end: int) -> Wait:
    return Wait(
        rank=step.program.ranks[account.place[begin]],
        step=step.number,
        start_ns=step.begin_ns + int(account.start_ns[begin]),
        end_ns=step.begin_ns + int(account.end_ns[end]),
        cause=CAUSES[account.cause[begin]],
        waits_for=name_root(step, account, begin),
    )
