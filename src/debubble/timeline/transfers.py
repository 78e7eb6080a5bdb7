"""All ranks' messages in → sends matched with their receives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from debubble.timeline.model import I32, Transfers
from debubble.timeline.work import Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """One rank's messages, and the step of each."""

    messages: Messages
    step: I32


def match_transfers(
    posted: Mapping[int, Posted], across_steps: Collection[tuple[int, int]] = ()
) -> tuple[Transfers, int]:
    """Pair the k-th send of a step to a rank with its k-th receive; return also how many are left.

    Messages between two ranks keep their order: one communicator is one queue. A server's answers
    are received in a later step than they are sent, and a server may mark no steps: for such pairs
    of ranks only the order counts, and what the capture cut off at either end is no gap.
    """
    parts: list[dict[str, NDArray[np.generic]]] = []
    unmatched = 0
    for source, destination in _pairs(posted):
        sent, received = posted[source], posted[destination]
        if (source, destination) in across_steps:
            parts.append(_pair_across_steps(posted, source, destination))
            continue
        for step in sorted(set(sent.step[sent.step >= 0].tolist())):
            sends = _rows(sent, step, destination, is_send=True)
            receives = _rows(received, step, source, is_send=False)
            count = min(len(sends), len(receives))
            unmatched += len(sends) + len(receives) - 2 * count
            if count:
                parts.append(
                    _pair(
                        source,
                        destination,
                        step,
                        (sent, sends[:count]),
                        (received, receives[:count]),
                    )
                )
    return _join(parts), unmatched


def answers_lag(first: Posted, following: int, last: int) -> bool:
    """Tell a server: its first rank takes the answer to an earlier batch before it sends the next.

    A loop that waits for each batch sends first, and training does too.
    """
    messages = first.messages
    sends = messages.is_send & (messages.peer == following)
    receives = ~messages.is_send & (messages.peer == last)
    for step in np.unique(first.step[first.step >= 0]).tolist():
        sent = np.flatnonzero(sends & (first.step == step))
        received = np.flatnonzero(receives & (first.step == step))
        if len(sent) and len(received) and received[0] < sent[0]:
            return True
    return False


def count_early(posted: Mapping[int, Posted], source: int, destination: int) -> int:
    """Return how many of the first receives answer to sends from before the sender's capture.

    As few as will do: one less, and messages would arrive before they are sent. A wrong pair is
    off by a whole turn; less than half of one may be a clock that is off.
    """
    sends, receives = _all_rows(posted, source, destination)
    started = posted[source].messages.start_ns[sends]
    ended = posted[destination].messages.end_ns[receives]
    tolerated = np.median(np.diff(started)) / 2 if len(started) > 1 else 0.0
    for early in range(len(ended)):
        count = min(len(started), len(ended) - early)
        if (ended[early : early + count] - started[:count]).min(initial=0) >= -tolerated:
            return early
    return len(ended)


def _all_rows(
    posted: Mapping[int, Posted], source: int, destination: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    sent, received = posted[source].messages, posted[destination].messages
    return (
        np.flatnonzero((sent.peer == destination) & sent.is_send),
        np.flatnonzero((received.peer == source) & ~received.is_send),
    )


def _pair_across_steps(
    posted: Mapping[int, Posted], source: int, destination: int
) -> dict[str, NDArray[np.generic]]:
    sent, received = posted[source], posted[destination]
    sends, receives = _all_rows(posted, source, destination)
    early = count_early(posted, source, destination)
    receives = receives[early : early + len(sends)]
    sends = sends[: len(receives)]
    pair = _pair(source, destination, 0, (sent, sends), (received, receives))
    return {**pair, "step": sent.step[sends]}


def _pairs(posted: Mapping[int, Posted]) -> Iterator[tuple[int, int]]:
    for source, sent in sorted(posted.items()):
        messages = sent.messages
        for destination in np.unique(messages.peer[messages.is_send]).tolist():
            if destination in posted:
                yield source, destination


def _rows(posted: Posted, step: int, peer: int, *, is_send: bool) -> NDArray[np.intp]:
    messages = posted.messages
    return np.flatnonzero(
        (posted.step == step) & (messages.peer == peer) & (messages.is_send == is_send)
    )


def _pair(
    source: int,
    destination: int,
    step: int,
    sent: tuple[Posted, NDArray[np.intp]],
    received: tuple[Posted, NDArray[np.intp]],
) -> dict[str, NDArray[np.generic]]:
    sends, receives = sent[0].messages, received[0].messages
    out, into = sent[1], received[1]
    return {
        "source": np.full(len(out), source, dtype=np.int32),
        "destination": np.full(len(out), destination, dtype=np.int32),
        "step": np.full(len(out), step, dtype=np.int32),
        "message_bytes": np.maximum(sends.message_bytes[out], receives.message_bytes[into]),
        "send_start_ns": sends.start_ns[out],
        "send_end_ns": sends.end_ns[out],
        "receive_start_ns": receives.start_ns[into],
        "receive_end_ns": receives.end_ns[into],
        "fused": sends.fused[out] & receives.fused[into],
    }


def _join(parts: list[dict[str, NDArray[np.generic]]]) -> Transfers:
    empty = {
        name: np.zeros(0, dtype=dtype)
        for name, dtype in (
            ("source", np.int32),
            ("destination", np.int32),
            ("step", np.int32),
            ("message_bytes", np.int64),
            ("send_start_ns", np.int64),
            ("send_end_ns", np.int64),
            ("receive_start_ns", np.int64),
            ("receive_end_ns", np.int64),
            ("fused", np.bool_),
        )
    }
    columns = {
        name: np.concatenate([none, *(part[name] for part in parts)])
        for name, none in empty.items()
    }
    order = np.argsort(columns["receive_end_ns"], kind="stable")
    return Transfers(**{name: column[order] for name, column in columns.items()})
