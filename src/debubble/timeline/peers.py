"""Peers counted inside a process group in → global ranks, where the trace does not name the group.

gloo's operators tell the peer as its group counts it, and not which group. The wrong groups
contradict themselves: all first stages of a data-parallel group send to its member 1, member 1 to
itself; and what one rank sends under the wrong group, no other receives. A group whose members
agree about every message is believed; where several do, one that is called after the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from debubble.errors import Code, Gap
from debubble.timeline.model import I32, UNKNOWN
from debubble.timeline.parallelism import Role, role_of
from debubble.trace.columns import Group, Operation, RankTrace
from debubble.units import counted

Edges = set[tuple[bool, int]]
"""Whether sent, and the peer as its group counts it."""


def name_peers(traces: Sequence[RankTrace]) -> tuple[tuple[RankTrace, ...], tuple[Gap, ...]]:
    """Fill in the global rank of every peer whose group can be told; report where none can."""
    members, gaps = choose_groups(traces)
    return tuple(translate_peers(trace, members.get(rank_of(trace))) for trace in traces), gaps


def choose_groups(
    traces: Sequence[RankTrace],
) -> tuple[dict[int, tuple[int, ...]], tuple[Gap, ...]]:
    """Return whom each rank's unnamed peers are counted among, where that can be told."""
    edges = {trace.rank: _edges(trace) for trace in traces if trace.rank is not None}
    chosen: dict[int, tuple[int, ...]] = {}
    gaps = []
    for trace in traces:
        rank = trace.rank
        if rank is None or not edges[rank]:
            continue
        members = _members(trace, rank, edges)
        if members is None:
            gaps.append(_unknown_group(trace, rank))
        else:
            chosen[rank] = members
    return chosen, tuple(gaps)


def rank_of(trace: RankTrace) -> int:
    """Return a rank that was settled; -1 where none was."""
    return UNKNOWN if trace.rank is None else trace.rank


def _unnamed(trace: RankTrace) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    operators = trace.operators
    messages = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
    return messages & (operators.peer < 0) & (operators.local_peer >= 0)


def _edges(trace: RankTrace) -> Edges:
    rows = _unnamed(trace)
    sent = (trace.operators.operation[rows] == Operation.SEND).tolist()
    return set(zip(sent, trace.operators.local_peer[rows].tolist(), strict=True))


def _members(trace: RankTrace, rank: int, edges: Mapping[int, Edges]) -> tuple[int, ...] | None:
    """Return the members of the group that the messages went through; None where not certain."""
    fitting = [group for group in trace.groups if _agrees(group, rank, edges)]
    if len({group.ranks for group in fitting}) > 1:
        fitting = [group for group in fitting if role_of(group) is Role.PIPELINE]
    found = {group.ranks for group in fitting}
    return found.pop() if len(found) == 1 else None


def _agrees(group: Group, rank: int, edges: Mapping[int, Edges]) -> bool:
    """Tell whether all captured members of a group could have exchanged these messages in it."""
    if rank not in group.ranks:
        return False
    for place, member in enumerate(group.ranks):
        for sent, peer in edges.get(member, ()):
            if peer >= len(group.ranks) or peer == place:
                return False
            other = edges.get(group.ranks[peer])
            if other is not None and (not sent, place) not in other:
                return False
    return True


def translate_peers(trace: RankTrace, members: tuple[int, ...] | None) -> RankTrace:
    """Fill in the peers that are counted inside a group, once it is known which."""
    if members is None:
        return trace
    operators = trace.operators
    rows = _unnamed(trace)
    known = np.array(members, dtype=np.int32)
    peer: I32 = np.full(len(operators), UNKNOWN, dtype=np.int32)
    peer[rows] = known[operators.local_peer[rows]]
    found = next(row for row, group in enumerate(trace.groups) if group.ranks == members)
    return replace(
        trace,
        operators=replace(
            operators,
            peer=np.where(rows, peer, operators.peer),
            group=np.where(rows, np.int32(found), operators.group),
        ),
    )


def _unknown_group(trace: RankTrace, rank: int) -> Gap:
    count = counted(int(_unnamed(trace).sum()), "message")
    return Gap(
        code=Code.UNKNOWN_GROUP,
        message=f"{count} left out: their process group, and so their peer, cannot be told",
        hint="name the pipeline's group, such as new_group(ranks, group_desc='pp')",
        file=trace.file,
        rank=rank,
    )
