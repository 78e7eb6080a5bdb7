"""One rank of the live hop test."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from debubble.errors import LinkTestError, MissingExtra
from debubble.links.expectation import Hop
from debubble.links.live.measured import Measured, Place, Rung, pairs_of, second_pass, times_of

if TYPE_CHECKING:
    import torch

    from debubble.links.expectation import Hop

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


Progress = Callable[[int, int], None]
_PATIENCE = timedelta(minutes=10)
ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to measure."""

    sizes: tuple[int, ...]
    job_bytes: int | None
    samples: int
    every_pair: bool
    backend: str | None


def run_rank(asked: Asked, on_progress: Progress) -> Measured | None:
    """Take part in a hop test; return what was measured on the first rank, None on others."""
    try:
        import torch  # noqa: PLC0415 (an extra)
        import torch.distributed as dist  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtra(
            "measuring hops needs torch", hint="pip install 'debubble[torch]'"
        ) from error
    if "RANK" not in os.environ:
        raise LinkTestError(
            "this rank was not told which it is",
            hint="start it with torchrun … -m debubble.links, or with debubble links run",
        )
    chosen = asked.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = _device(chosen)
    with _job(chosen, device):
        # What is decided and waited for goes beside the wire that is measured.
        control = dist.new_group(backend="gloo", timeout=_PATIENCE)
        return _measure(replace(asked, backend=chosen), control, device, on_progress)


def _device(backend: str) -> torch.device:
    import torch  # noqa: PLC0415

    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device(
        "cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    )
    torch.cuda.set_device(device)
    return device


@contextmanager
def _job(backend: str, device: torch.device) -> Iterator[None]:
    import torch.distributed as dist  # noqa: PLC0415

    more: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(backend, timeout=_PATIENCE, **more)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _measure(
    asked: Asked, control: Any, device: torch.device, on_progress: Progress
) -> Measured | None:
    import torch.distributed as dist  # noqa: PLC0415

    probe = Probe(device, -(-asked.samples // ROUNDS))
    pairs = pairs_of(dist.get_world_size(), every=asked.every_pair)
    for pair in pairs:
        probe.open(pair)
        dist.barrier(control)
    hops = tuple(hop for pair in pairs for hop in (pair, pair[::-1]))
    rungs = _climb(control, probe, hops, asked.sizes, on_progress, both=True)
    name = device.type if device.type == "cpu" else _device_name(device)
    places = _gather(control, [Place(rank=dist.get_rank(), host=socket.gethostname(), device=name)])
    measured = Measured(
        backend=asked.backend or "",
        job_bytes=asked.job_bytes,
        places=places,
        rungs=rungs,
        second=(),
    )
    # The first rank alone decides, and tells the others.
    decided: list[tuple[Hop, ...]] = [second_pass(measured) if dist.get_rank() == 0 else ()]
    dist.broadcast_object_list(decided, src=0, group=control)
    for hop in decided[0]:
        probe.open(hop)
        dist.barrier(control)
    second = _climb(control, probe, decided[0], asked.sizes, on_progress, both=False)
    return replace(measured, second=second) if dist.get_rank() == 0 else None


def _climb(  # noqa: PLR0913 (what to measure, and how to say so)
    control: Any,
    probe: Probe,
    hops: tuple[Hop, ...],
    sizes: tuple[int, ...],
    on_progress: Progress,
    *,
    both: bool,
) -> tuple[Rung, ...]:
    """Measure hop after hop, with nothing else running, in rounds.

    What else a machine does for a while then falls on all hops alike.
    """
    import torch.distributed as dist  # noqa: PLC0415

    mine: list[Sent] = []
    turns = hops * ROUNDS
    for done, hop in enumerate(turns):
        mine += probe.climb(hop, sizes, both=both)
        dist.barrier(control)
        on_progress(done + 1, len(turns))
    return as_rungs(_gather(control, mine))


def _gather(control: Any, mine: list[Any]) -> tuple[Any, ...]:
    import torch.distributed as dist  # noqa: PLC0415

    found: list[list[Any]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine, group=control)
    return tuple(one for part in found for one in part)


def _device_name(device: torch.device) -> str:
    import torch  # noqa: PLC0415

    return torch.cuda.get_device_name(device)
