"""`debubble capture`: traces of a job or of a serving engine, with the settings that count."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from debubble.capture.around import run_around
from debubble.capture.server import KINDS, ServerOrder, capture_server
from debubble.capture.settings import DEFAULT_OUT, PROFILED_STEPS, WAIT_STEPS, Settings
from debubble.cli.options import (
    Manners,
    Verb,
    input_option,
    limit_option,
    output_option,
    plain_output_options,
    print_answer,
    question_option,
)
from debubble.errors import UsageError
from debubble.report.inspect import folders_json, folders_page, server_json, server_page

# Long enough for a few hundred decode steps, short enough for the file to be read.
_SERVER_SECONDS = 2.0


@click.command(
    "capture",
    cls=Verb,
    examples=(
        "debubble capture -- torchrun --nproc-per-node 4 train.py",
        "debubble capture --server http://127.0.0.1:8000 --kind vllm",
    ),
)
@click.argument("command_words", metavar="-- COMMAND", nargs=-1, type=click.UNPROCESSED)
@question_option("--steps", type=int, help=f"Steps to profile.  [default: {PROFILED_STEPS}]")
@question_option(
    "--every",
    type=int,
    metavar="N",
    help="Steps from one capture to the next.  [default: one capture]",
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
    help="Folder for the captures.",
)
@limit_option("--keep", type=int, metavar="N", help="Newest captures to keep.  [default: all]")
@input_option(
    "--server", metavar="URL", help="Address of a serving engine, to capture instead of COMMAND."
)
@input_option("--kind", type=click.Choice(KINDS), help="Engine of the server.")
@question_option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help=f"Seconds to profile a server.  [default: {_SERVER_SECONDS:g}]",
)
@plain_output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    command_words: tuple[str, ...],
    steps: int | None,
    every: int | None,
    wait: int,
    out: Path,
    keep: int | None,
    server: str | None,
    kind: str | None,
    seconds: float | None,
    manners: Manners,
) -> None:
    """Profile a few steps of COMMAND on all its ranks, or of a server; COMMAND is unchanged."""
    next_command = manners.hint(f"debubble find {shlex.quote(str(out))}")
    if server is not None:
        if command_words or steps is not None:
            raise UsageError(
                "--server excludes a command and --steps", hint="give --seconds for a server"
            )
        if kind is None:
            raise UsageError("--server needs --kind", hint=f"one of {', '.join(KINDS)}")
        order = ServerOrder(
            url=server,
            kind=kind,
            seconds=seconds or _SERVER_SECONDS,
            out=out,
        )
        answer = capture_server(order)
        page = server_page(answer, next_command)
        print_answer(page, server_json(answer), manners)
        return
    if not command_words:
        raise UsageError(
            "nothing to capture", hint="debubble capture -- torchrun …, or --server URL --kind vllm"
        )
    if not (kind is None and seconds is None):
        raise UsageError("--kind and --seconds are for a server", hint="give --server URL too")
    settings = Settings(
        steps=PROFILED_STEPS if steps is None else steps,
        every=every,
        wait=wait,
        out=out,
        keep=keep,
    )
    captures = run_around(
        command_words,
        settings,
        needs=f"it takes {wait + settings.length + 1} steps of a pipeline schedule or an optimizer:"
        " run longer, or lower --wait and --steps; other loops call debubble.step() themselves",
        output_to_stderr=bool(manners.as_json),
    )
    page = folders_page("capture", captures, next_command)
    print_answer(page, folders_json("capture", captures), manners)
