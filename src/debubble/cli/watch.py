"""`debubble watch`: a service that captures, analyses and tells when something changed."""

from __future__ import annotations

from pathlib import Path

import click

from debubble.annexes.watch.run import FILES, check, read_file, retry, serve
from debubble.cli.options import (
    VerbGroup,
    input_option,
    json_option,
    markdown_option,
    output_option,
    question_option,
    store_option,
)
from debubble.errors import UsageError, mask_secrets
from debubble.report.answers.base import json_text
from debubble.units import printable

config_option = input_option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Configuration file: watch.toml.",
)


@click.group(
    "watch",
    cls=VerbGroup,
    examples=(
        "debubble watch --config watch.toml --check",
        "debubble watch --config watch.toml",
    ),
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@config_option
@store_option
@output_option(
    "--print",
    "printed",
    type=click.Choice(FILES),
    help="Alert rules for Prometheus, or a dashboard for Grafana.",
)
@question_option(
    "--check", "checked", is_flag=True, help="Meaning of the configuration; nothing is watched."
)
@markdown_option
@json_option
@click.pass_context
def command(  # noqa: PLR0913 (one argument a flag)
    context: click.Context,
    *,
    path: Path | None,
    store: str | None,
    printed: str | None,
    checked: bool,
    markdown: bool,
    as_json: str | None,
) -> None:
    """Take captures in as they appear, and say when something changed."""
    if context.invoked_subcommand is not None:
        return
    if printed is not None:
        click.echo(read_file(printed), nl=False)
        return
    if path is None:
        raise UsageError("there is nothing to watch", hint="debubble watch --config watch.toml")
    if not checked:
        serve(path, store)
        return
    meaning = check(path, store)
    words = f"```text\n{meaning.words}\n```" if markdown else meaning.words
    click.echo(json_text(meaning.data) if as_json else mask_secrets(words))
    for warning in meaning.warnings:
        click.echo(f"warning: {warning}", err=True)


@command.command("retry")
@config_option
@store_option
@json_option
def try_again(*, path: Path | None, store: str | None, as_json: str | None) -> None:
    """Have captures that were given up analysed once more, by the service that runs or the next."""
    if path is None:
        raise UsageError("which service?", hint="debubble watch retry --config watch.toml")
    data = retry(path, store)
    if as_json:
        click.echo(json_text(data))
        return
    for row in data["given_up"]:
        click.echo(printable(f"{row['capture']} {row['source']} {row['key']}: {row['problem']}"))
    click.echo(f"{data['retried']} taken up again.")
