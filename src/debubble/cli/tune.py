"""`debubble tune`: run, plan, try the best options for real, keep the winner."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from debubble.annexes.tune.answers import answer_dry_run, answer_tune
from debubble.annexes.tune.journal import begin_anew
from debubble.annexes.tune.loop import look_ahead, tune
from debubble.annexes.tune.report import dry_page, say_end, say_start, tune_page
from debubble.annexes.tune.setting import (
    SERVING_KNOBS,
    TRAINING_KNOBS,
    read_setting,
    read_template,
)
from debubble.annexes.tune.task import Budget, Scope, Server, Task
from debubble.capture.server import KINDS
from debubble.capture.settings import PROFILED_STEPS, WAIT_STEPS, Settings
from debubble.cli.options import (
    Manners,
    Verb,
    force_option,
    gathered,
    input_option,
    limit_option,
    memory_limit_option,
    output_option,
    plain_output_options,
    print_answer,
    question_option,
    refuse_typed,
)
from debubble.cli.planning import hold_option, max_microbatches_option
from debubble.errors import UsageError

_A_LOAD = "vllm bench serve --base-url {url} … --save-result --save-detailed --result-dir {out}"
# The setting as it is, three or four tries, and two runs more of the best and of the first.
_RUNS = 10


def _make_budget(*, runs: int, minutes: float | None) -> Budget:
    return Budget(runs=runs, seconds=None if minutes is None else 60 * minutes)


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
@gathered(
    "budget",
    _make_budget,
    limit_option(
        "--runs", type=int, default=_RUNS, show_default=True, help="Largest number of runs."
    ),
    limit_option("--minutes", type=float, help="Minutes for all runs together."),
)
@gathered(
    "scope",
    Scope,
    max_microbatches_option,
    hold_option("batch, in training"),
    memory_limit_option,
)
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
    default=Path("debubble-tune"),
    show_default=True,
    help="Folder for the runs; an interrupted tuning resumes from it.",
)
@force_option
@question_option("--dry-run", is_flag=True, help="List of what would be tried; nothing is run.")
@plain_output_options
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
    dry_run: bool,
    manners: Manners,
) -> None:
    """Try the most promising settings of COMMAND, measure each, and keep the best.

    {microbatches}, {split}, {schedule} and {overlap} in COMMAND stand for what is tried. To resume,
    type the same again.

    Of a server, {layers}, {in_flight}, {chunk}, {tokens_a_batch} and {requests_a_batch} do, and
    {traces} is a folder for its traces.
    """
    words, served = _read_server(command_words, server, url, load, kind)
    knobs = TRAINING_KNOBS if served is None else SERVING_KNOBS
    task = Task(
        template=read_template(words, read_setting(now), knobs),
        server=served,
        steps=steps,
        wait=wait,
        folder=out,
        budget=budget,
        scope=scope,
    )
    Settings(steps=steps, wait=wait)  # refuses what no capture can do
    if dry_run:
        candidates = look_ahead(task)
        tries = None if candidates is None else candidates.tries
        print_answer(dry_page(task, tries), answer_dry_run(task, tries or ()), manners)
        return
    if force:
        begin_anew(out)
    tuned = tune(
        task,
        on_start=lambda chosen, number: manners.say(say_start(chosen, number)),
        on_end=lambda run: manners.say(say_end(run)),
    )
    following = "" if tuned.winner is None else manners.hint(shlex.join(tuned.command))
    print_answer(tune_page(tuned, following), answer_tune(tuned), manners)
