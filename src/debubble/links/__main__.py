"""`torchrun … -m debubble.links`: measures the hops between the ranks of a job.

```
rank 0   send 8 MiB ───────────►  recv ◄──        one way: the round trip, less the few bytes' way
rank 1   recv ─────────────────►  send 8 bytes    back, half of what they take there and back
rank 0   send and recv 8 MiB                      both ways: begun together, timed together
rank 1   send and recv 8 MiB
```

torch is an extra, so it is imported when a test begins.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from debubble.errors import DebubbleError, LinkTestError, MissingExtra, UsageError
from debubble.links.hop_times import Hop
from debubble.links.live import (
    HopTestResult,
    RankSite,
    Rung,
    pairs_of,
    second_pass,
    sizes_of,
    times_of,
    write_measured,
)
from debubble.units import parse_bytes, write_file

if TYPE_CHECKING:
    import torch


Progress = Callable[[int, int], None]
_ROUNDS = 4
# Of each round and size; fewer give no steady median.
_SAMPLES = 5
# The first messages build connections, fill caches and wake clocks.
_WARM_UP = 3
# An answer that takes no time but the way back.
_ANSWER_BYTES = 8
_PATIENCE = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds of messages of one size over one hop, in one round."""

    hop: Hop
    size_bytes: int
    there_and_back: list[float]
    """The message there, a few bytes back."""
    back_s: float
    """What these few bytes took, in the round of this message."""
    both_ways: list[float]


def run_rank(
    sizes: tuple[int, ...], job_bytes: int | None, backend: str | None, on_progress: Progress
) -> HopTestResult | None:
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
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    more: dict[str, Any] = {}
    if backend == "nccl":
        local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        more = {"device_id": device}
    dist.init_process_group(backend, timeout=_PATIENCE, **more)
    try:
        # What is decided and waited for goes beside the wire that is measured.
        # What is decided and waited for goes beside the wire that is measured.
        probe = Probe(device, dist.new_group(backend="gloo", timeout=_PATIENCE))
        pairs = pairs_of(probe.ranks)
        probe.open(pairs)
        hops = tuple(hop for pair in pairs for hop in (pair, pair[::-1]))
        rungs = probe.climb(hops, sizes, on_progress, both=True)
        place = RankSite(rank=probe.rank, host=socket.gethostname(), device=probe.device_name)
        measured = HopTestResult(
            backend=backend,
            job_bytes=job_bytes,
            places=probe.gather([place]),
            rungs=rungs,
            second=(),
        )
        # The first rank alone decides, and tells the others.
        again = probe.tell(second_pass(measured) if probe.rank == 0 else ())
        probe.open(again)
        second = probe.climb(again, sizes, on_progress, both=False)
        return replace(measured, second=second) if probe.rank == 0 else None
    finally:
        dist.destroy_process_group()


def as_rungs(rounds: Iterable[Round]) -> tuple[Rung, ...]:
    """Put rounds together, hop by hop and size by size.

    The way back is that of the quietest round: on a busy machine all its few bytes may wake up late
    in a round, and would take from the wire.
    """
    rounds = tuple(rounds)
    back: dict[Hop, float] = {}
    for sent in rounds:
        back[sent.hop] = min(sent.back_s, back.get(sent.hop, sent.back_s))
    one_way: dict[tuple[Hop, int], list[float]] = {}
    both_ways: dict[tuple[Hop, int], list[float]] = {}
    for sent in rounds:
        key, least = (sent.hop, sent.size_bytes), back[sent.hop]
        trips = [max(trip - least, least) for trip in sent.there_and_back]
        one_way.setdefault(key, []).extend(trips)
        both_ways.setdefault(key, []).extend(sent.both_ways)
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
    """Sends messages from this rank's device, in turn with the other ranks."""

    def __init__(self, device: torch.device, control: Any) -> None:
        import torch  # noqa: PLC0415 (an extra)
        import torch.distributed as dist  # noqa: PLC0415

        self._torch, self._dist = torch, dist
        self._device, self._control = device, control
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        on_gpu = device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(device) if on_gpu else device.type

    def open(self, pairs: tuple[Hop, ...]) -> None:
        """Send a few bytes each way, so that what is set up lazily is there."""
        for pair in pairs:
            if self.rank in pair:
                for hop in (pair, pair[::-1]):
                    self._round_trips(hop, _ANSWER_BYTES, samples=1)
            self._dist.barrier(self._control)

    def climb(
        self, hops: tuple[Hop, ...], sizes: tuple[int, ...], on_progress: Progress, *, both: bool
    ) -> tuple[Rung, ...]:
        """Measure hop after hop, with nothing else running, in rounds.

        What else a machine does for a while then falls on all hops alike.
        """
        mine: list[Round] = []
        turns = hops * _ROUNDS
        for done, hop in enumerate(turns):
            if self.rank in hop:
                measured = self._measure(hop, sizes, both=both)
                mine += measured if self.rank == hop[0] else []
            self._dist.barrier(self._control)
            on_progress(done + 1, len(turns))
        return as_rungs(self.gather(mine))

    def gather(self, mine: list[Any]) -> tuple[Any, ...]:
        """Return what all ranks have."""
        found: list[list[Any]] = [[] for _ in range(self.ranks)]
        self._dist.all_gather_object(found, mine, group=self._control)
        return tuple(item for part in found for item in part)

    def tell(self, hops: tuple[Hop, ...]) -> tuple[Hop, ...]:
        """Return what the first rank gave, on all ranks."""
        told = [hops]
        self._dist.broadcast_object_list(told, src=0, group=self._control)
        return told[0]

    def _measure(self, hop: Hop, sizes: tuple[int, ...], *, both: bool) -> list[Round]:
        """Measure all sizes over one hop; what its sender times counts.

        A message of some size goes there and a few bytes come back; half of what these few bytes
        take both ways is the way back. So the two directions of a pair are told apart.
        """
        back = times_of(self._round_trips(hop, _ANSWER_BYTES)).alone_s / 2
        return [
            Round(
                hop=hop,
                size_bytes=size,
                there_and_back=self._round_trips(hop, size),
                back_s=back,
                both_ways=self._exchanges(hop, size) if both else [],
            )
            for size in sizes
        ]

    def _round_trips(self, hop: Hop, size: int, samples: int = _SAMPLES) -> list[float]:
        there, answer = self._buffer(size), self._buffer(_ANSWER_BYTES)
        seconds = []
        for _ in range(_WARM_UP + samples):
            self._settle()
            began = time.perf_counter()
            self._round_trip(hop, there, answer)
            seconds.append(time.perf_counter() - began)
        return seconds[_WARM_UP:]

    def _exchanges(self, hop: Hop, size: int) -> list[float]:
        other = hop[1] if self.rank == hop[0] else hop[0]
        out, into, answer = (self._buffer(bytes_) for bytes_ in (size, size, _ANSWER_BYTES))
        seconds = []
        for _ in range(_WARM_UP + _SAMPLES):
            # Both begin together: a few bytes there and back.
            self._round_trip(hop, answer, answer)
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

    def _round_trip(self, hop: Hop, there: torch.Tensor, answer: torch.Tensor) -> None:
        if self.rank == hop[0]:
            self._dist.send(there, hop[1])
            self._dist.recv(answer, hop[1])
        else:
            self._dist.recv(there, hop[0])
            self._dist.send(answer, hop[0])
        self._settle()

    def _buffer(self, size: int) -> torch.Tensor:
        return self._torch.zeros(size, dtype=self._torch.uint8, device=self._device)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)


@click.command("torchrun … -m debubble.links")
@click.option("--out", type=click.Path(path_type=Path), default=Path("links.json"))
@click.option("--size", metavar="SIZE", help="What the job itself sends, such as 8MiB.")
@click.option("--largest", metavar="SIZE", default="64MiB", show_default=True)
@click.option("--backend", type=click.Choice(["nccl", "gloo"]))
@click.option("--progress", type=click.Path(path_type=Path), help="A file to write progress to.")
@click.option("--force", is_flag=True, help="Replace the file.")
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    out: Path,
    size: str | None,
    largest: str,
    backend: str | None,
    progress: Path | None,
    force: bool,
) -> None:
    """Measure the hops between the ranks of this job; the first rank writes them to a file."""
    if out.exists() and not force:
        raise UsageError(f"{out} is there already", hint="give another --out, or --force")

    def show(done: int, total: int) -> None:
        if progress is not None:
            progress.write_text(f"{done} {total}", "utf-8")

    job = None if size is None else parse_bytes(size)
    measured = run_rank(sizes_of(parse_bytes(largest), job), job, backend, show)
    if measured is not None:
        write_file(out, write_measured(measured).encode())
        click.echo(f"{out} written; next: debubble links {out}")


def main(words: Sequence[str] | None = None) -> None:
    """Run one rank; say what is wrong without a traceback."""
    try:
        command.main(args=None if words is None else list(words), standalone_mode=False)
    except DebubbleError as error:
        click.echo(f"error: {error}", err=True)
        if error.hint:
            click.echo(f"\nhint: {error.hint}", err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(2)


if __name__ == "__main__":
    main()
