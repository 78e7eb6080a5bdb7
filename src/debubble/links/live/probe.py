"""Two ranks in → seconds of messages between them. The only part that needs torch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from debubble.links.expectation import Hop
from debubble.links.live.measured import Rung, times_of

if TYPE_CHECKING:
    import torch

# The first messages build connections, fill caches and wake clocks.
_WARM_UP = 3
# An answer that takes no time but the way back.
_ANSWER_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Seconds of messages of one size over one hop."""

    hop: Hop
    size_bytes: int
    there_and_back: list[float]
    """The message there, a few bytes back."""
    back_s: float
    """What these few bytes took, in the round of this message."""
    both_ways: list[float]


def as_rungs(sent: Iterable[Sent]) -> tuple[Rung, ...]:
    """Put rounds together, hop by hop and size by size.

    The way back is that of the quietest round: on a busy machine all its few bytes may wake up late
    in a round, and would take from the wire.
    """
    sent = tuple(sent)
    back: dict[Hop, float] = {}
    for one in sent:
        back[one.hop] = min(one.back_s, back.get(one.hop, one.back_s))
    one_way: dict[tuple[Hop, int], list[float]] = {}
    both_ways: dict[tuple[Hop, int], list[float]] = {}
    for one in sent:
        key, least = (one.hop, one.size_bytes), back[one.hop]
        trips = [max(trip - least, least) for trip in one.there_and_back]
        one_way.setdefault(key, []).extend(trips)
        both_ways.setdefault(key, []).extend(one.both_ways)
    return tuple(
        Rung(
            source=hop[0],
            destination=hop[1],
            size_bytes=size,
            one_way=times_of(seconds),
            both_ways=times_of(both_ways[hop, size]) if both_ways[hop, size] else None,
        )
        for (hop, size), seconds in one_way.items()
    )


class Probe:
    """Sends messages from this rank's device."""

    def __init__(self, device: torch.device, samples: int) -> None:
        import torch  # noqa: PLC0415 (an extra)
        import torch.distributed as dist  # noqa: PLC0415

        self._torch, self._dist = torch, dist
        self._device, self._samples = device, samples
        self._rank = dist.get_rank()

    def open(self, pair: Hop) -> None:
        """Send a few bytes each way, so that what is set up lazily is there."""
        if self._rank in pair:
            for hop in (pair, pair[::-1]):
                self._round_trips(hop, _ANSWER_BYTES, 1)

    def climb(self, hop: Hop, sizes: tuple[int, ...], *, both: bool) -> list[Sent]:
        """Measure all sizes over one hop; only the sender has them to tell.

        A message of some size goes there and a few bytes come back; half of what these few bytes
        take both ways is the way back. So the two directions of a pair are told apart.
        """
        if self._rank not in hop:
            return []
        back = times_of(self._round_trips(hop, _ANSWER_BYTES, self._samples)).alone_s / 2
        found = [
            Sent(
                hop=hop,
                size_bytes=size,
                there_and_back=self._round_trips(hop, size, self._samples),
                back_s=back,
                both_ways=self._exchanges(hop, size) if both else [],
            )
            for size in sizes
        ]
        return found if self._rank == hop[0] else []

    def _round_trips(self, hop: Hop, size: int, samples: int) -> list[float]:
        there, answer = self._buffer(size), self._buffer(_ANSWER_BYTES)
        seconds = []
        for _ in range(_WARM_UP + samples):
            self._settle()
            began = time.perf_counter()
            if self._rank == hop[0]:
                self._dist.send(there, hop[1])
                self._dist.recv(answer, hop[1])
            else:
                self._dist.recv(there, hop[0])
                self._dist.send(answer, hop[0])
            self._settle()
            seconds.append(time.perf_counter() - began)
        return seconds[_WARM_UP:]

    def _exchanges(self, hop: Hop, size: int) -> list[float]:
        other = hop[1] if self._rank == hop[0] else hop[0]
        out, into = self._buffer(size), self._buffer(size)
        seconds = []
        for _ in range(_WARM_UP + self._samples):
            # Both begin together: a few bytes there and back.
            self._meet(hop)
            began = time.perf_counter()
            operations = [
                self._dist.P2POp(self._dist.isend, out, other),
                self._dist.P2POp(self._dist.irecv, into, other),
            ]
            for work in self._dist.batch_isend_irecv(operations):
                work.wait()
            self._settle()
            seconds.append(time.perf_counter() - began)
        return seconds[_WARM_UP:]

    def _meet(self, hop: Hop) -> None:
        answer = self._buffer(_ANSWER_BYTES)
        if self._rank == hop[0]:
            self._dist.send(answer, hop[1])
            self._dist.recv(answer, hop[1])
        else:
            self._dist.recv(answer, hop[0])
            self._dist.send(answer, hop[0])
        self._settle()

    def _buffer(self, size: int) -> torch.Tensor:
        return self._torch.zeros(size, dtype=self._torch.uint8, device=self._device)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)
