"""CPU operators in → what communicates, with whom and how much.

torch writes one communication up to three times; they are folded into one row:

    ├─ c10d::send ────────────────┤           tells peer, tag and shape
      ├─ record_param_comms ────┤             tells group, elements and type
          ├─ nccl:send 0->1 ────────────┤     begins inside, may end much later

A bracket `nccl:coalesced`, which holds the launch of a whole batch issued just before it, is kept
apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from debubble.trace.columns import (
    I64,
    UNKNOWN,
    Group,
    Header,
    Interner,
    Operation,
    Operators,
    build,
)
from debubble.trace.communication import classify_operation, element_bytes
from debubble.trace.kineto.events import OperatorArgs

_COLUMNS = ("start_ns", "duration_ns", "name", "thread", "device_row")
_DETAIL = "record_param_comms"
_BRACKET = "nccl:coalesced"
_HOST_BACKENDS = ("gloo:", "mpi:")
# Where `c10d::send(tensors, group, peer, tag)` keeps its peer and tag among the concrete inputs.
_PEER_INPUT, _TAG_INPUT = 2, 3
_MAX_PEER = 2**31 - 1
Ranks = tuple[Annotated[int, msgspec.Meta(ge=0, le=_MAX_PEER)], ...]
_MAX_ELEMENTS = 2**62
_MOST_DIMENSIONS = 8


@dataclass(slots=True)
class Call:
    """One communication, gathered from its events."""

    start_ns: int
    duration_ns: int
    name: str
    thread: int
    device_row: int
    operation: Operation
    on_host: bool = False
    local_peer: int = UNKNOWN
    """As the call counts it, inside its group: `c10d::send`'s own input."""
    global_peer: int = UNKNOWN
    """As torch describes the call: `Src Rank` and `Dst Rank` are global."""
    tag: int = UNKNOWN
    group: str = ""
    description: str = ""
    group_ranks: str = ""
    elements: int = UNKNOWN
    dtype: str = ""
    shape: str = ""


@dataclass(slots=True)
class Communication:
    """What the operators of a file come to, before kernels are joined to them."""

    operators: Operators
    device_row: I64
    on_host: NDArray[np.bool_]
    brackets: I64
    """A row each: start and end in nanoseconds, and thread."""
    groups: tuple[Group, ...]


def fold_operators(
    columns: Mapping[str, NDArray[np.generic]],
    args: list[OperatorArgs],
    names: Interner[str],
    header: Header,
) -> Communication:
    """Fold the events of each communication into one row, sorted by start.

    They have a start, a duration, a name and a thread, or the row of the kernel that tells of
    itself.
    """
    strings = names.all()
    rows = np.stack([columns[name].astype(np.int64) for name in _COLUMNS])
    start_ns, duration_ns, _, thread, device_row = rows
    order = np.lexsort((-(start_ns + duration_ns), start_ns, thread, device_row))
    calls: list[Call] = []
    brackets: list[tuple[int, int, int]] = []
    current: Call | None = None
    for row, (start, duration, named, caller, device) in zip(
        order.tolist(), rows[:, order].T.tolist(), strict=True
    ):
        text = strings[named]
        call = Call(
            start_ns=start,
            duration_ns=duration,
            name=text,
            thread=caller if device < 0 else UNKNOWN,
            device_row=device,
            operation=classify_operation(args[row].collective or text),
        )
        if text == _BRACKET:
            brackets.append((start, start + duration, caller))
        elif current is not None and _belongs(call, current):
            _describe(current, args[row], text)
        else:
            current = call
            _describe(current, args[row], text)
            calls.append(current)
    return _tabulate(calls, brackets, names, header)


def _belongs(call: Call, current: Call) -> bool:
    """Tell whether an event is about the communication before it; annotations hold nothing else."""
    if call.thread != current.thread or not call.device_row == current.device_row == UNKNOWN:
        return False
    if not current.name.startswith(("c10d::", _DETAIL)):
        return False
    end_ns = current.start_ns + current.duration_ns
    if call.name.startswith("c10d::") and call.start_ns + call.duration_ns > end_ns:
        return False
    return call.start_ns < end_ns or call.start_ns == current.start_ns


def _describe(call: Call, args: OperatorArgs, text: str) -> None:
    """Add what one more event of the same communication knows."""
    call.on_host |= text.startswith(_HOST_BACKENDS)
    if args.collective:
        call.operation = classify_operation(args.collective)
    described = args.in_elements if args.in_elements >= 0 else args.out_elements
    call.elements = described if described >= 0 else max(call.elements, _count(args.shapes))
    call.group = args.group or call.group
    call.description = args.description or call.description
    call.group_ranks = str(args.group_ranks) if args.group_ranks else call.group_ranks
    call.dtype = args.dtype or call.dtype or _first_type(args.types)
    if call.operation is Operation.SEND and args.destination >= 0:
        call.global_peer = args.destination
    elif call.operation is Operation.RECEIVE and args.source >= 0:
        call.global_peer = args.source
    if text.startswith("c10d::") and call.operation in {Operation.SEND, Operation.RECEIVE}:
        call.local_peer = _input(args, _PEER_INPUT)
        call.shape = _shape(args.shapes)
        call.tag = _input(args, _TAG_INPUT)


def _input(args: OperatorArgs, position: int) -> int:
    try:
        number = int(args.concrete_inputs[position])
    except (IndexError, ValueError, TypeError, OverflowError):
        return UNKNOWN
    return number if 0 <= number <= _MAX_PEER else UNKNOWN


def _count(shapes: list[Any]) -> int:
    """Count the elements of the first input: a tensor `[2, 3]` or a list of tensors `[[2, 3]]`."""
    if not shapes or not isinstance(shapes[0], list) or not shapes[0]:
        return UNKNOWN
    tensors = shapes[0] if isinstance(shapes[0][0], list) else [shapes[0]]
    total = 0
    for shape in tensors:
        if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
            return UNKNOWN
        count = 1
        for size in shape:
            count = min(count * size, _MAX_ELEMENTS)  # numbers without end take time without end
        total += count
    return total if total < _MAX_ELEMENTS else UNKNOWN


def _shape(shapes: list[Any]) -> str:
    """Write the shape of the first tensor: `[[2, 3]]` as 2x3; nothing where it is none."""
    first = shapes[0] if shapes else None
    first = first[0] if isinstance(first, list) and first and isinstance(first[0], list) else first
    if not isinstance(first, list) or not 0 < len(first) <= _MOST_DIMENSIONS:
        return ""
    if not all(type(size) is int and 0 <= size <= _MAX_PEER for size in first):  # not True
        return ""
    return "x".join(map(str, first))


def _first_type(types: list[Any]) -> str:
    first = types[0] if types else ""
    return first if isinstance(first, str) and element_bytes(first) else ""


def _tabulate(
    calls: list[Call], brackets: list[tuple[int, int, int]], names: Interner[str], header: Header
) -> Communication:
    calls = sorted(calls, key=lambda call: call.start_ns)
    groups = _all_groups(calls, header)
    number = {group.name: row for row, group in enumerate(groups)}
    only = 0 if len(groups) == 1 else UNKNOWN
    group = [number.get(call.group, only) if call.group else only for call in calls]
    size = [element_bytes(call.dtype) for call in calls]
    operators = build(
        Operators,
        len(calls),
        start_ns=[call.start_ns for call in calls],
        duration_ns=[call.duration_ns for call in calls],
        name=[names[call.name] for call in calls],
        thread=[call.thread for call in calls],
        operation=[call.operation for call in calls],
        local_peer=[call.local_peer for call in calls],
        peer=[_peer_of(call, groups, row, header) for call, row in zip(calls, group, strict=True)],
        group=group,
        elements=[call.elements for call in calls],
        message_bytes=[
            UNKNOWN if call.elements < 0 or each is None else min(call.elements * each, 2**63 - 1)
            for call, each in zip(calls, size, strict=True)
        ],
        dtype=[names[call.dtype] if call.dtype else UNKNOWN for call in calls],
        shape=[names[call.shape] if call.shape else UNKNOWN for call in calls],
        tag=[call.tag for call in calls],
    )
    return Communication(
        operators=operators,
        device_row=np.array([call.device_row for call in calls], dtype=np.int64),
        on_host=np.array([call.on_host for call in calls], dtype=bool),
        brackets=np.array(sorted(brackets), dtype=np.int64).reshape(-1, 3),
        groups=groups,
    )


def _peer_of(call: Call, groups: tuple[Group, ...], group: int, header: Header) -> int:
    """Return the global rank of a peer; -1 where nothing tells it.

    A call counts inside its group, so that the group's members tell it whatever else is written.
    Without them, or without recorded shapes, the description does: in a group `[0, 2]` torch writes
    `Dst Rank: 2` beside the input 1 (recorded with torch 2.11 by Megatron and torchtitan).
    """
    ranks = groups[group].ranks if group >= 0 else ()
    if 0 <= call.local_peer < len(ranks):
        return ranks[call.local_peer]
    if 0 <= call.global_peer <= _MAX_PEER and (not ranks or call.global_peer in ranks):
        return call.global_peer
    size = header.world_size
    alone = not groups and size is not None and 0 <= call.local_peer < size
    return call.local_peer if alone else UNKNOWN


def _all_groups(calls: list[Call], header: Header) -> tuple[Group, ...]:
    """Return the header's groups and those that only the operators name."""
    known = {group.name: group for group in header.groups}
    for call in calls:
        if call.group and (call.group not in known or not known[call.group].ranks):
            known[call.group] = Group(
                name=call.group,
                description=call.description,
                ranks=parse_ranks(call.group_ranks),
            )
    return tuple(known.values())


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read `[0, 1, 2]`; nothing where torch elided the middle of a long list."""
    try:
        return msgspec.json.decode(text or "[]", type=Ranks)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return ()
