"""Two ranks in → seconds of messages between them. The only part that needs torch."""

from __future__ import annotations

import time
from statistics import median, quantiles
from typing import TYPE_CHECKING

from debubble.links.live.measured import Rung, Times

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from debubble.links.expectation import Hop

# The first messages build connections, fill caches and wake clocks.
_WARM_UP = 3
# An answer that takes no time but the way back.
_ANSWER_BYTES = 8


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

    def climb(self, hop: Hop, sizes: tuple[int, ...], *, both: bool) -> list[Rung]:
        """Measure all sizes over one hop; only the sender has them to tell.

        A message of some size goes there and a few bytes come back; half of what these few bytes
        take both ways is the way back. So the two directions of a pair are told apart.
        """
        if self._rank not in hop:
            return []
        back = median(self._round_trips(hop, _ANSWER_BYTES, self._samples)) / 2
        rungs = []
        for size in sizes:
            one_way = [
                max(trip - back, back) for trip in self._round_trips(hop, size, self._samples)
            ]
            exchanged = self._exchanges(hop, size) if both else []
            rungs.append(
                Rung(
                    source=hop[0],
                    destination=hop[1],
                    size_bytes=size,
                    one_way=_times(one_way),
                    both_ways=_times(exchanged) if both else None,
                )
            )
        return rungs if self._rank == hop[0] else []

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


def _times(seconds: list[float]) -> Times:
    return Times(
        median_s=median(seconds),
        p95_s=quantiles(seconds, n=20)[-1] if len(seconds) > 1 else seconds[0],
        n=len(seconds),
    )


