"""Options that verbs share, and how every verb reads traces and answers.

Options stand under one of four headings in a verb's help; those that belong together reach the
verb as one argument.
"""

from __future__ import annotations

import importlib
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
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from debubble.cli import EXIT_NO_ANSWER, own_words
from debubble.errors import Code, Gap, UsageError
from debubble.trace.source import is_url
from debubble.units import parse_memory, parse_price, write_file

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

HEADINGS = ("Input", "Question", "Output", "Limits")
STEPS, SERVERS, BY_HAND = "runs with steps", "servers", "simulating without traces"
"""What an option can be about."""
RUNS = (STEPS, SERVERS)
_TYPED = "debubble.typed"


class VerbOption(click.Option):
    """An option under one of the headings; it keeps the words that were typed.

    `of` says what it is about, where that is not all that its verb is about.
    """

    def __init__(self, *words: Any, heading: str, of: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*words, **settings)
        self.heading = heading
        self.of = of

    def consume_value(
        self, ctx: click.Context, opts: Mapping[str, Any]
    ) -> tuple[Any, ParameterSource]:
        """Note what was typed, before it is read."""
        value, source = super().consume_value(ctx, opts)
        if source is ParameterSource.COMMANDLINE:
            ctx.meta.setdefault(_TYPED, {})[self] = value
        return value, source


class Verb(click.Command):
    """A verb whose help lists its options by heading, and ends with examples."""

    def __init__(self, *words: Any, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*words, **settings)
        self.examples = tuple(examples)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words; an error names this verb, whose help is the hint."""
        own = own_words(args)
        # Alone it is the whole answer, whatever follows it.
        args[: len(own)] = ["--json=full" if word == "--json" else word for word in own]
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the examples, each on a line to copy."""
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {example}\n" for example in self.examples))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options under their headings, `--help` with those about the output."""
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in HEADINGS}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None and isinstance(option, click.Option):
                rows[getattr(option, "heading", "Output")].append(record)
        for heading in filter(rows.get, HEADINGS):
            with formatter.section(heading):
                formatter.write_dl(rows[heading])


class VerbGroup(Verb, click.Group):
    """A verb with commands of its own."""

    command_class = Verb

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options, then the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


input_option, question_option, output_option, limit_option = (
    partial(click.option, cls=VerbOption, heading=heading) for heading in HEADINGS
)


def gathered(name: str, made_by: Callable[..., object], *options: Decorator) -> Decorator:
    """Add options, in the order of `--help`; the verb is handed what is made of them."""

    def bare() -> None: ...

    for option in options:
        option(bare)
    taken = [option.name for option in bare.__click_params__]  # type: ignore[attr-defined]

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


def imported(path: str) -> Callable[..., Any]:
    """Return a function by its `module:name`; the module is imported when it is called."""
    module, _, name = path.partition(":")

    def call(*words: object, **settings: object) -> Any:
        return getattr(importlib.import_module(module), name)(*words, **settings)

    return call


def typed_options() -> dict[VerbOption, Any]:
    """Return the options that were typed, with their words."""
    options: dict[VerbOption, Any] = click.get_current_context().meta.get(_TYPED, {})
    return options


def refuse_typed(among: Collection[str], why: str, hint: str) -> None:
    """Refuse what was typed of these flags: it says something of what is not asked about."""
    for option in typed_options():
        if option.opts[0] in among:
            raise UsageError(f"{option.opts[0]} {why}", hint=hint)


def refuse_others(subject: str) -> None:
    """Refuse what was typed that is not about this subject."""
    for option in typed_options():
        if option.of and subject not in option.of:
            known = " and ".join(option.of)
            raise UsageError(f"{option.opts[0]} is only for {known}", hint="leave it out")


def typed_questions() -> str:
    """Write what was asked as it was typed, without what says how to answer."""
    return " ".join(
        f"{option.opts[0]} {shlex.quote(str(value))}"
        for option, value in typed_options().items()
        if option.heading != "Output" and not option.is_flag
    )


# A progress bar for anything that takes longer than a moment.
_PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """How to answer."""

    as_json: Literal["full", "brief"] | None
    quiet: bool
    markdown: bool = False
    strict: bool = False
    details: bool = False

    def hint(self, command: str) -> str:
        """Return what to type next; nothing where no hints are wanted."""
        return "" if self.quiet else command

    def say(self, line: str) -> None:
        """Tell a person, beside the answer."""
        if not self.quiet:
            click.echo(line, err=True)

    def refuse_drawing(self) -> None:
        """Refuse a drawing of letters inside JSON."""
        if self.as_json:
            raise UsageError("--timeline and --json exclude each other", hint="leave one out")


quiet_option = output_option("-q", "--quiet", is_flag=True, help="No progress and no hints.")
json_option = output_option(
    "--json",
    "as_json",
    type=click.Choice(["full", "brief"]),
    metavar="[=brief]",
    help="JSON on stdout; =brief: two kilobytes.",
)
markdown_option = output_option("--markdown", is_flag=True, help="Markdown on stdout.")
plain_output_options = gathered("manners", Manners, quiet_option, json_option)
# Of verbs that answer about recorded runs.
_HOW_TO_ANSWER = (
    limit_option("--strict", is_flag=True, help="Exit code 2 if there are warnings."),
    quiet_option,
    markdown_option,
    json_option,
)
output_options = gathered("manners", Manners, *_HOW_TO_ANSWER)
# Of those whose answer has more than fits a screen.
detailed_output_options = gathered(
    "manners",
    Manners,
    output_option("--details", is_flag=True, help="All tables and notes, not the first screen."),
    *_HOW_TO_ANSWER,
)


def _read_tariff(text: str) -> Tariff:
    from debubble.measure.worth import Tariff

    amount, currency = parse_price(text)
    return Tariff(price=amount, currency=currency)


price_option = question_option(
    "--price",
    "tariff",
    metavar="MONEY",
    type=_read_tariff,
    help="Price of one GPU hour, such as $2.50 or 2EUR.",
)
pipeline_option = input_option(
    "--pipeline", of=RUNS, type=int, metavar="N", help="Pipeline to analyse, counted from 0."
)
memory_limit_option = limit_option(
    "--memory-limit",
    "limit_bytes",
    of=(STEPS,),
    type=parse_memory,
    metavar="SIZE",
    help="Memory of each rank, such as 80GiB.",
)
store_option = input_option(
    "--store", metavar="URL", help="History database: sqlite:///… or postgresql://…"
)
html_option = output_option("--html", metavar="OUT", help="HTML file with the answer and pictures.")
force_option = output_option("--force", is_flag=True, help="Overwrite existing files.")


def place_for(out: str | None, *, force: bool) -> Path | None:
    """Return where to write, before any work is done; a file is replaced only by force."""
    if out is None:
        return None
    if is_url(out):
        raise UsageError(
            f"{out} is a URL, and answers are written to files",
            hint="give a path; copy the file with the tool of your store",
        )
    path = Path(out)
    if path.is_dir():
        raise UsageError(f"{out} is a folder", hint="give the name of a file")
    if path.exists() and not force:
        raise UsageError(f"{out} is there already", hint="give another name, or --force")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}", hint="make it first")
    return path


def places_for(outs: Mapping[str, str | None], *, force: bool) -> tuple[Path | None, ...]:
    """Return where to write several files; no two of them into one."""
    seen: dict[Path, str] = {}
    for flag, out in outs.items():
        if out is None:
            continue
        first = seen.setdefault(Path(out).resolve(), flag)
        if first != flag:
            raise UsageError(f"{first} and {flag} both name {out}", hint="give each its own file")
    return tuple(place_for(out, force=force) for out in outs.values())


# Where the answer goes as HTML, placed; None where nobody asked for that.
report_options = gathered(
    "report_path", lambda *, html, force: place_for(html, force=force), html_option, force_option
)


def write_html(report: Report, path: Path, manners: Manners) -> None:
    """Write a report, and say where it is."""
    from debubble.report.html.page import report_markup

    write_file(path, report_markup(report).encode())
    manners.say(f"{path} written; open it in a browser")


def print_answer(
    page: Page, answer: Answer | dict[str, Any], manners: Manners, *, aside: bool = False
) -> None:
    """Print the answer on stdout, for a person or for a program.

    With `aside` a person finds it on stderr: stdout is for something else.
    """
    from debubble.report.answers.base import Answer, json_text

    if manners.as_json and manners.markdown:
        raise UsageError("--markdown and --json exclude each other", hint="leave one out")
    if manners.as_json:
        data = answer.to_dict() if isinstance(answer, Answer) else answer
        if manners.as_json == "brief" and isinstance(answer, Answer):
            # It knows the answers of all verbs, and all that they know.
            from debubble.report.answers.brief import brief_of

            data = brief_of(answer, _commands_for_programs(page.next_command))
        click.echo(json_text(data, compact=manners.as_json == "brief"))
        return
    from debubble.report.text import as_markdown, print_page

    if manners.markdown:
        click.echo(as_markdown(page), nl=False, err=aside)
    else:
        print_page(page, console_for(aside=aside))


def _commands_for_programs(command: str) -> list[str]:
    """Return a command as whoever asked in brief would type it; text to paste stays text."""
    if not command or command.endswith(" --timeline"):  # a drawing is for people
        return []
    brief = command.startswith("debubble ") and " --emit " not in command
    return [f"{command} --json=brief" if brief else command]


def console_for(*, aside: bool = False) -> Console:
    """Make a console for stdout, as wide as the terminal or, without one, as a wide page.

    With `aside`, for stderr.
    """
    from rich.console import Console

    plain_width = None if (sys.stderr if aside else sys.stdout).isatty() else 120
    # Without a colour system rich leaves out bold and dim, too; `no_color` alone would keep them.
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(
        stderr=aside,
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
        raise click.exceptions.Exit(EXIT_NO_ANSWER)


def finish(page: Page, answer: Answer | dict[str, Any], manners: Manners) -> None:
    """Print the answer; exit with 2 where it has warnings and the user asked for that."""
    print_answer(page, answer, manners)
    exit_strictly(page.gaps, manners)


@contextmanager
def progress(title: str, manners: Manners) -> Iterator[Progress]:
    """Lend a function that shows how far the work is, on a terminal, after a moment's patience."""
    if manners.quiet or not sys.stderr.isatty():
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
    engine: str = "local"
    digest: str | None = None

    def read(self, places: Sequence[str], manners: Manners) -> Run:
        """Read one capture for what it holds, with progress."""
        from debubble.timeline.fleet.survey import inspect_run

        files = self._find(places)
        with ending_cleanly(), progress("reading", manners) as show:
            return inspect_run(files, self._means(places, files, show))

    def analyse(
        self,
        places: Sequence[str],
        question: Question | None,
        manners: Manners,
        wires: Wires | None = None,
    ) -> Analysis:
        """Read one capture and measure what is asked about, with progress."""
        from debubble.analysis import analyse_found

        files = self._find(places)
        _say_which(files, self.capture, manners)
        with ending_cleanly(), progress("reading", manners) as show:
            return analyse_found(files, question, self._means(places, files, show), wires)

    def _find(self, places: Sequence[str]) -> RunFiles:
        from debubble.trace.run import find_run, warn_of_unread

        files = find_run(places, capture=self.capture)
        return files if self.capture else warn_of_unread(places, files)

    def _means(self, places: Sequence[str], files: RunFiles, show: Progress) -> Means:
        from debubble.timeline.fleet.survey import Means
        from debubble.trace.digest import place_digests
        from debubble.trace.engine import LOCAL, Engine

        engine: Engine = LOCAL
        if self.engine != "local":
            from debubble.annexes.cluster import engine_at

            engine = engine_at(self.engine)
        digests = None
        if self.digest is not None:
            names = [file.file for capture in files.captures for file in capture.files]
            digests = place_digests(self.digest, places, names)
        return Means(engine=engine, digests=digests, on_progress=show)


def _say_which(files: RunFiles, wanted: str | None, manners: Manners) -> None:
    """Say which of several captures is read, unless the user or a warning said it."""
    warned = any(gap.code in {Code.NEWER_INCOMPLETE, Code.SEVERAL_RUNS} for gap in files.gaps)
    count = len(files.captures)
    if wanted is None and count > 1 and not warned:
        manners.say(
            f"read: {files.capture.name}, of {count} captures here; --capture NAME reads another"
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


def _make_reader(
    *, capture: str | None, engine: str = "local", digest: str | None = None
) -> Reader:
    if digest is not None and not digest.strip():
        raise UsageError("--digest needs a place", hint="beside, a folder, or a URL")
    return Reader(capture=capture, engine=engine, digest=digest)


_capture_option = input_option(
    "--capture", of=RUNS, metavar="NAME", help="Capture to read, where there are several."
)
# What every verb that reads traces takes.
trace_options = gathered("reader", _make_reader, _capture_option)
# What verbs take that read many traces first: all others read the digests that these leave.
reading_options = gathered(
    "reader",
    _make_reader,
    _capture_option,
    input_option(
        "--digest",
        metavar="PLACE",
        help="Place for a digest of each rank: `beside` its trace, a folder or a URL.",
    ),
    input_option(
        "--engine",
        metavar="ENGINE",
        default="local",
        show_default=True,
        help="Where traces are read: local, or a Dask scheduler: tcp://HOST:PORT.",
    ),
)
