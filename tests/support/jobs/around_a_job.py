"""A verb around a job that has never heard of debubble, and what starting one comes to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(__file__).with_name("plain_job.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
QUIET = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def run_verb(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a verb in a folder, with what it prints at hand."""
    return subprocess.run(
        [sys.executable, "-m", "debubble", *words],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | QUIET,
    )
