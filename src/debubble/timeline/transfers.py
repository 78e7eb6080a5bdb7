"""All ranks' messages in → sends matched with their receives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def match_transfers(posted: Mapping[int, Posted]) -> tuple[Transfers, int]:
    """Pair the k-th send of a step to a rank with its k-th receive; return also how many are left.

    Messages between two ranks keep their order: one communicator is one queue.
    """
    parts: list[dict[str, NDArray[np.generic]]] = []
    unmatched = 0
    for source, destination in _pairs(posted):
        sent, received = posted[source], posted[destination]
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
