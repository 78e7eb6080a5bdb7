"""`debubble watch`: a service that captures, analyses and tells when something changed."""

from __future__ import annotations

from pathlib import Path

import click

from debubble.annexes.watch.run import FILES, check, read_file, retry, serve
from debubble.cli.options import (
    VerbGroup,
    input_option,
    output_option,
    question_option,
    store_option,
)
from debubble.errors import UsageError, mask_secrets
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
    type=click.Choice([*FILES]),
    help="Alert rules for Prometheus, or a dashboard for Grafana.",
)
@question_option(
    "--check", "checked", is_flag=True, help="Meaning of the configuration; nothing is watched."
)
@click.pass_context
def command(
    context: click.Context,
    *,
    path: Path | None,
    store: str | None,
    printed: str | None,
    checked: bool,
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
    words, warnings = check(path, store)
    click.echo(mask_secrets(words))
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


@command.command("retry")
@config_option
@store_option
def try_again(*, path: Path | None, store: str | None) -> None:
    """Have failed captures analysed once more, by the service that runs or the next."""
    if path is None:
        raise UsageError("which service?", hint="debubble watch retry --config watch.toml")
    failed = retry(path, store)
    for words in failed:
        click.echo(printable(words))
    click.echo(f"{len(failed)} taken up again.")
