"""A workload in → its processes, and the files they leave."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from debubble.demo.workload import encode_workload
from debubble.errors import DemoError, MissingExtra, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from debubble.demo.workload import Workload

# Everything a run writes, so that a forced run removes an older one and nothing else.
RESULTS = ("rank*.pt.trace.json.gz", "truth*.json")
LOGS = ("rank*.log",)
SCRATCH = (".debubble-demo.*",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """One folder: a trace and a truth for each rank; logs and scratch files until it succeeded."""

    folder: Path

    @property
    def workload(self) -> Path:
        """What the ranks are to run."""
        return self.folder / ".debubble-demo.workload.json"

    @property
    def rendezvous(self) -> Path:
        """Where the ranks find each other: a file, so that no port can be taken."""
        return self.folder / ".debubble-demo.rendezvous"

    @property
    def counter(self) -> Path:
        """One byte for each step that rank 0 has ended."""
        return self.folder / ".debubble-demo.steps"

    def trace(self, rank: int) -> Path:
        """Return the profiler's trace of a rank."""
        return self.folder / f"rank{rank}.pt.trace.json.gz"

    def truth(self, rank: int) -> Path:
        """Return what a rank itself wrote down."""
        return self.folder / f"truth{rank}.json"

    def log(self, rank: int) -> Path:
        """Return what a rank printed."""
        return self.folder / f"rank{rank}.log"

    def failure(self, rank: int) -> Path:
        """Return where a rank notes when it failed."""
        return self.folder / f".debubble-demo.failed{rank}"

    @contextmanager
    def replacing(self, file: Path) -> Iterator[Path]:
        """Give a name beside the file to write to; rename it when all is written."""
        partial = self.folder / f".debubble-demo.{file.name}"
        yield partial
        partial.replace(file)

    def write(self, file: Path, content: bytes) -> None:
        """Write a file so that nobody ever sees half of it."""
        with self.replacing(file) as partial:
            partial.write_bytes(content)

    def count_step(self) -> None:
        """Note that one more step ended."""
        with self.counter.open("ab") as counter:
            counter.write(b".")

    def steps_done(self) -> int:
        """Return how many steps have ended."""
        return self.counter.stat().st_size if self.counter.exists() else 0

    def remove(self, *groups: tuple[str, ...]) -> None:
        """Remove the run's own files of these groups; others in the folder stay."""
        for group in groups:
            for pattern in group:
                for file in self.folder.glob(pattern):
                    file.unlink(missing_ok=True)


# Short against a step of the demo, long against what a poll costs.
POLL_S = 0.05

# The end of a Python traceback, with the line that failed.
LOG_TAIL_LINES = 6

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A rank that ended badly, and when it said so (0 where it could not say)."""

    rank: int
    code: int
    when_ns: int


def run_workload(
    workload: Workload,
    out: Path,
    *,
    timeout_s: float = 120,
    on_progress: Callable[[int, int], None] | None = None,
    force: bool = False,
) -> tuple[Path, ...]:
    """Run a workload on this machine and return its traces, one for each rank.

    `on_progress` is told how many steps have ended, and of how many. When a rank fails or the
    time runs out, all of them are killed; their logs stay in the folder.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra(
            "the demo runs a real pipeline, which needs torch", hint="pip install 'debubble[torch]'"
        )
    files = _prepare(out, force=force)
    files.write(files.workload, encode_workload(workload))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(workload.world):
            processes.append(_start(files, rank))  # noqa: PERF401  (each is known once started)
        deadline_s = time.monotonic() + timeout_s
        while _running(processes, files):
            if on_progress is not None:
                on_progress(files.steps_done(), workload.all_steps)
            _refuse_after(deadline_s, timeout_s, files)
            time.sleep(POLL_S)
    except BaseException:
        _kill(processes)
        # What a broken run wrote must not be taken for a run; its logs say why it broke.
        files.remove(RESULTS, SCRATCH)
        raise
    files.remove(LOGS, SCRATCH)
    return tuple(files.trace(rank) for rank in range(workload.world))


def _prepare(out: Path, *, force: bool) -> RunFiles:
    """Return an empty folder; with `force`, one that an earlier run was cleared out of."""
    files = RunFiles(folder=out.resolve())
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", hint="give the name of a folder")
    if not force and out.exists() and any(out.iterdir()):
        raise UsageError(
            f"{out} is not empty", hint="give another folder, or --force to replace an earlier run"
        )
    out.mkdir(parents=True, exist_ok=True)
    files.remove(RESULTS, LOGS, SCRATCH)
    return files


def _start(files: RunFiles, rank: int) -> subprocess.Popen[bytes]:
    """Start one rank in a process group of its own, which can be killed as a whole."""
    # -P: a folder called torch where the user stands must not be taken for torch.
    command = [sys.executable, "-P", "-m", "debubble.demo.rank", str(files.folder), str(rank)]
    settings = {"GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    with files.log(rank).open("wb") as log:
        return subprocess.Popen(  # noqa: S603  (our own module, no shell)
            command,
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _running(processes: list[subprocess.Popen[bytes]], files: RunFiles) -> bool:
    """Say whether any rank still runs; raise for the first that failed."""
    codes = [process.poll() for process in processes]
    failures = [
        Failure(rank=rank, code=code, when_ns=_failed_at(files.failure(rank)))
        for rank, code in enumerate(codes)
        if code
    ]
    if failures:
        # A rank that could not say when was killed from outside: its peers only followed.
        raise _blame(min(failures, key=lambda failure: failure.when_ns), files)
    return None in codes


def _failed_at(note: Path) -> int:
    return int(note.read_text()) if note.exists() else 0


def _blame(failure: Failure, files: RunFiles) -> DemoError:
    how = f"exit code {failure.code}"
    if failure.code < 0:
        how = f"signal {-failure.code}"
    log = files.log(failure.rank)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return DemoError(
        "\n".join([f"the process ended with {how}", *lines[-LOG_TAIL_LINES:]]),
        rank=failure.rank,
        hint=f"its whole output is in {log}",
    )


def _refuse_after(deadline_s: float, timeout_s: float, files: RunFiles) -> None:
    if time.monotonic() > deadline_s:
        raise DemoError(
            f"the pipeline is not through after {timeout_s:g} s; {files.steps_done()} steps ended",
            hint="give it more time, or fewer or shorter layers",
        )


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """End every rank that still runs, with whatever it started, and wait for it."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
