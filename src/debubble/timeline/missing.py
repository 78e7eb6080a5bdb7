"""Pieces of pipelines with ranks missing between them in → whole pipelines, where groups tell.

Ranks that were not captured cannot tell whom they pass to: two of them side by side tear a pipeline
apart. The process group that the messages went through still lists all its ranks in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np

from debubble.timeline.chain import Chain, arriving_bytes
from debubble.timeline.parallelism import Role, role_of
from debubble.timeline.work import Messages
from debubble.trace.columns import Group, Operation, RankTrace


def join_over_missing(
    chains: Sequence[Chain], traces: Sequence[RankTrace], messages: Mapping[int, Messages]
) -> tuple[Chain, ...]:
    """Put the pieces of each pipeline together in the order of its process group."""
    captured = {trace.rank for trace in traces if trace.rank is not None}
    joined = list(chains)
    for members in sorted(pipeline_groups(traces)):
        inside = [chain for chain in joined if set(chain.ranks) <= set(members)]
        if inside and not captured >= set(members) and _fit(inside, members, captured):
            joined = [chain for chain in joined if chain not in inside]
            joined.append(Chain(ranks=members))
    turned = (_begin_with_answered(chain, messages) for chain in joined)
    return tuple(sorted(turned, key=lambda chain: chain.ranks))


def _fit(pieces: Sequence[Chain], members: tuple[int, ...], captured: Collection[int]) -> bool:
    """Tell whether the pieces lie in a group one after the other, torn at missing ranks only."""
    hops = set(pairwise(members))
    answer = (members[-1], members[0])
    found = {hop for piece in pieces for hop in pairwise(piece.ranks)} - {answer}
    torn = [rank for hop in hops - found for rank in hop]
    return found <= hops and not set(torn) & set(captured)


def pipeline_groups(traces: Sequence[RankTrace]) -> set[tuple[int, ...]]:
    """Return the members of the groups that messages went through, each for one pipeline.

    A group of all ranks may hold several pipelines, unless it is called after one or the job has no
    other: replicas would have a group to reduce their gradients in.
    """
    found = set()
    for trace in traces:
        operators = trace.operators
        posts = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
        for row in np.unique(operators.group[posts & (operators.group >= 0)]).tolist():
            group = trace.groups[row]
            if len(group.ranks) > 1 and _is_one_pipeline(group, trace):
                found.add(group.ranks)
    return found


def _is_one_pipeline(group: Group, trace: RankTrace) -> bool:
    named = role_of(group) is Role.PIPELINE
    alone = trace.header.groups and {one.ranks for one in trace.groups} == {group.ranks}
    return named or bool(alone) or len(group.ranks) < (trace.header.world_size or 0)


def _begin_with_answered(chain: Chain, messages: Mapping[int, Messages]) -> Chain:
    """Turn a ring that missing ranks tore open, so that it begins where the answers go.

    Only a token tells: it weighs less than half of any activation.
    """
    ends_missing = chain.ranks[0] not in messages and chain.ranks[-1] not in messages
    if not ends_missing:
        return chain
    weights = sorted((arriving_bytes(rank, messages), rank) for rank in chain.ranks[1:])
    place = chain.ranks.index(weights[0][1])
    if not 0 < 2 * weights[0][0] < weights[1][0] < np.inf:
        return chain
    return Chain(ranks=chain.ranks[place:] + chain.ranks[:place])
