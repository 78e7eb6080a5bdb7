"""`debubble watch`: a service that captures, analyses and tells when something changed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from debubble.answers.base import json_text
from debubble.cli.gates import store_url
from debubble.cli.options import json_option
from debubble.errors import MissingExtra, StoreError, UsageError, mask_secrets
from debubble.measure.store import Store, default_url
from debubble.units import printable
from debubble.watch.config import Config, read_config
from debubble.watch.files import FILES, read_file
from debubble.watch.views import SCHEMA, describe_config, learning_of, missing_folders, say_config

if TYPE_CHECKING:
    from debubble.watch.journal import Journal


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
@click.option("--check", is_flag=True, help="Read the configuration, say what it means, and end.")
@click.option("--markdown", is_flag=True, help="With --check: to paste.")
@json_option
@click.pass_context
def command(  # noqa: PLR0913 (one argument a flag)
    context: click.Context,
    *,
    path: Path | None,
    store: str | None,
    printed: str | None,
    check: bool,
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
    config = read_config(path, store=store)
    if check:
        learning = _learning(config)
        said = say_config(config, learning)
        told = f"```text\n{said}\n```" if markdown else said
        shown = json_text(describe_config(config, learning)) if as_json else mask_secrets(told)
        click.echo(shown)
        for warning in missing_folders(config):
            click.echo(f"warning: {warning}", err=True)
        return
    with _opened(config) as journal:
        from debubble.watch.service import Service, only_service

        async def serve() -> None:
            await Service(config, journal).run()

        with only_service(config.lock):
            asyncio.run(serve())


@command.command("retry")
@config_option
@store_option
@click.option("--source", metavar="NAME", help="Captures of one source alone.")
@click.option("--capture", type=int, metavar="N", help="One capture, by its number.")
@click.option("--list", "listed", is_flag=True, help="List what was given up, and end.")
@json_option
def retry(  # noqa: PLR0913 (one argument a flag)
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
    config = read_config(path, store=store)
    names = [known.name for known in config.sources if source in (None, known.name)]
    if not names:
        known = ", ".join(known.name for known in config.sources)
        raise UsageError(f"there is no source {source!r}", hint=f"one of {known}")
    with _opened(config) as journal:
        given_up = [
            row for row in journal.given_up(names) if capture is None or row.number == capture
        ]
        count = 0 if listed else journal.retry(names, capture)
    rows = [
        {"capture": row.number, "source": row.source, "key": row.key, "problem": row.problem}
        for row in given_up
    ]
    if as_json:
        click.echo(json_text({"schema": SCHEMA, "given_up": rows, "retried": count}))
        return
    for row in rows:
        line = f"{row['capture']} {row['source']} {row['key']}: {row['problem']}"
        click.echo(printable(line))
    click.echo(f"{len(rows)} given up." if listed else f"{count} taken up again.")


def _learning(config: Config) -> dict[str, str]:
    """Say how far references have come: to check a configuration needs no store, and makes none."""
    url = config.store or default_url(os.environ, Path.home())
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        return learning_of(config, None)
    try:
        with _opened(config) as journal:
            return learning_of(config, journal)
    except (MissingExtra, StoreError) as error:
        click.echo(f"warning: {error}", err=True)
        return {}


@contextmanager
def _opened(config: Config) -> Iterator[Journal]:
    """Lend the journal of a configuration's store."""
    try:
        from debubble.watch.journal import Journal
    except ImportError as error:
        raise MissingExtra(
            "the service needs SQLAlchemy", hint="pip install 'debubble[watch]'"
        ) from error
    history = Store(store_url(config.store))
    try:
        yield Journal(history)
    finally:
        history.close()
