"""A real Dask cluster on loopback: a scheduler and workers, each a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.processes import wait_until

_TESTS = Path(__file__).resolve().parents[2]
# Two workers lost to one file instead of eight: the same story, told faster.
_SETTINGS = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}


@dataclass(slots=True)
class Cluster:
    """Its address, and its processes to kill."""

    folder: Path
    address: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start one process of it; what it says goes to a file."""
        log = self.folder / f"{len(self.processes)}.log"
        process = subprocess.Popen(
            [sys.executable, "-m", "dask", *words],
            env=os.environ | _SETTINGS | {"PYTHONPATH": _path()} | environment,
            cwd=self.folder,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
        )
        self.processes.append(process)
        return process

    def start_worker(self, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start one worker with one thread; nobody starts it again."""
        fixed = ("--nthreads", "1", "--no-dashboard", "--memory-limit", "0", "--no-nanny")
        return self.start("worker", self.address, *fixed, *words, **environment)

    def stop(self) -> None:
        """End all of it, at once: nothing of it is needed again."""
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def started_cluster(
    workers: int = 2,
    *,
    scheme: str = "tcp",
    security: Any = None,
    **environment: str,
) -> Iterator[Cluster]:
    """Lend a cluster whose workers are all there."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cluster = Cluster(folder=Path(folder))
        known = cluster.folder / "scheduler.json"
        cluster.start(
            *("scheduler", "--host", f"{scheme}://127.0.0.1", "--port", "0", "--no-dashboard"),
            *("--scheduler-file", str(known)),
            **environment,
        )
        try:
            wait_until(lambda: known.exists() and known.read_text().endswith("}"))
            cluster.address = json.loads(known.read_text())["address"]
            for _ in range(workers):
                cluster.start_worker(**environment)
            wait_until(lambda: count_workers(cluster.address, security) == workers)
            yield cluster
        finally:
            cluster.stop()


def count_workers(address: str, security: Any = None) -> int:
    """Ask the scheduler, in a client of its own."""
    from distributed import Client  # noqa: PLC0415

    with Client(address, set_as_default=False, timeout=30, security=security) as client:
        return len(client.nthreads())


def count_tasks(address: str) -> int:
    """Ask the scheduler how much work it has been given and not been told to forget."""
    from distributed import Client  # noqa: PLC0415

    with Client(address, set_as_default=False, timeout=30) as client:
        return client.run_on_scheduler(_count_tasks)


def _count_tasks(dask_scheduler):
    return len(dask_scheduler.tasks)


def _path() -> str:
    import debubble  # noqa: PLC0415

    return os.pathsep.join([str(Path(debubble.__file__).parents[1]), str(_TESTS)])
