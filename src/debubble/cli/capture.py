"""`debubble capture`: traces of a job or of a serving engine, with the settings that count."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from debubble.capture.around import capture_command
from debubble.capture.server import KINDS, ServerOrder, capture_server
from debubble.capture.settings import DEFAULT_OUT, PROFILED_STEPS, WAIT_STEPS, Settings
from debubble.cli.history import parse_tags
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
# As long again on each side: what the server does without the profiler.
_AROUND_SECONDS = 2.0


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
@output_option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Note in the sidecars.")
@input_option(
    "--server", metavar="URL", help="Address of a serving engine, to capture instead of COMMAND."
)
@input_option("--kind", type=click.Choice(KINDS), help="Engine of the server.")
@question_option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help=f"Seconds to profile a server.  [default: {_SERVER_SECONDS:g}]",
)
@question_option(
    "--around",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Time to note a server's own metrics before and after; "
    f"{_AROUND_SECONDS:g} unless you say so, 0 for not at all.",
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
    tags: tuple[str, ...],
    server: str | None,
    kind: str | None,
    seconds: float | None,
    around: float | None,
    manners: Manners,
) -> None:
    """Profile a few steps of COMMAND on all its ranks, or of a server; COMMAND is unchanged."""
    next_command = manners.hint(f"debubble find {shlex.quote(str(out))}")
    if server is not None:
        if command_words:
            raise UsageError("both a server and a command", hint="give one of them")
        if kind is None:
            raise UsageError("--server needs --kind", hint=f"one of {', '.join(KINDS)}")
        order = ServerOrder(
            url=server,
            kind=kind,
            steps=steps,
            seconds=seconds or _SERVER_SECONDS,
            out=out,
            around_s=_AROUND_SECONDS if around is None else around,
        )
        answer = capture_server(order)
        page = server_page(answer, next_command)
        print_answer(page, server_json(answer), manners)
        return
    if not command_words:
        raise UsageError(
            "nothing to capture", hint="debubble capture -- torchrun …, or --server URL --kind vllm"
        )
    if not (kind is None and seconds is None and around is None):
        raise UsageError(
            "--kind, --seconds and --around are for a server", hint="give --server URL too"
        )
    settings = Settings(
        steps=PROFILED_STEPS if steps is None else steps,
        every=every,
        wait=wait,
        out=out,
        keep=keep,
        tags=parse_tags(tags, "--tag branch=main"),
    )
    captures = capture_command(command_words, settings, output_to_stderr=bool(manners.as_json))
    page = folders_page("capture", captures, next_command)
    print_answer(page, folders_json("capture", captures), manners)
