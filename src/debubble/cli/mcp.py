"""`debubble mcp`: verbs as tools for agents, over stdin and stdout."""

from __future__ import annotations

import os
from pathlib import Path

import click

from debubble.mcp import Server


@click.command("mcp")
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
def command(*, folders: tuple[Path, ...]) -> None:
    """Serve inspect, find, links, plan, simulate and compare to an agent, for traces in FOLDERS.

    The Model Context Protocol over stdin and stdout. Tools read what is in FOLDERS, and no more.
    """
    # What anything else prints must not come between the answers: stdout leads to stderr from here.
    with os.fdopen(os.dup(0), "rb") as source, os.fdopen(os.dup(1), "wb") as sink:
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)
        os.dup2(2, 1)
        Server(folders, source, sink).serve()
