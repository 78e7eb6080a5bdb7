"""`debubble watch`: a service that captures, analyses and tells when something changed."""

from __future__ import annotations

from pathlib import Path

import click

from debubble.annexes.watch.run import FILES, check, read_file, retry, serve
from debubble.cli.options import json_option
from debubble.errors import UsageError, mask_secrets
from debubble.report.answers.base import json_text
from debubble.units import printable

config_option = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="What to watch: watch.toml.",
)
store_option = click.option(
    "--store", metavar="URL", help="sqlite:///… or postgresql://…; before the file's."
)


@click.group(
    "watch",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@config_option
@store_option
@click.option(
    "--print",
    "printed",
    type=click.Choice(FILES),
    help="Print alert rules for Prometheus or a dashboard for Grafana, and end.",
)
@click.option(
    "--check", "checked", is_flag=True, help="Read the configuration, say what it means, and end."
)
@click.option("--markdown", is_flag=True, help="With --check: to paste.")
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
@click.option("--source", metavar="NAME", help="Captures of one source alone.")
@click.option("--capture", type=int, metavar="N", help="One capture, by its number.")
@click.option("--list", "listed", is_flag=True, help="List what was given up, and end.")
@json_option
def try_again(  # noqa: PLR0913 (one argument a flag)
    *,
    path: Path | None,
    store: str | None,
    source: str | None,
    capture: int | None,
    listed: bool,
    as_json: str | None,
) -> None:
    """Have captures that were given up analysed once more, by the service that runs or the next."""
    if path is None:
        raise UsageError("which service?", hint="debubble watch retry --config watch.toml")
    data = retry(path, store, source=source, capture=capture, listed=listed)
    if as_json:
        click.echo(json_text(data))
        return
    for row in data["given_up"]:
        line = f"{row['capture']} {row['source']} {row['key']}: {row['problem']}"
        click.echo(printable(line))
    count = len(data["given_up"])
    click.echo(f"{count} given up." if listed else f"{data['retried']} taken up again.")
