"""A job in → the sidecar beside its trace: what the profiler cannot see."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from debubble import __version__
from debubble.capture.labels import Pipeline

SCHEMA = "debubble.sidecar/1"
_STARTED_KEY = "debubble/capture/started"
_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\b(\d{3}\.\d[\d.]*)\b")
_COMMIT = re.compile(r"^[0-9a-f]{40,64}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOfJob:
    """A process among the others of its job."""

    rank: int
    world_size: int
    started: str
    """UTC, such as 20260131-235959; one for all ranks."""


def describe_job(  # noqa: PLR0913 (one argument for each thing that it says)
    capture: str,
    rank: RankOfJob,
    pipeline: Pipeline,
    *,
    split: tuple[int, ...] | None,
    tokens: int | None,
    context_lengths: tuple[int, ...] | None = None,
    steps_s: Mapping[str, Sequence[float]],
    power_w: float | None = None,
) -> str:
    """Return the sidecar of a rank's trace: what the job says of itself, and of its device now."""
    data = {
        "schema": SCHEMA,
        "debubble": __version__,
        "capture": capture,
        "rank": rank.rank,
        "world_size": rank.world_size,
        "pipeline": pipeline.describe(split),
        "workload": {"tokens": tokens, "context_lengths": context_lengths},
        "steps": dict(steps_s),
        "memory": describe_memory(),
        "power": {"draw_w": power_w},
        "environment": _describe_environment(),
    }
    return json.dumps(data, indent=2) + "\n"


def find_rank() -> RankOfJob:
    """Ask torch.distributed, else the launcher's variables; alone, a job is rank 0 of 1."""
    now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    if not (dist.is_available() and dist.is_initialized()):
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        return RankOfJob(rank=rank, world_size=world_size, started=now)
    # Whoever comes first says when the job began; no rank waits for another.
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 (no public way to it)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    started: bytes = store.compare_set(f"{_STARTED_KEY}/{restarts}", "", now)
    return RankOfJob(
        rank=dist.get_rank(), world_size=dist.get_world_size(), started=started.decode()
    )


def uses_cuda() -> bool:
    """Tell whether this process uses CUDA; asking must not make it do so."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@cache
def _describe_environment() -> dict[str, Any]:
    """Return what decides whether two captures may be compared."""
    cuda = uses_cuda()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": _nccl_version() if cuda else None,
        "driver": _driver_version(),
        "device": torch.cuda.get_device_name() if cuda else None,
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "host": platform.node(),
        "git_commit": git_commit(Path(sys.argv[0]).resolve().parent) or git_commit(Path.cwd()),
    }


def describe_memory() -> dict[str, int | None]:
    """Return the device's memory: the most since the job began, and what is left now."""
    cuda = uses_cuda()
    free, total = torch.cuda.mem_get_info() if cuda else (None, None)
    return {
        "max_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "max_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "reserved_bytes": torch.cuda.memory_reserved() if cuda else None,
        "free_bytes": free,
        "total_bytes": total,
    }


def read_power_w() -> float | None:
    """Return what the device draws now, as NVML has it; None where nobody can tell."""
    if not torch.cuda.is_available():
        return None
    try:
        return torch.cuda.power_draw() / 1000  # milliwatts
    except Exception:  # noqa: BLE001 (no NVML, no Python for it, no right to ask: then it is not known)
        return None


def git_commit(folder: Path) -> str | None:
    """Return the commit checked out there, read from git's files: no process is started."""
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        try:
            if git.is_file():  # a worktree or a submodule points to its own folder
                git = parent / git.read_text("utf-8").removeprefix("gitdir:").strip()
            if git.is_dir():
                return _head(git)
        except (OSError, UnicodeDecodeError):
            return None
    return None


def _head(git: Path) -> str | None:
    head = (git / "HEAD").read_text("utf-8").strip()
    if not head.startswith("ref:"):
        return head if _COMMIT.match(head) else None
    name = head.removeprefix("ref:").strip()
    shared = git / "commondir"
    root = git / shared.read_text("utf-8").strip() if shared.is_file() else git
    if (root / name).is_file():
        return (root / name).read_text("utf-8").strip()
    packed = root / "packed-refs"
    lines = packed.read_text("utf-8").splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)


def _nccl_version() -> str | None:
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError, TypeError):
        return None


def _driver_version() -> str | None:
    try:
        version = _DRIVER_VERSION.search(_DRIVER.read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return version[1] if version else None
