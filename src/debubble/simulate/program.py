"""What a step is made of, without durations: passes, messages and calls, and what each waits for.

`engine.py` makes events of it that wait for each other. Why a run can be rebuilt so:
docs/explanation/where-the-time-goes.md, "What it would buy".
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from debubble.timeline.model import I32, I64, U8, Flags

NONE = -1


def _nothing() -> I64:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTable:
    """The passes of all ranks, by rank and then in the order that each rank runs them."""

    place: I32
    """Which of the pipeline's ranks, counted from the first."""
    stage: I32
    kind: U8
    microbatch: I32
    before: I64
    """The row of the pass before it on its rank; -1 for the first."""

    def __len__(self) -> int:
        return len(self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTable:
    """Messages that a rank carries out as one: a kernel on a queue, that spins until it is done."""

    place: I32
    before: I64
    """The row of the batch before it on its queue, which it cannot overtake; -1 for none."""
    after: I64
    """The row of the last pass issued before it on its rank, which it waits for; -1 for none."""
    launched_after: I64
    """The row of the batch launched before it on another queue, where a device starts what it is
    given in that order (`CUDA_DEVICE_MAX_CONNECTIONS=1`, as Megatron asks for); -1 for none."""

    def __len__(self) -> int:
        return len(self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTable:
    """Messages, each sent by a batch and received by another."""

    sent: I64
    """Row of the batch that sends it."""
    received: I64
    producer: I64
    """Row of the pass whose result it is; -1 where that is not known."""
    consumer: I64
    rendezvous: Flags
    """The sender waits for the receiver; otherwise the message is buffered on its way."""

    def __len__(self) -> int:
        return len(self.sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTable:
    """Calls that keep a host until its device is done, by rank and then in their order."""

    place: I32
    before: I64
    """The row of the call before it on its rank; -1 for the first."""
    after: I64
    """The row of the pass that it waits for; -1 for none."""
    inside: Flags
    """It lies in the midst of that pass: only what was launched of it until then is waited for."""
    batches: I64
    """Two columns: a call, and a batch that it waits for."""
    pass_call: I64
    """For each pass the last call before it was issued; -1 where there is none."""
    batch_call: I64

    def __len__(self) -> int:
        return len(self.place)


def no_syncs(passes: int, batches: int) -> SyncTable:
    """Return no call at all: hosts run ahead of their devices."""
    return SyncTable(
        place=_nothing().astype(np.int32),
        before=_nothing(),
        after=_nothing(),
        inside=_nothing().astype(bool),
        batches=_nothing().reshape(-1, 2),
        pass_call=np.full(passes, NONE),
        batch_call=np.full(batches, NONE),
    )


def in_exchange(sent: I64, received: I64) -> Flags:
    """Tell messages whose two batches carry one the other way, too."""
    size = int(max(sent.max(initial=-1), received.max(initial=-1))) + 1
    sends, receives = np.zeros((2, size), dtype=bool)
    sends[sent] = receives[received] = True
    there: Flags = receives[sent] & sends[received]
    some = np.flatnonzero(there)
    sent, received = sent[some], received[some]
    there[some] = np.isin(sent * size + received, received * size + sent)
    return there


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A step: passes, batches of messages, and passes that need others with no message known."""

    ranks: tuple[int, ...]
    passes: PassTable
    batches: BatchTable
    messages: MessageTable
    needs: I64
    """Two columns, one row a need: a pass, and the pass whose result it needs."""
    pairs: I64 = field(default_factory=_nothing)
    """Rows of forward passes that run as one with the pass after them, where a plan says so: what
    either needs is needed by the first, what either makes leaves after the second."""
    waits: I64 = field(default_factory=lambda: _nothing().reshape(-1, 2))
    """Two columns: a pass, and a batch that its host lets it wait for, needed or not."""
    syncs: SyncTable = field(default_factory=lambda: no_syncs(0, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long everything takes. A second dimension holds many runs at once."""

    passes: I64
    pass_gaps: I64
    """From the moment a pass could start to its start."""
    batch_gaps: I64
    sending: I64
    """Of each message: from its sending batch's start to that one's end."""
    wire: I64
    """From the sending batch's start to the receiving one's end, if that was there."""
    drain: I64
    """From the receiving batch's start to its end, if the message was there."""
    pass_floor: I64
    """When the host issued it: it cannot start before."""
    batch_floor: I64
    pass_lag: I64 = field(default_factory=_nothing)
    """From the end of the call that kept the host to when it issued the pass."""
    batch_lag: I64 = field(default_factory=_nothing)
    sync_host: I64 = field(default_factory=_nothing)
    """What the host does from one such call to the next."""
    sync_tail: I64 = field(default_factory=_nothing)
    """From when what is waited for is done, or its pass began, to the end of the call."""
    sync_floor: I64 = field(default_factory=_nothing)
    """When the first call of a rank began."""

    def columns(self) -> dict[str, I64]:
        """Return all of them by name."""
        return {column.name: getattr(self, column.name) for column in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """When everything started and ended, in the order of the program's tables."""

    pass_start: I64
    pass_end: I64
    batch_start: I64
    batch_end: I64

    @property
    def window_ns(self) -> I64:
        """From the first pass's start to the last pass's end."""
        length: I64 = np.asarray(self.pass_end.max(axis=0) - self.pass_start.min(axis=0))
        return length
