"""Runs several workloads in the same few processes: importing torch takes longer than a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
from support.jobs.recorded_pipeline import WORKLOAD

from debubble.annexes.demo.workload import LOOPBACK

TESTS = Path(__file__).parents[2]
# torch is imported once; each rank is a fork.
PROGRAM = """
import os, sys, traceback
from pathlib import Path
from support.jobs.recorded_pipeline import run_recorded

def run(rank):
    code = 1
    try:
        for folder in sys.argv[2:]:
            run_recorded(Path(folder), rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)

for rank in range(int(sys.argv[1])):
    if not os.fork():
        run(rank)
sys.exit(any(os.wait()[1] for _ in range(int(sys.argv[1]))))
"""
TIMEOUT_S = 120
# Of their time, layers whose length nobody measures.
HASTE = 0.3


def hasty(workload):
    """Return a workload whose shape is looked at, and not its times."""
    short = {name: HASTE * getattr(workload, name) for name in ("forward_ms", "backward_ms")}
    return replace(workload, **short)


def measured_in(session):
    """Tell whether times are measured in this session, by `make accuracy`."""
    return any(item.get_closest_marker("accuracy") for item in session.items)


def environment_of_ranks():
    """Return what processes need that run workloads."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    settings = {"GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return os.environ | settings


def run_several(workloads, root):
    """Run each workload, by name, into a folder of that name; all have the same processes."""
    (world,) = {workload.world for workload in workloads.values()}
    folders = [root / name for name in workloads]
    for folder, workload in zip(folders, workloads.values(), strict=True):
        folder.mkdir(parents=True)
        (folder / WORKLOAD).write_bytes(msgspec.json.encode(workload))
    launcher = subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, str(world), *map(str, folders)],
        env=environment_of_ranks(),
        start_new_session=True,
    )
    try:
        assert launcher.wait(TIMEOUT_S) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
