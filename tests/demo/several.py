"""Runs several workloads in the same four processes: importing torch takes longer than a run."""

from __future__ import annotations

import os
import subprocess
import sys

from debubble.demo.files import RunFiles
from debubble.demo.launch import LOOPBACK
from debubble.demo.workload import encode_workload

PROGRAM = """
import sys
from pathlib import Path
from debubble.demo.files import RunFiles
from debubble.demo.rank import run_rank
for folder in sys.argv[2:]:
    run_rank(RunFiles(folder=Path(folder)), int(sys.argv[1]))
"""
TIMEOUT_S = 120


def run_several(workloads, root):
    """Run each workload, by name, into a folder of that name; all have the same processes."""
    (world,) = {workload.world for workload in workloads.values()}
    folders = [root / name for name in workloads]
    for folder, workload in zip(folders, workloads.values(), strict=True):
        folder.mkdir()
        files = RunFiles(folder=folder)
        files.write(files.workload, encode_workload(workload))
    settings = {"GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, str(rank), *map(str, folders)],
            env=os.environ | settings,
        )
        for rank in range(world)
    ]
    try:
        assert [process.wait(TIMEOUT_S) for process in processes] == [0] * world
    finally:
        for process in processes:
            process.kill()
            process.wait()
