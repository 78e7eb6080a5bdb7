"""Logs in → the hops that they measure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from debubble.links.hop_times import (
    FEWEST,
    NEARLY_ALL,
    Hop,
    LinkClass,
    Past,
    TestedHop,
    fit_line,
    judge,
    judge_ratio,
    middle_of_others,
)
from debubble.links.logs.log import Log, Message
from debubble.simulate.costs.wire_pools import SLOW
from debubble.timeline.model import F64
from debubble.units import NS_PER_S


def hops_in(
    logs: Sequence[Log], *, classes: Mapping[Hop, LinkClass], history: Mapping[Hop, Past]
) -> tuple[TestedHop, ...]:
    """Return every hop that logs tell of, by its largest messages: of tests, then of a job.

    Both sides of a job's messages are of several files. Hops are held against those of other ranks
    that had messages as large, as well as against their past and their kind of wire.
    """
    messages: defaultdict[tuple[bool, str, Hop], list[Message]] = defaultdict(list)
    files: dict[Hop, str] = {}
    for log in logs:
        for message in log.messages:
            test = log.file if message.both_ways else ""
            messages[not message.both_ways, test, message.hop].append(message)
            files[message.hop] = log.file
    took = {key: sizes for key in sorted(messages) if (sizes := _by_size(messages[key]))}
    hops = []
    for (one_way, test, hop), sizes in took.items():
        ladder = [(size, float(np.median(sizes[size]))) for size in sorted(sizes)]
        size, time_ns = ladder[-1]
        peers = [
            float(np.median(other[size]))
            for (way, _, there), other in took.items()
            if way == one_way and there != hop and size in other
        ]
        by_peers = None
        if usual := middle_of_others(sorted(peers), None):
            slow = bool(np.quantile(sizes[size] / usual, NEARLY_ALL) > SLOW)
            by_peers = judge_ratio(time_ns / usual, slow=slow, against="peers")
        hops.append(
            TestedHop(
                hop=hop,
                file=test or files[hop],
                size_bytes=size,
                time_s=time_ns / NS_PER_S,
                fit=fit_line([size for size, _ in ladder], [time for _, time in ladder]),
                judgement=judge(hop, ladder[-1:], by_peers, classes, history),
                both_ways=not one_way,
            )
        )
    return tuple(hops)


def _by_size(messages: Sequence[Message]) -> dict[int, F64]:
    """Return what messages of one hop took, by their size: the side that waited less tells.

    What is timed together is as long as the longest of it: only where there is nothing else.
    """
    alone = [message for message in messages if message.alone]
    messages = alone if len(alone) >= FEWEST else messages
    took = {}
    for size in {message.size_bytes for message in messages if message.size_bytes}:
        same = [message for message in messages if message.size_bytes == size]
        sides = [
            [message.time_ns for message in same if message.sent == sent] for sent in (True, False)
        ]
        seen = [side for side in sides if side]
        # Recorders keep the last calls: the last of both sides are one message.
        count = min(map(len, seen))
        if count >= FEWEST or same[0].both_ways:
            took[size] = np.array([side[-count:] for side in seen]).min(axis=0)
    return took
