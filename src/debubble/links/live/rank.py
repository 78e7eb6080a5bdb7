"""One rank of a hop test: measures with its partners; the first rank gathers and decides."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from debubble.errors import LinkTestError, MissingExtra
from debubble.links.live.ladder import pairs_of
from debubble.links.live.measured import Measured, Place, Rung
from debubble.links.live.probe import Probe, Sent, as_rungs
from debubble.links.live.verdicts import second_pass

if TYPE_CHECKING:
    import torch

    from debubble.links.expectation import Hop

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
