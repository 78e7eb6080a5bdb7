"""The files of a demo run: what it leaves, and what it needs while it runs."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
