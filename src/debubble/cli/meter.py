"""`debubble meter`: the bubble of a running job, all the time, without the profiler."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from debubble.annexes.meter.settings import USUAL, Settings
from debubble.capture.around import run_around
from debubble.cli.options import (
    Manners,
    Verb,
    limit_option,
    output_option,
    plain_output_options,
    print_answer,
    question_option,
)
from debubble.errors import UsageError
from debubble.report.inspect import folders_json, folders_page


@click.command(
    "meter", cls=Verb, examples=("debubble meter -- torchrun --nproc-per-node 4 train.py",)
)
@click.argument("command_words", metavar="-- COMMAND", nargs=-1, type=click.UNPROCESSED)
@output_option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=USUAL.out,
    show_default=True,
    help="Folder for the tables, the metrics and the captures.",
)
@limit_option(
    "--keep",
    type=int,
    default=USUAL.keep,
    show_default=True,
    help="Tables to keep per rank.",
)
@question_option(
    "--segment", type=int, default=USUAL.segment, show_default=True, help="Steps per table."
)
@question_option("--no-on-drift", is_flag=True, help="No captures of ranks that get slower.")
@plain_output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    command_words: tuple[str, ...],
    out: Path,
    segment: int,
    keep: int,
    no_on_drift: bool,
    manners: Manners,
) -> None:
    """Run COMMAND with a meter on all its ranks; COMMAND is unchanged."""
    if not command_words:
        raise UsageError("nothing to meter", hint="debubble meter -- torchrun …")
    settings = Settings(out=out, segment=segment, keep=keep, on_drift=not no_on_drift)
    segments = run_around(
        command_words,
        settings,
        needs="it takes a pipeline schedule of torch, Megatron or DeepSpeed; other loops call "
        "debubble.meter() themselves",
        output_to_stderr=bool(manners.as_json),
    )
    next_command = manners.hint(f"debubble find {shlex.quote(str(segments[-1]))}")
    print_answer(
        folders_page("meter", segments, next_command), folders_json("meter", segments), manners
    )
