"""Which rank this process is, and when the job began: the same on all ranks."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch.distributed as dist

_STARTED_KEY = "debubble/capture/started"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process among the others of its job."""

    rank: int
    world_size: int
    started: str
    """UTC, such as 20260131-235959; one for all ranks."""


def find_place() -> Place:
    """Ask torch.distributed, else the launcher's variables; alone, a job is rank 0 of 1."""
    now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    if dist.is_available() and dist.is_initialized():
        return Place(rank=dist.get_rank(), world_size=dist.get_world_size(), started=_agree_on(now))
    rank = int(os.environ.get("RANK", "0"))
    return Place(rank=rank, world_size=int(os.environ.get("WORLD_SIZE", "1")), started=now)


def _agree_on(now: str) -> str:
    """Let whoever comes first say when the job began; no rank waits for another."""
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 (no public way to it)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    said: bytes = store.compare_set(f"{_STARTED_KEY}/{restarts}", "", now)
    return said.decode()
