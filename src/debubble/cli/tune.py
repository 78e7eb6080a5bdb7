"""`debubble tune`: run, plan, try the best options for real, keep the winner."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from debubble.annexes.tune.answers import answer_dry_run, answer_tune
from debubble.annexes.tune.report import (
    dry_page,
    say_end,
    say_start,
    tune_page,
)
from debubble.annexes.tune.run import Budget, Scope, Server, begin_anew, read_request
from debubble.capture.server import KINDS
from debubble.capture.settings import PROFILED_STEPS, WAIT_STEPS
from debubble.cli.history import check_name, opened_if_any
from debubble.cli.options import (
    Manners,
    Verb,
    force_option,
    gathered,
    input_option,
    limit_option,
    memory_limit_option,
    output_option,
    output_options,
    print_answer,
    question_option,
    refuse_typed,
    store_option,
    typed_flags,
)
from debubble.cli.planning import hold_option, max_microbatches_option
from debubble.errors import UsageError
from debubble.measure.compare import DEFAULT_THRESHOLD
from debubble.timeline.schedules import SCHEDULES
from debubble.units import NS_PER_S, parse_duration, parse_share

_A_LOAD = "vllm bench serve --base-url {url} … --save-result --save-detailed --result-dir {out}"
# The setting as it is, three or four tries, and two runs more of the best and of the first.
_RUNS = 10


def _make_budget(*, runs: int, minutes: float | None, timeout: float | None) -> Budget:
    return Budget(
        runs=runs,
        seconds=None if minutes is None else 60 * minutes,
        timeout_s=None if timeout is None else timeout / NS_PER_S,
    )


budget_options = gathered(
    "budget",
    _make_budget,
    limit_option(
        "--runs", type=int, default=_RUNS, show_default=True, help="Largest number of runs."
    ),
    limit_option("--minutes", type=float, help="Minutes for all runs together."),
    limit_option(
        "--timeout",
        type=parse_duration,
        metavar="TIME",
        help="Time after which a run counts as hung.  [default: from the first run]",
    ),
)


def _read_schedules(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> frozenset[str]:
    """Read `1f1b,gpipe`."""
    names = frozenset(SCHEDULES) if text is None else frozenset(text.split(","))
    wrong = sorted(names - set(SCHEDULES))
    if wrong:
        raise UsageError(
            f"no schedule is called {wrong[0]!r}", hint=f"some of {', '.join(SCHEDULES)}"
        )
    return names


scope_options = gathered(
    "scope",
    Scope,
    question_option(
        "--schedules",
        metavar="NAME,...",
        callback=_read_schedules,
        help="Schedules that COMMAND knows.  [default: all]",
    ),
    max_microbatches_option,
    hold_option("batch, in training"),
    memory_limit_option,
    limit_option(
        "--threshold",
        type=parse_share,
        metavar="SHARE",
        default=f"{DEFAULT_THRESHOLD:.0%}",
        show_default=True,
        help="Smallest gain that is worth a run.",
    ),
    question_option(
        "--search",
        "search_rounds",
        type=click.IntRange(min=1),
        metavar="ROUNDS",
        help="Search rounds for an order of passes; {schedule} is then the path of a CSV file.",
    ),
)


def _read_server(
    command_words: Sequence[str],
    server: str | None,
    url: str | None,
    load: str | None,
    kind: str | None,
) -> tuple[Sequence[str], Server | None]:
    """Return the words of the command, and where it serves; None where it is no server."""
    if server is None:
        refuse_typed(("--url", "--load", "--kind"), "is for a server", "give --server COMMAND too")
        return command_words, None
    if command_words:
        raise UsageError("both a server and a command", hint="give one of them")
    if url is None or load is None:
        raise UsageError(
            "--server needs --url and --load",
            hint=f"such as --url http://127.0.0.1:8000 --load '{_A_LOAD}'",
        )
    words = tuple(shlex.split(load))
    if not any("{url}" in word for word in words):
        raise UsageError(
            "--load is a command that is told {url}, and this one is not",
            hint=f"such as --load '{_A_LOAD}'",
        )
    return tuple(shlex.split(server)), Server(url=url, load=words, kind=kind)


DEFAULT_OUT = Path("debubble-tune")


@click.command(
    "tune",
    cls=Verb,
    examples=(
        "debubble tune --now microbatches=8 -- torchrun … train.py --microbatches {microbatches}",
        "debubble tune --dry-run --now split=4,4,4,4 -- torchrun … train.py --split {split}",
    ),
)
@click.argument("command_words", metavar="-- COMMAND", nargs=-1, type=click.UNPROCESSED)
@input_option(
    "--now", multiple=True, metavar="KNOB=VALUE", help="Current value of a setting in COMMAND."
)
@input_option(
    "--server", metavar="COMMAND", help="Command that starts a server, to tune instead of COMMAND."
)
@input_option("--url", metavar="URL", help="Address of the server.")
@input_option(
    "--load",
    metavar="COMMAND",
    help="Load of the server: vllm bench serve, guidellm or aiperf, with {url} and {out}.",
)
@input_option("--kind", type=click.Choice(KINDS), help="Engine of the server, to capture it.")
@budget_options
@scope_options
@question_option(
    "--steps", type=int, default=PROFILED_STEPS, show_default=True, help="Steps to profile."
)
@question_option(
    "--wait",
    type=int,
    default=WAIT_STEPS,
    show_default=True,
    help="Steps before the first profiled one.",
)
@output_option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_OUT,
    show_default=True,
    help="Folder for the runs; an interrupted tuning resumes from it.",
)
@force_option
@output_option(
    "--name", default="tune", show_default=True, help="Name of its records in the history."
)
@store_option
@question_option("--dry-run", is_flag=True, help="List of what would be tried; nothing is run.")
@output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    command_words: tuple[str, ...],
    now: tuple[str, ...],
    server: str | None,
    url: str | None,
    load: str | None,
    kind: str | None,
    budget: Budget,
    scope: Scope,
    steps: int,
    wait: int,
    out: Path,
    force: bool,
    name: str,
    store: str | None,
    dry_run: bool,
    manners: Manners,
) -> None:
    """Try the most promising settings of COMMAND, measure each, and keep the best.

    {microbatches}, {split}, {schedule} and {overlap} in COMMAND stand for what is tried; so do
    DEBUBBLE_MICROBATCHES and so on in its environment. To resume, type the same again.

    Of a server, {layers}, {in_flight}, {chunk}, {tokens_a_batch} and {requests_a_batch} do, and
    {traces} is a folder for its traces.
    """
    words, served = _read_server(command_words, server, url, load, kind)
    request = read_request(
        words,
        now,
        server=served,
        budget=budget,
        scope=replace(scope, orders=out / "orders"),
        steps=steps,
        wait=wait,
        folder=out,
    )
    template = request.bench.template
    if template.now.schedule is None:
        for flag in typed_flags(("--schedules", "--search")):
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

    with opened_if_any(store) as history:
        tuned = request.tune(
            history,
            name,
            on_start=lambda chosen, done: manners.say(
                say_start(chosen.setting, chosen.why, chosen.expected, done)
            ),
            on_end=lambda run: manners.say(say_end(run)),
        )
        records = f", and {name}/… in the history" if history is not None else NO_HISTORY
    following = "" if tuned.winner is None else manners.hint(shlex.join(tuned.command))
    print_answer(tune_page(tuned, records, following), answer_tune(tuned), manners)


NO_HISTORY = "; not in the history, which needs: pip install 'debubble[store]'"
