"""All ranks of a pipeline in → whether they can be of one run.

A clock may be wrong by hours, and still one offset puts every receive after its send. Ranks of
different runs show no such offset: their steps took different times. Or they do not fit together
at all: other worlds, other messages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np

from debubble.errors import Code, Gap
from debubble.timeline.chain import Chain
from debubble.timeline.clock import bounds
from debubble.timeline.model import I32, Transfers, rows_by_hop
from debubble.timeline.prepared import Prepared
from debubble.trace.run_gaps import show_ranks

# Clocks drift by tens of millionths; stamps of host and device are laid together to some 0.1 ms. Of
# our recordings, any two runs of one program contradict each other by 20 ms and more.
_DRIFT, _STAMPS_NS = 1e-4, 1_000_000
_FEWEST_STEPS = 2


def find_mixed(
    ranks: Sequence[Prepared],
    chain: Chain,
    transfers: Transfers,
    across_steps: Collection[tuple[int, int]],
) -> Gap | None:
    """Say why the ranks of a pipeline cannot be of one run; None where they may be."""
    captured = {one.rank: one for one in ranks if one.rank in chain.ranks}
    names = [rank for rank in chain.ranks if rank in captured]
    reason = _worlds(captured)
    if reason:
        return _gap(names, set(), reason)
    pairs = [(left, right) for left, right in pairwise(names)]
    hops = [pair for both in pairs for pair in (both, both[::-1]) if pair not in across_steps]
    unlike = {frozenset(hop) for hop in hops if _sizes_differ(captured, *hop)}
    if unlike:
        return _gap(names, unlike, "what one sends is not of the size that the other receives")
    uneven = {frozenset(hop) for hop in hops if _counts_differ(captured, *hop)}
    if uneven:
        return _gap(names, uneven, "one does not receive as often as the other sends, in any step")
    inside = _comparable(captured, transfers, across_steps)
    if not len(inside):
        return None
    apart = {frozenset((left, right)) for left, right in pairs if contradict(inside, (left, right))}
    if apart or contradict(inside, names):
        return _gap(names, apart, "no clock puts every receive after its send")
    return None


def _worlds(captured: Mapping[int, Prepared]) -> str:
    sizes: dict[int, list[int]] = {}
    for rank, one in sorted(captured.items()):
        if one.trace.header.world_size:
            sizes.setdefault(one.trace.header.world_size, []).append(rank)
    if len(sizes) < 2:
        return ""
    told = (f"rank {show_ranks(ranks)} of {size}" for size, ranks in sorted(sizes.items()))
    return f"their jobs had different numbers of ranks ({', '.join(told)})"


def _sizes_differ(captured: Mapping[int, Prepared], source: int, destination: int) -> bool:
    sent, received = captured[source].messages, captured[destination].messages
    out = sent.message_bytes[sent.is_send & (sent.peer == destination)]
    into = received.message_bytes[~received.is_send & (received.peer == source)]
    sizes, others = set(out[out > 0].tolist()), set(into[into > 0].tolist())
    return bool(sizes and others) and not sizes & others


def _counts(one: Prepared, peer: int, *, is_send: bool) -> dict[int, int]:
    messages = one.messages
    rows = (messages.is_send == is_send) & (messages.peer == peer) & (one.message_step >= 0)
    steps, counts = np.unique(one.message_step[rows], return_counts=True)
    return dict(zip(steps.tolist(), counts.tolist(), strict=True))


def _counts_differ(captured: Mapping[int, Prepared], source: int, destination: int) -> bool:
    """Tell whether each side keeps to a number of messages a step, and to another one."""
    sent = _counts(captured[source], destination, is_send=True)
    received = _counts(captured[destination], source, is_send=False)
    common = sorted(set(sent) & set(received))
    steady = len({sent[step] for step in common}) == len({received[step] for step in common}) == 1
    return len(common) >= _FEWEST_STEPS and steady and sent[common[0]] != received[common[0]]


def _comparable(
    captured: Mapping[int, Prepared],
    transfers: Transfers,
    across_steps: Collection[tuple[int, int]],
) -> Transfers:
    """Return the transfers that surely are what they are paired as."""
    kept = np.zeros(len(transfers), dtype=bool)
    for (source, destination), hop in rows_by_hop(transfers).items():
        if source not in captured or destination not in captured:
            continue
        if (source, destination) in across_steps:
            continue
        sent = _counts(captured[source], destination, is_send=True)
        received = _counts(captured[destination], source, is_send=False)
        even: I32 = np.array([s for s in sent if sent[s] == received.get(s)], dtype=np.int32)
        kept[hop] = np.isin(transfers.step[hop], even)
    return transfers.where(kept)


def _between(transfers: Transfers, names: Sequence[int]) -> Transfers:
    return transfers.where(np.isin(transfers.source, names) & np.isin(transfers.destination, names))


def contradict(transfers: Transfers, names: Sequence[int]) -> bool:
    """Tell whether going around some ranks, messages arrive before they were sent."""
    transfers = _between(transfers, names)
    if not len(transfers):
        return False
    most = bounds(transfers, names)
    own = transfers.where(transfers.source == transfers.source[0]).send_start_ns
    allowed = _STAMPS_NS + _DRIFT * float(own.max() - own.min())
    return bool((np.diag(most) < -allowed).any())


def _gap(names: Sequence[int], apart: set[frozenset[int]], reason: str) -> Gap:
    groups: list[list[int]] = [[names[0]]]
    for left, right in pairwise(names):
        if frozenset((left, right)) in apart:
            groups.append([])
        groups[-1].append(right)
    who = " and ".join(
        f"{'rank' if len(group) == 1 else 'ranks'} {show_ranks(group)}" for group in groups
    )
    return Gap(
        code=Code.MIXED_RUNS,
        message=f"{who} are not of one run: {reason}",
        hint="give the traces of one run, captured together",
    )
