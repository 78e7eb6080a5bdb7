"""`debubble meter`: the bubble of a running job, all the time, without the profiler."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from debubble.annexes.meter.settings import USUAL, Settings, list_segments
from debubble.capture.around import run_command, say_end
from debubble.capture.files import prepare_out
from debubble.capture.settings import environment_for
from debubble.cli.options import (
    Manners,
    Verb,
    limit_option,
    output_option,
    plain_output_options,
    print_answer,
    question_option,
)
from debubble.errors import CaptureError, UsageError
from debubble.report.inspect import folders_json, folders_page
from debubble.units import parse_period


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
@limit_option(
    "--captures", type=int, default=USUAL.captures, show_default=True, help="Captures to keep."
)
@limit_option(
    "--every",
    "every_s",
    type=parse_period,
    default=f"{USUAL.every_s:g}s",
    show_default=True,
    metavar="PERIOD",
    help="Shortest time between two captures.",
)
@plain_output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    command_words: tuple[str, ...],
    out: Path,
    segment: int,
    keep: int,
    no_on_drift: bool,
    captures: int,
    every_s: float,
    manners: Manners,
) -> None:
    """Run COMMAND with a meter on all its ranks; COMMAND is unchanged."""
    if not command_words:
        raise UsageError("nothing to meter", hint="debubble meter -- torchrun …")
    settings = Settings(
        out=out,
        segment=segment,
        keep=keep,
        on_drift=not no_on_drift,
        captures=captures,
        every_s=every_s,
    )
    environment = environment_for(settings, os.environ)
    prepare_out(out)
    earlier = set(list_segments(out))
    code = run_command(command_words, environment, output_to_stderr=bool(manners.as_json))
    segments = tuple(segment for segment in list_segments(out) if segment not in earlier)
    if code:
        raise CaptureError(
            f"the command ended with {say_end(code)}",
            hint=f"what was metered before is in {out}" if segments else "its own output says why",
        )
    if not segments:
        raise CaptureError(
            "the command ran to its end and nothing was metered",
            hint="it takes a pipeline schedule of torch, Megatron or DeepSpeed; other loops call "
            "debubble.meter() themselves",
        )
    newest = segments[-1]
    next_command = manners.hint(f"debubble find {shlex.quote(str(newest))}")
    print_answer(
        folders_page("meter", segments, next_command), folders_json("meter", segments), manners
    )
