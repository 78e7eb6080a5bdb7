"""`debubble tune`: run, plan, try the best options for real, keep the winner."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from debubble.annexes.tune.run import Budget, Scope, Server, begin_anew, read_request
from debubble.capture.server import KINDS
from debubble.capture.settings import PROFILED_STEPS, WAIT_STEPS
from debubble.cli.history import check_name
from debubble.cli.options import Manners, gathered, output_options, print_answer, refuse_typed
from debubble.errors import MissingExtra, UsageError
from debubble.measure.compare import DEFAULT_THRESHOLD
from debubble.measure.store import Store, store_url
from debubble.plan.change import Hold
from debubble.report.answers.tune import answer_dry_run, answer_tune
from debubble.report.tune import (
    dry_page,
    say_end,
    say_start,
    tune_page,
)
from debubble.timeline.schedules import SCHEDULES
from debubble.units import parse_duration, parse_memory, parse_share

_A_LOAD = "vllm bench serve --base-url {url} … --save-result --save-detailed --result-dir {out}"
# The setting as it is, three or four tries, and two runs more of the best and of the first.
_RUNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOptions:
    """What may be spent, as it was typed."""

    runs: int
    minutes: float | None
    timeout: str | None

    def read(self) -> Budget:
        """Return it in seconds."""
        return Budget(
            runs=self.runs,
            seconds=None if self.minutes is None else 60 * self.minutes,
            timeout_s=None if self.timeout is None else parse_duration(self.timeout) / 1e9,
        )


budget_options = gathered(
    "budget_said",
    BudgetOptions,
    click.option("--runs", type=int, default=_RUNS, show_default=True, help="Runs at most."),
    click.option("--minutes", type=float, help="Time that runs may take in all."),
    click.option("--timeout", metavar="TIME", help="When a run hangs; by the first run without."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeOptions:
    """What may be tried, as it was typed."""

    schedules: str | None
    max_microbatches: int | None
    hold: Hold | None
    memory_limit: str | None
    threshold: str
    search_rounds: int | None

    def read(self, folder: Path) -> Scope:
        """Return it in names, bytes and fractions."""
        return Scope(
            schedules=read_schedules(self.schedules),
            most_microbatches=self.max_microbatches,
            hold=self.hold,
            limit_bytes=None if self.memory_limit is None else parse_memory(self.memory_limit),
            threshold=parse_share(self.threshold),
            search_rounds=self.search_rounds,
            orders=folder / "orders",
        )


scope_options = gathered(
    "scope_said",
    ScopeOptions,
    click.option("--schedules", metavar="NAME,...", help="Those that COMMAND knows; all without."),
    click.option(
        "--max-microbatches",
        type=click.IntRange(min=1),
        metavar="N",
        help="Try no more than these.",
    ),
    click.option(
        "--hold",
        type=click.Choice(["microbatch", "batch"]),
        help="What is kept when microbatches change.  [default: the batch, in training]",
    ),
    click.option("--memory-limit", metavar="SIZE", help="Of each rank, such as 80GiB."),
    click.option(
        "--threshold",
        metavar="SHARE",
        default=f"{DEFAULT_THRESHOLD:.0%}",
        show_default=True,
        help="The smallest gain that is worth a run.",
    ),
    click.option(
        "--search-rounds",
        type=click.IntRange(min=1),
        metavar="N",
        help="Look for an order of passes too: {schedule} is then the path of a CSV file.",
    ),
)


def read_schedules(text: str | None) -> frozenset[str]:
    """Read `1f1b,gpipe`."""
    names = frozenset(SCHEDULES) if text is None else frozenset(text.split(","))
    wrong = sorted(names - set(SCHEDULES))
    if wrong:
        raise UsageError(
            f"no schedule is called {wrong[0]!r}", hint=f"some of {', '.join(SCHEDULES)}"
        )
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """A server in place of a command, as it was typed."""

    server: str | None
    url: str | None
    load: str | None
    kind: str | None

    def read(self, command_words: Sequence[str]) -> tuple[tuple[str, ...], Server | None]:
        """Return the words of the command, and where it serves; None where it is no server."""
        if self.server is None:
            refuse_typed(
                ("--url", "--load", "--kind"), "is for a server", "give --server COMMAND too"
            )
            return tuple(command_words), None
        if command_words:
            raise UsageError("both a server and a command", hint="give one of them")
        if self.url is None or self.load is None:
            raise UsageError(
                "--server needs --url and --load",
                hint=f"such as --url http://127.0.0.1:8000 --load '{_A_LOAD}'",
            )
        load = tuple(shlex.split(self.load))
        if not any("{url}" in word for word in load):
            raise UsageError(
                "--load is a command that is told {url}, and this one is not",
                hint=f"such as --load '{_A_LOAD}'",
            )
        return tuple(shlex.split(self.server)), Server(url=self.url, load=load, kind=self.kind)


server_options = gathered(
    "server_said",
    ServerOptions,
    click.option("--server", metavar="COMMAND", help="What starts a server: tune that instead."),
    click.option("--url", metavar="URL", help="Where the server answers."),
    click.option(
        "--load",
        metavar="COMMAND",
        help="What loads it: vllm bench serve, guidellm or aiperf, with {url} and {out}.",
    ),
    click.option("--kind", type=click.Choice(KINDS), help="Which engine it is: it is captured."),
)


DEFAULT_OUT = Path("debubble-tune")


@click.command("tune")
@click.argument("command_words", metavar="-- COMMAND", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--now", multiple=True, metavar="KNOB=VALUE", help="What COMMAND is told as things are."
)
@server_options
@budget_options
@scope_options
@click.option("--steps", type=int, default=PROFILED_STEPS, show_default=True, help="To profile.")
@click.option(
    "--wait", type=int, default=WAIT_STEPS, show_default=True, help="Steps before the first."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_OUT,
    show_default=True,
    help="Folder for the record; an interrupted tuning goes on from it.",
)
@click.option("--force", is_flag=True, help="Begin anew in that folder.")
@click.option("--name", default="tune", show_default=True, help="Of its records in the history.")
@click.option("--store", metavar="URL", help="The history: sqlite:///… or postgresql://…")
@click.option("--dry-run", is_flag=True, help="Show what would be tried; run nothing.")
@output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    command_words: tuple[str, ...],
    now: tuple[str, ...],
    server_said: ServerOptions,
    budget_said: BudgetOptions,
    scope_said: ScopeOptions,
    steps: int,
    wait: int,
    out: Path,
    force: bool,
    name: str,
    store: str | None,
    dry_run: bool,
    manners: Manners,
) -> None:
    """Run COMMAND with what promises most, measure it, and keep the winner.

    {microbatches}, {split}, {schedule} and {overlap} in COMMAND stand for what is tried; so do
    DEBUBBLE_MICROBATCHES and so on in its environment. Interrupted, type the same again.

    Of a server, {layers}, {in_flight}, {chunk}, {tokens_a_batch} and {requests_a_batch} do, and
    {traces} is a folder for its traces.
    """
    command_words, server = server_said.read(command_words)
    request = read_request(
        command_words,
        now,
        server=server,
        budget=budget_said.read(),
        scope=scope_said.read(out),
        steps=steps,
        wait=wait,
        folder=out,
    )
    template = request.bench.template
    for flag, typed in (
        ("--schedules", scope_said.schedules),
        ("--search-rounds", scope_said.search_rounds),
    ):
        if typed is not None and template.now.schedule is None:
            raise UsageError(
                f"{flag} needs {{schedule}} in COMMAND, which has none",
                hint="write {schedule} where its name or file stands, and add --now schedule=1f1b",
            )
    if dry_run:
        prospects = request.look_ahead()
        tries = [
            prospect.setting
            for prospect in (prospects.tries if prospects else ())
            if prospect.worth
        ]
        commands = [(setting, template.fill(setting)) for setting in (template.now, *tries)]
        print_answer(dry_page(commands, prospects), answer_dry_run(commands, prospects), manners)
        return
    check_name(name)
    if force:
        begin_anew(out)

    def say(line: str) -> None:
        if not manners.quiet:
            click.echo(line, err=True)

    with _history(store) as history:
        tuned = request.tune(
            history,
            name,
            on_start=lambda chosen, done: say(
                say_start(chosen.setting, chosen.why, chosen.expected, done)
            ),
            on_end=lambda run: say(say_end(run)),
        )
        records = f", and {name}/… in the history" if history is not None else NO_HISTORY
    following = "" if manners.quiet or tuned.winner is None else shlex.join(tuned.command)
    print_answer(tune_page(tuned, records, following), answer_tune(tuned), manners)


NO_HISTORY = "; not in the history, which needs: pip install 'debubble[store]'"


@contextmanager
def _history(url: str | None) -> Iterator[Store | None]:
    """Lend the history; none where its extra is not installed and nobody named one."""
    try:
        store = Store(store_url(url))
    except MissingExtra:
        if url is not None:
            raise
        yield None
        return
    try:
        yield store
    finally:
        store.close()
