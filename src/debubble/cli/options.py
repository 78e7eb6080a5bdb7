"""Options that verbs share: how they answer, and which traces they read.

Flags that belong together become one argument.
"""

from __future__ import annotations

import inspect
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from debubble.errors import Code, Gap, UsageError
from debubble.trace.source import DEFAULT_LIMITS, Limits, is_url
from debubble.units import parse_bytes, parse_price, parse_watts, write_file

if TYPE_CHECKING:
    from rich.console import Console

    from debubble.analysis import Analysis, Wires
    from debubble.measure.worth import Tariff
    from debubble.report.answers.base import Answer, AnswerWarning
    from debubble.report.html.page import Report
    from debubble.report.text import Page
    from debubble.timeline.fleet.survey import Means, Question
    from debubble.trace.engine import Progress
    from debubble.trace.run import Run, RunFiles


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def gathered(name: str, made_by: Callable[..., object], *options: Decorator) -> Decorator:
    """Add options, in the order of `--help`; the verb is handed them as one argument.

    `made_by`, a dataclass or a function, takes them by their names; an option that it does not
    name goes to the verb as it is. Among the options may be groups of their own.
    """
    taken = inspect.signature(made_by).parameters.keys()

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_group(**flags: object) -> object:
            made = made_by(**{flag: flags.pop(flag) for flag in taken})
            return command(**{name: made}, **flags)

        decorated: Callable[..., Any] = with_group
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


# A progress bar for anything that takes longer than a moment.
_PATIENCE_S = 2.0
EXIT_STRICT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """How to answer."""

    as_json: Literal["full", "brief"] | None
    markdown: bool
    strict: bool
    color: str
    quiet: bool


# `--json` alone is the whole answer; `cli.Verbs` sees that no word after it is taken for more.
json_option = click.option(
    "--json",
    "as_json",
    type=click.Choice(["full", "brief"]),
    is_flag=False,
    flag_value="full",
    metavar="[=brief]",
    help="One JSON object on stdout; =brief, in two kilobytes.",
)
output_options = gathered(
    "manners",
    Manners,
    click.option("-q", "--quiet", is_flag=True, help="No progress, and no hints."),
    click.option(
        "--color",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="Colour; NO_COLOR is honoured.",
    ),
    click.option("--strict", is_flag=True, help="Exit with 2 when there is any warning."),
    click.option("--markdown", is_flag=True, help="The page as Markdown, to paste."),
    json_option,
)


def typed_flags(among: Collection[str]) -> dict[str, Any]:
    """Return which of these flags were typed, with their values, in the order of `--help`."""
    context = click.get_current_context()
    return {
        option.opts[0]: context.params[option.name]
        for option in context.command.params
        if option.opts[0] in among
        and option.name is not None
        and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    }


def refuse_typed(among: Collection[str], why: str, hint: str) -> None:
    """Refuse what was typed of these flags: it says something of what is not asked about."""
    for flag in typed_flags(among):
        raise UsageError(f"{flag} {why}", hint=hint)


def typed(options: Mapping[str, object]) -> str:
    """Write options as they were typed; what was left out stays out."""
    return " ".join(
        f"{flag} {shlex.quote(str(value))}" for flag, value in options.items() if value is not None
    )


def _read_tariff(*, price: str | None, power: str | None) -> Tariff:
    from debubble.measure.worth import Tariff

    amount, currency = (None, "") if price is None else parse_price(price)
    watts = None if power is None else parse_watts(power)
    return Tariff(price=amount, currency=currency, watts=watts)


tariff_options = gathered(
    "tariff",
    _read_tariff,
    click.option("--price", metavar="MONEY", help="Of a GPU for an hour, such as $2.50 or 2EUR."),
    click.option("--power", metavar="WATTS", help="That a GPU draws, such as 700W."),
)


in_flight_option = click.option(
    "--in-flight-measured",
    type=click.IntRange(min=1),
    metavar="K",
    help="Batches that a server keeps in flight, if not told.",
)
html_option = click.option(
    "--html", metavar="OUT", help="Write the answer as one HTML file, with pictures."
)


def place_for(out: str | None, *, force: bool) -> Path | None:
    """Return where to write, before any work is done; a file is replaced only by force."""
    if out is None:
        return None
    refuse_url(out)
    path = Path(out)
    if path.is_dir():
        raise UsageError(f"{out} is a folder", hint="give the name of a file")
    if path.exists() and not force:
        raise UsageError(f"{out} is there already", hint="give another name, or --force")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}", hint="make it first")
    return path


def refuse_same_place(outs: Mapping[str, str | None]) -> None:
    """Refuse two files in one place: the second would be written over the first."""
    seen: dict[Path, str] = {}
    for flag, out in outs.items():
        if out is None:
            continue
        first = seen.setdefault(Path(out).resolve(), flag)
        if first != flag:
            raise UsageError(f"{first} and {flag} both name {out}", hint="give each its own file")


def refuse_url(out: str | None) -> None:
    """Say before any work is done that answers are written to files."""
    if out is not None and is_url(out):
        raise UsageError(
            f"{out} is a URL, and answers are written to files",
            hint="give a path; copy the file with the tool of your store",
        )


def write_html(report: Report, path: Path, *, quiet: bool) -> None:
    """Write a report, and say where it is."""
    from debubble.report.html.page import report_markup

    write_file(path, report_markup(report).encode())
    if not quiet:
        click.echo(f"{path} written; open it in a browser", err=True)


def print_answer(
    page: Page, answer: Answer | dict[str, Any], manners: Manners, *, aside: bool = False
) -> None:
    """Print the answer on stdout, for a person or for a program.

    With `aside` a person finds it on stderr: stdout is for something else.
    """
    from debubble.report.answers.base import Answer, json_text

    if manners.as_json and manners.markdown:
        raise UsageError("--markdown is for people, --json is for programs", hint="leave one")
    if manners.as_json:
        data = answer.to_dict() if isinstance(answer, Answer) else answer
        if manners.as_json == "brief" and isinstance(answer, Answer):
            # It knows the answers of all verbs, and all that they know.
            from debubble.report.answers.brief import brief_of

            data = brief_of(answer, _commands_for_programs(page.next_command))
        click.echo(json_text(data, compact=manners.as_json == "brief"))
        return
    if manners.markdown:
        from debubble.report.text import as_markdown

        click.echo(as_markdown(page), nl=False, err=aside)
        return
    from debubble.report.text import print_page

    print_page(page, console_for(manners.color, aside=aside))


def _commands_for_programs(command: str) -> list[str]:
    """Return a command as whoever asked in brief would type it; text to paste stays text."""
    if not command or command.endswith(" --timeline"):  # a drawing is for people
        return []
    brief = command.startswith("debubble ") and " --emit " not in command
    return [f"{command} --json=brief" if brief else command]


def console_for(color: str, *, aside: bool = False) -> Console:
    """Make a console for stdout, as wide as the terminal or, without one, as a wide page.

    With `aside`, for stderr.
    """
    from rich.console import Console

    plain_width = None if (sys.stderr if aside else sys.stdout).isatty() else 120
    # Without a colour system rich leaves out bold and dim, too; `no_color` alone would keep them.
    plain = color == "never" or (color == "auto" and bool(os.environ.get("NO_COLOR")))
    return Console(
        stderr=aside,
        force_terminal=True if color == "always" else None,
        color_system=None if plain else "auto",
        no_color=plain or None,
        width=plain_width,
        highlight=False,
        emoji=False,
    )


def drawing_width() -> int:
    """Return how wide a drawing may be: as the terminal, or as a page."""
    from debubble.report.lanes import PLAIN_WIDTH

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PLAIN_WIDTH


def exit_strictly(gaps: Sequence[Gap | AnswerWarning], manners: Manners) -> None:
    """Exit with 2 where there are warnings and the user asked for that."""
    if manners.strict and gaps:
        raise click.exceptions.Exit(EXIT_STRICT)


@contextmanager
def progress(title: str, *, quiet: bool) -> Iterator[Progress]:
    """Lend a function that shows how far the work is, on a terminal, after a moment's patience."""
    if quiet or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    began = time.monotonic()
    with Bar(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(title, total=None, visible=False)

        def show(done: int, total: int) -> None:
            late = time.monotonic() - began > _PATIENCE_S
            bar.update(task, completed=done, total=total, visible=late, refresh=late)

        yield show


# What to do next where traces hold no pipeline: this records all that verbs need.
RECORD = "debubble capture -- COMMAND"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Which of the traces that lie at a place are meant, and how they are read."""

    capture: str | None = None
    rank: int | None = None
    limits: Limits = DEFAULT_LIMITS
    engine: str = "local"
    digest: str | None = None

    def read(self, places: Sequence[str], *, quiet: bool) -> Run:
        """Read one capture for what it holds, with progress."""
        from debubble.timeline.fleet.survey import inspect_run

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
        from debubble.analysis import analyse_found

        found = self._find(places)
        if not quiet:
            _say_which(found, self.capture)
        with ending_cleanly(), progress("reading", quiet=quiet) as show:
            return analyse_found(found, question, self._means(places, found, show), wires)

    def _find(self, places: Sequence[str]) -> RunFiles:
        from debubble.trace.run import find_run, warn_of_unread

        found = find_run(places, capture=self.capture, limits=self.limits)
        files = len(found.capture.files)
        if self.rank is not None and files > 1:
            raise UsageError(
                f"--rank is for a single file, and there are {files}",
                hint="leave it out: names and contents tell the ranks of several",
            )
        return found if self.capture else warn_of_unread(places, found)

    def _means(self, places: Sequence[str], found: RunFiles, show: Progress) -> Means:
        from debubble.annexes.cluster import engine_at
        from debubble.timeline.fleet.survey import Means
        from debubble.trace.digest.content import place_digests

        digests = None
        if self.digest is not None:
            files = [file.file for capture in found.captures for file in capture.files]
            digests = place_digests(self.digest, places, files)
        return Means(
            engine=engine_at(self.engine),
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
    return Reader(capture=capture, rank=rank, limits=limits, engine=engine, digest=digest)


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
