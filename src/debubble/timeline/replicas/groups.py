"""The process groups of all ranks in → which of them join replicas, and what a replica is.

Ranks that share a stage for tensor, context or expert parallelism lie side by side as replicas do:
a pipeline each, as far as messages tell. Their collectives stand in the middle of forward passes,
where a gradient is never reduced; fully sharded weights are gathered there too, so a group that is
called after data parallelism is believed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import I64, RankCollectives
from debubble.timeline.parallelism import Role, role_of
from debubble.trace.columns import Group

Key = tuple[int, ...] | str
"""A group by its members, or by its name where torch left the middle of a long list out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands."""

    pipeline: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What joins what."""

    keys: tuple[Key, ...]
    """The groups that join replicas."""
    number: dict[int, I64]
    """For each rank, which of them each of its collectives went through; -1 for none."""
    replica: dict[int, int]
    """Of each pipeline: those that share stages are one."""
    absent: tuple[int, ...]
    """Members without a trace."""


def join_groups(
    collectives: Mapping[int, RankCollectives], pipelines: Mapping[int, Sequence[int]]
) -> Joined:
    """Tell the groups that join replicas from those that share stages."""
    places = {
        rank: Place(pipeline=number, position=position)
        for number, ranks in pipelines.items()
        for position, rank in enumerate(ranks)
    }
    known: dict[Key, bool] = {}
    used = {rank: _used(rank, found, places, known) for rank, found in collectives.items()}
    members: dict[Key, set[int]] = {}
    inner: dict[Key, bool] = {}
    for rank, rows in used.items():
        for key, group, mine in rows:
            members.setdefault(key, set()).add(rank)
            shares = _shares_stage(group, in_forward=bool(collectives[rank].in_forward[mine].any()))
            inner[key] = inner.get(key, False) or shares
    replica = _unite([members[key] for key in members if inner[key]], pipelines, places)
    keys = tuple(
        key
        for key, ranks in members.items()
        if not inner[key] and len({replica[places[rank].pipeline] for rank in ranks}) > 1
    )
    place = {key: number for number, key in enumerate(keys)}
    number = {}
    for rank, rows in used.items():
        number[rank] = np.full(len(collectives[rank]), -1, dtype=np.int64)
        for key, _, mine in rows:
            number[rank][mine] = place.get(key, -1)
    absent = {rank for key in keys if not isinstance(key, str) for rank in key} - set(collectives)
    return Joined(keys=keys, number=number, replica=replica, absent=tuple(sorted(absent)))


def _used(
    rank: int, found: RankCollectives, places: Mapping[int, Place], known: dict[Key, bool]
) -> list[tuple[Key, Group, I64]]:
    """Return the groups of a rank that hold one position of several pipelines, and their rows.

    gloo does not tell the group of a collective: where one of the rank's is such, it is that.
    """
    if rank not in places:
        return []
    for group in found.groups:
        if group.ranks not in known:
            known[group.ranks] = _lies_across(group, places)
    beside = [number for number, group in enumerate(found.groups) if known[group.ranks]]
    of_row = found.group
    if len(beside) == 1:
        of_row = np.where(of_row < 0, np.int32(beside[0]), of_row)
    rows = []
    for number in beside:
        mine = np.flatnonzero(of_row == number)
        if len(mine):
            one = found.groups[number]
            rows.append((one.ranks or f"{one.name} {one.description}", one, mine))
    return rows


def _lies_across(group: Group, places: Mapping[int, Place]) -> bool:
    """Tell whether a group holds one position of several pipelines, as far as its ranks tell."""
    known = [places[member] for member in group.ranks if member in places]
    pipelines = {place.pipeline for place in known}
    alike = len({place.position for place in known}) == 1
    return not group.ranks or (alike and len(pipelines) == len(known) > 1)


def _shares_stage(group: Group, *, in_forward: bool) -> bool:
    role = role_of(group)
    if role is Role.DATA:
        return False
    return role in {Role.INNER, Role.MODEL} or in_forward


def _unite(
    stages: Sequence[set[int]], pipelines: Mapping[int, Sequence[int]], places: Mapping[int, Place]
) -> dict[int, int]:
    """Give each pipeline the number of its replica: those that share a stage are one."""
    leader = {number: number for number in pipelines}

    def lead(number: int) -> int:
        while leader[number] != number:
            leader[number] = leader[leader[number]]
            number = leader[number]
        return number

    for ranks in stages:
        first, *others = sorted({lead(places[rank].pipeline) for rank in ranks})
        for other in others:
            leader[lead(other)] = lead(first)
    leaders = sorted({lead(number) for number in pipelines})
    place = {one: number for number, one in enumerate(leaders)}
    return {number: place[lead(number)] for number in pipelines}
