"""`debubble inspect`: what was found, and what is missing or broken."""

from __future__ import annotations

import shlex

import click

from debubble.cli.options import (
    RECORD,
    Manners,
    Reader,
    Verb,
    finish,
    output_options,
    reading_options,
)


@click.command("inspect", cls=Verb, examples=("debubble inspect traces/",))
@click.argument("traces", nargs=-1, required=True)
@reading_options
@output_options
def command(*, traces: tuple[str, ...], reader: Reader, manners: Manners) -> None:
    """Say what TRACES hold: ranks, steps, events, kernels; what is missing or broken.

    TRACES are files, folders, globs or URLs: torch.profiler traces, Nsight Systems SQLite exports,
    op tables, or digests of any of them.
    """
    from debubble.report.answers.inspect import answer_inspect
    from debubble.report.inspect import inspect_page

    answer = answer_inspect(reader.read(traces, manners))
    following = f"debubble find {shlex.join(traces)}" if answer.holds_pipeline else RECORD
    finish(inspect_page(answer, manners.hint(following)), answer, manners)
