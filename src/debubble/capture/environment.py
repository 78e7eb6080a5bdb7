"""Where a job ran: versions, device, host, commit, memory. What cannot be known is null."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\b(\d{3}\.\d[\d.]*)\b")
_COMMIT = re.compile(r"^[0-9a-f]{40,64}$")


def describe_environment() -> dict[str, Any]:
    """Return what decides whether two captures may be compared."""
    cuda = torch.cuda.is_available()
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
    if not torch.cuda.is_available():
        return dict.fromkeys(
            (
                "max_allocated_bytes",
                "max_reserved_bytes",
                "reserved_bytes",
                "free_bytes",
                "total_bytes",
            )
        )
    free, total = torch.cuda.mem_get_info()
    return {
        "max_allocated_bytes": torch.cuda.max_memory_allocated(),
        "max_reserved_bytes": torch.cuda.max_memory_reserved(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "free_bytes": free,
        "total_bytes": total,
    }


def git_commit(folder: Path) -> str | None:
    """Return the commit checked out there, read from git's files: no process is started."""
    for place in (folder, *folder.parents):
        git = place / ".git"
        try:
            if git.is_file():  # a worktree or a submodule points to its own folder
                git = place / git.read_text("utf-8").removeprefix("gitdir:").strip()
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
        found = _DRIVER_VERSION.search(_DRIVER.read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return found[1] if found else None
