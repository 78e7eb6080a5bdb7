"""Labels of a serving engine in → the turns of its scheduler, as each rank's host took them.

vLLM names what a worker executes: prompts and their tokens, decoding requests and theirs. A turn
without a request is a turn all the same. What a host of a middle rank issues around such labels:

    receive   ├ execute_context_0(0)_generation_4(4) ┤ send, broadcast   ├ execute_…_0(0)_…_0(0) ┤

A receive is asked for before the label of its batch; whatever else is issued comes after it. A pass
is what the host issues from the label on until it sends the output, or broadcasts what was sampled:

    host     label │ inputs, layers │ send │ counters of requests
    device         ii           lllllllllll                c
                     wait for the message

What ran before the input was there, `i`, is preparation; what follows the output, `c`, is none of
the pass either: nobody behind waits for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from debubble.timeline.meetings import attend, crosses_stages
from debubble.timeline.model import AT_ONCE_NS, I64, UNKNOWN, Columns, Flags, PassKind
from debubble.timeline.steps import RankRecord
from debubble.timeline.transfers import Chain
from debubble.timeline.work import Work, host_ranges
from debubble.trace.columns import RankTrace

_LABEL = re.compile(r"execute_context_(\d{1,7})\((\d{1,7})\)_generation_(\d{1,7})\((\d{1,7})\)")
# What older versions write: requests without their tokens.
_COUNTS = re.compile(r"execute_(?:new|context)_(\d{1,7})_(?:cached|generation)_(\d{1,7})")
# SGLang's modes, where a range names one.
_MODES = re.compile(r"\b(EXTEND|DECODE|MIXED|PREFILL)\b")


class Phase(IntEnum):
    """What the tokens of a batch are."""

    UNKNOWN = 0
    PREFILL = 1
    DECODE = 2
    MIXED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns(Columns):
    """The turns that a rank's host took, in their order; -1 where a label tells no number."""

    begin_ns: I64
    """When the label began, on the rank's own clock until it is `laid` on the common one."""
    end_ns: I64
    """When it ended: by then its kernels are launched."""
    prompts: I64
    """Requests of whose prompts it holds a chunk."""
    prompt_tokens: I64
    rows: I64
    """Requests that it decodes for."""
    row_tokens: I64
    """Of these: one each, or more where a draft is checked."""
    phase: I64
    number: I64
    """Which batch it is, counted on this rank; -1 of an empty turn."""
    engine: str
    """Whose labels these are."""

    def laid(self, offset_ns: int, before: int) -> Turns:
        """Return them on the common clock, with batches counted as the pipeline counts them."""
        number = np.where(self.empty, UNKNOWN, self.number + before)
        return replace(self.shifted(offset_ns), number=number)

    @property
    def tokens(self) -> I64:
        """Of prompts and of answers; -1 where they are not told."""
        told = (self.row_tokens >= 0) & (self.prompt_tokens >= 0)
        return np.where(told, self.prompt_tokens + self.row_tokens, UNKNOWN)

    @property
    def empty(self) -> Flags:
        """Turns in which the scheduler had no request to run."""
        empty: Flags = self.number < 0
        return empty

    def under_way(self, issued_ns: I64) -> I64:
        """Return the batch that a host was at when it issued something; -1 before the first."""
        return self._batch_at(np.searchsorted(self.begin_ns[~self.empty], issued_ns, "right") - 1)

    def following(self, issued_ns: I64) -> I64:
        """Return the batch whose label begins next; -1 after the last."""
        return self._batch_at(np.searchsorted(self.begin_ns[~self.empty], issued_ns, "right"))

    def _batch_at(self, row: I64) -> I64:
        return np.where(row < int((~self.empty).sum()), row, UNKNOWN)


def find_turns(trace: RankTrace) -> Turns | None:
    """Read the labels of a rank's host; None where an engine wrote none."""
    annotations = trace.annotations
    labels = [_read_label(name) for name in trace.names]
    known = np.array([label is not None for label in labels] or [False])
    rows = host_ranges(trace, known)
    if not len(rows):
        return None
    told = np.array([labels[name] for name in annotations.name[rows].tolist()], dtype=np.int64)
    phase, prompts, prompt_tokens, decoded, row_tokens = told.T
    empty = (prompts == 0) & (decoded == 0)
    return Turns(
        begin_ns=annotations.start_ns[rows],
        end_ns=annotations.start_ns[rows] + annotations.duration_ns[rows],
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        rows=decoded,
        row_tokens=row_tokens,
        phase=phase,
        number=np.where(empty, UNKNOWN, np.cumsum(~empty) - 1),
        engine="sglang" if (prompts < 0).all() else "vllm",
    )


def _read_label(name: str) -> tuple[Phase, int, int, int, int] | None:
    """Return phase, prompts, their tokens, and requests that are decoded for and their tokens."""
    label = _LABEL.search(name)
    if label:
        prompts, tokens, decoded, drafted = (int(count) for count in label.groups())
        alone = Phase.PREFILL if tokens else Phase.DECODE
        return Phase.MIXED if tokens and decoded else alone, prompts, tokens, decoded, drafted
    counts = _COUNTS.search(name)
    if counts:  # a request that is not new may still be in its prompt
        return Phase.UNKNOWN, int(counts[1]), UNKNOWN, int(counts[2]), UNKNOWN
    mode = _MODES.search(name)
    if mode is None:
        return None
    phase = {"DECODE": Phase.DECODE, "MIXED": Phase.MIXED}.get(mode[1], Phase.PREFILL)
    return phase, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN


def assign_by_turns(rank: RankRecord, turns: Turns, chain: Chain, before: int) -> Work:
    """Give each batch its work: what needs its input, up to its output. The others count `before`.

    The first stage needs the tokens that were sampled: it goes on when the broadcast that brings
    them ends, if it stood still until then.
    """
    work, beside = rank.work, chain.beside(rank.rank)
    batch = turns.under_way(work.issued_ns)
    batches = int((~turns.empty).sum())
    sampled = [
        attend(rank.trace, number, 0)
        for number, group in enumerate(rank.trace.groups)
        if crosses_stages(group, chain.ranks)
    ]
    output = np.full(batches + 1, np.iinfo(np.int64).max)
    arrived = np.full(batches + 1, np.iinfo(np.int64).min)
    messages = rank.messages
    sends = messages.is_send & (messages.peer == beside.next)
    issued = messages.issued_ns[sends]
    if beside.next is None:
        issued = np.concatenate(
            [np.zeros(0, dtype=np.int64), *(seen.issued_ns for seen in sampled)]
        )
    np.minimum.at(output, turns.under_way(issued), issued)
    receives = ~messages.is_send & (messages.peer == beside.previous)
    into = turns.following(messages.issued_ns[receives])
    np.maximum.at(arrived, into, messages.end_ns[receives])
    output[-1], arrived[-1] = np.iinfo(np.int64).min, np.iinfo(np.int64).max  # of no batch
    taken = (work.issued_ns < output[batch]) & ~work.upload
    if beside.previous is None:
        ends = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *(s.end_ns for s in sampled)]))
        for number in range(batches):
            rows = np.flatnonzero(taken & (batch == number))
            arrived[number] = _stood_until(work.start_ns[rows], work.end_ns[rows], ends)
    taken &= work.start_ns >= arrived[batch]
    return replace(
        work,
        kind=np.where(taken, PassKind.F, UNKNOWN).astype(np.int32),
        microbatch=np.where(taken, batch + before, UNKNOWN).astype(np.int32),
    )


def _stood_until(start_ns: I64, end_ns: I64, sampled_ns: I64) -> int:
    """Return the end of the broadcast that most of some work stood still for; else the least."""
    order = np.argsort(start_ns, kind="stable")
    start, reach = start_ns[order], np.maximum.accumulate(end_ns[order])
    idle = np.flatnonzero(start[1:] - reach[:-1] > AT_ONCE_NS) + 1
    after = np.searchsorted(sampled_ns, start[idle], side="right") - 1
    known = after >= 0
    idle, came = idle[known], sampled_ns[after[known]]
    idle, came = idle[start[idle] - came <= AT_ONCE_NS], came[start[idle] - came <= AT_ONCE_NS]
    early = idle * 2 < len(start)
    return int(came[early].max(initial=np.iinfo(np.int64).min))
