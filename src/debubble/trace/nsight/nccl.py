"""What NVTX tells about NCCL's kernels: NCCL marks its calls with ranges, and so does torch.

A `SendRecv` kernel is a pipeline's transfer or an all-to-all; only the calls that led to its launch
tell. NCCL launches inside the call, or inside the `ncclGroupEnd` that closes a group of calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from debubble.trace.columns import I32, I64, U8, KernelKind, Operation
from debubble.trace.joins import find_enclosing

if TYPE_CHECKING:
    from debubble.trace.nsight.tables import HostSpans

_CALLS: Final = {"ncclSend": Operation.SEND, "ncclRecv": Operation.RECEIVE}
_COLLECTIVE_CALL: Final = re.compile(
    r"^nccl(?:AllReduce|AllGather|ReduceScatter|Broadcast|Bcast|Reduce|All[tT]oAll|Gather|Scatter)v?$"
)
_GROUP_START, _GROUP_END = "ncclGroupStart", "ncclGroupEnd"
# torch's own ranges: `nccl:all_to_all, op_id = 7`, `nccl:send 0->1`; not `nccl:coalesced`, which
# may be either.
_TORCH_RANGE: Final = re.compile(r"^nccl:(?!coalesced\b)(send\b|recv\b)?\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One send, receive or collective as NCCL marked it: a row of the ranges."""

    row: int
    operation: Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Calls that NCCL launches together: a group, or one call alone."""

    thread: int
    start: int
    end: int
    calls: tuple[Call, ...]

    @property
    def kind(self) -> KernelKind:
        """A collective, one peer's send and/or receive, or a mix whose peers are not known."""
        counts = [sum(c.operation == o for c in self.calls) for o in _PEER_OPERATIONS]
        if self.calls and not any(counts):
            return KernelKind.COLLECTIVE
        if sum(counts) == len(self.calls) and self.calls and max(counts) == 1:
            return KernelKind.PEER
        return KernelKind.COMMUNICATION


_PEER_OPERATIONS: Final = (Operation.SEND, Operation.RECEIVE)


def find_exchanges(ranges: HostSpans, names: tuple[str, ...]) -> tuple[Exchange, ...]:
    """Collect NCCL's calls, group by group, in the order of each thread."""
    told = np.array([_is_call(name) for name in names], dtype=np.bool_)
    calls = np.flatnonzero(told[ranges.name])
    order = calls[np.lexsort((-ranges.end[calls], ranges.start[calls], ranges.thread[calls]))]
    found: list[Exchange] = []
    borders = np.flatnonzero(np.diff(ranges.thread[order])) + 1
    for rows in np.split(order, borders):
        found += _exchanges_of_thread(ranges, names, rows.tolist())
    return tuple(found)


def launched_by(exchanges: tuple[Exchange, ...], thread: I64, start: I64) -> I32:
    """Return for each launch the exchange that it happened in; -1 for none."""
    return find_enclosing(
        start,
        thread,
        np.array([e.start for e in exchanges], dtype=np.int64),
        np.array([e.end for e in exchanges], dtype=np.int64),
        np.array([e.thread for e in exchanges], dtype=np.int64),
    ).astype(np.int32)


def name_kinds(ranges: HostSpans, names: tuple[str, ...], thread: I64, start: I64) -> U8:
    """Return the kind of each launch as torch's range around it names it; else COMMUNICATION."""
    kinds = np.array([_torch_kind(name) for name in names], dtype=np.uint8)
    rows = np.flatnonzero(kinds[ranges.name] != KernelKind.COMMUNICATION)
    inside = find_enclosing(
        start, thread, ranges.start[rows], ranges.end[rows], ranges.thread[rows]
    )
    told = np.append(kinds[ranges.name[rows]], np.uint8(KernelKind.COMMUNICATION))
    return told[inside]


def _exchanges_of_thread(
    ranges: HostSpans, names: tuple[str, ...], rows: list[int]
) -> list[Exchange]:
    found: list[Exchange] = []
    calls: list[Call] = []
    depth, group_start, inside_until = 0, 0, None
    for row in rows:
        name, start, end = names[ranges.name[row]], int(ranges.start[row]), int(ranges.end[row])
        if inside_until is not None and start < inside_until:
            continue  # NCCL's own calls inside a collective
        thread = int(ranges.thread[row])
        if name == _GROUP_START:
            if depth == 0:
                calls, group_start = [], start
            depth += 1
        elif name == _GROUP_END:
            depth -= 1
            if depth == 0:
                whole = Exchange(thread=thread, start=group_start, end=end, calls=tuple(calls))
                found.append(whole)
            depth = max(depth, 0)  # the capture began inside a group
        else:
            call = Call(row=row, operation=_CALLS.get(name, Operation.COLLECTIVE))
            inside_until = end
            if depth:
                calls.append(call)
            else:
                found.append(Exchange(thread=thread, start=start, end=end, calls=(call,)))
    return found


def _is_call(name: str) -> bool:
    return (
        name in _CALLS or name in {_GROUP_START, _GROUP_END} or bool(_COLLECTIVE_CALL.match(name))
    )


def _torch_kind(name: str) -> KernelKind:
    match = _TORCH_RANGE.match(name)
    if match is None:
        return KernelKind.COMMUNICATION
    return KernelKind.PEER if match[1] else KernelKind.COLLECTIVE
