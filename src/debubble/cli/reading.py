"""The options of every verb that reads traces in → the run that they mean."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import click

from debubble.analysis import Analysis, Wires, analyse_found
from debubble.cli.options import gathered, progress
from debubble.errors import Code, UsageError
from debubble.fleet.survey import Means, Question, inspect_run
from debubble.trace.digest.place import place_digests
from debubble.trace.engine import LOCAL, Engine, Progress, engine_at
from debubble.trace.run import Run, RunFiles, find_run, warn_of_unread
from debubble.trace.source import DEFAULT_LIMITS, Limits
from debubble.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Which of the traces that lie at a place are meant, and how they are read."""

    capture: str | None = None
    rank: int | None = None
    limits: Limits = DEFAULT_LIMITS
    engine: Engine = LOCAL
    digest: str | None = None

    def read(self, places: Sequence[str], *, quiet: bool) -> Run:
        """Read one capture for what it holds, with progress."""
        found = self._find(places)
        with ending_cleanly(), progress("reading", quiet=quiet) as show:
            return inspect_run(found, self._means(places, found, show))

    def analyse(
        self,
        places: Sequence[str],
        question: Question | None = None,
        *,
        quiet: bool,
        wires: Wires | None = None,
    ) -> Analysis:
        """Read one capture and measure what is asked about, with progress."""
        found = self._find(places)
        if not quiet:
            _say_which(found, self.capture)
        with ending_cleanly(), progress("reading", quiet=quiet) as show:
            return analyse_found(found, question, self._means(places, found, show), wires)

    def _find(self, places: Sequence[str]) -> RunFiles:
        found = find_run(places, capture=self.capture, limits=self.limits)
        files = len(found.capture.files)
        if self.rank is not None and files > 1:
            raise UsageError(
                f"--rank is for a single file, and there are {files}",
                hint="leave it out: names and contents tell the ranks of several",
            )
        return found if self.capture else warn_of_unread(places, found)

    def _means(self, places: Sequence[str], found: RunFiles, show: Progress) -> Means:
        digests = None
        if self.digest is not None:
            files = [file.file for capture in found.captures for file in capture.files]
            digests = place_digests(self.digest, places, files)
        return Means(
            engine=self.engine,
            limits=self.limits,
            rank=self.rank,
            digests=digests,
            on_progress=show,
        )


def _say_which(found: RunFiles, wanted: str | None) -> None:
    """Say on stderr which of several captures is read, unless the user or a warning said it."""
    said = any(gap.code in {Code.NEWER_INCOMPLETE, Code.SEVERAL_RUNS} for gap in found.gaps)
    count = len(found.captures)
    if wanted is None and count > 1 and not said:
        click.echo(
            f"read: {found.capture.name}, of {count} captures here; --capture NAME reads another",
            err=True,
        )


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """Take a request to end as Ctrl-C is taken: workers and temporary files go along."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _make_reader(  # noqa: PLR0913 (one argument a flag)
    *,
    capture: str | None,
    rank: int | None,
    max_inflated: str,
    max_ratio: float,
    engine: str,
    digest: str | None,
) -> Reader:
    if math.isnan(max_ratio):
        raise UsageError("nan is no factor", hint="give --max-ratio a number, such as 100")
    limits = Limits(inflated_bytes=parse_bytes(max_inflated), ratio=max_ratio)
    if digest is not None and not digest.strip():
        raise UsageError("--digest needs a place", hint="beside, a folder, or a URL")
    return Reader(
        capture=capture, rank=rank, limits=limits, engine=engine_at(engine), digest=digest
    )


# What every verb that reads traces takes.
trace_options = gathered(
    "reader",
    _make_reader,
    click.option(
        "--digest",
        metavar="PLACE",
        help="Keep a digest of each rank: `beside` its trace, or in a folder or URL.",
    ),
    click.option(
        "--engine",
        metavar="ENGINE",
        default="local",
        show_default=True,
        help="Who reads: this machine's processors, or a Dask scheduler: tcp://HOST:PORT.",
    ),
    click.option(
        "--max-ratio",
        type=click.FloatRange(min=1),
        default=DEFAULT_LIMITS.ratio,
        show_default=True,
        help="Largest factor by which one file may inflate.",
    ),
    click.option(
        "--max-inflated",
        metavar="SIZE",
        default=f"{DEFAULT_LIMITS.inflated_bytes // 1024**3}GiB",
        show_default=True,
        help="Largest size that one file may inflate to.",
    ),
    click.option(
        "--rank",
        type=click.IntRange(min=0),
        metavar="N",
        help="The rank of a single file without one.",
    ),
    click.option("--capture", metavar="NAME", help="Which capture, where there are several."),
)
