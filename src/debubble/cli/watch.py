"""`debubble watch`: a service that captures, analyses and tells when something changed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from debubble.cli.measuring import store_url
from debubble.errors import MissingExtra, UsageError
from debubble.measure.store import Store
from debubble.watch.config import read_config
from debubble.watch.files import FILES, read_file
from debubble.watch.views import describe_config, missing_folders, say_config


@click.command("watch")
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="What to watch: watch.toml.",
)
@click.option("--store", metavar="URL", help="sqlite:///… or postgresql://…; before the file's.")
@click.option(
    "--print",
    "printed",
    type=click.Choice(FILES),
    help="Print alert rules for Prometheus or a dashboard for Grafana, and end.",
)
@click.option("--check", is_flag=True, help="Read the configuration, say what it means, and end.")
@click.option("--json", "as_json", is_flag=True, help="With --check: one JSON object on stdout.")
def command(
    *, path: Path | None, store: str | None, printed: str | None, check: bool, as_json: bool
) -> None:
    """Take captures in as they appear, and say when something changed."""
    if printed is not None:
        click.echo(read_file(printed), nl=False)
        return
    if path is None:
        raise UsageError("there is nothing to watch", hint="debubble watch --config watch.toml")
    config = read_config(path, store=store)
    if check:
        text = json.dumps(describe_config(config), indent=2) if as_json else say_config(config)
        click.echo(text)
        for warning in missing_folders(config):
            click.echo(f"warning: {warning}", err=True)
        return
    try:
        from debubble.watch.journal import Journal  # noqa: PLC0415 (SQLAlchemy is an extra)
    except ImportError as error:
        raise MissingExtra(
            "the service needs SQLAlchemy", hint="pip install 'debubble[watch]'"
        ) from error
    from debubble.watch.service import Service, only_service  # noqa: PLC0415 (the same)

    async def serve() -> None:
        await Service(config, Journal(history)).run()

    with only_service(config.lock):
        history = Store(store_url(config.store))
        try:
            asyncio.run(serve())
        finally:
            history.close()
