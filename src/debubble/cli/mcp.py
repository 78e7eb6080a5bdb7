"""`debubble mcp`: verbs as tools for agents, over stdin and stdout."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from debubble.cli.options import Verb
from debubble.errors import MissingExtra


@click.command("mcp", cls=Verb, examples=("debubble mcp /data/traces",))
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
def command(*, folders: tuple[Path, ...]) -> None:
    """Serve inspect, find, links, plan, simulate and compare to an agent, for traces in FOLDERS.

    It speaks the Model Context Protocol on stdin and stdout. Tools read FOLDERS and nothing else.
    """
    try:
        from debubble.annexes.mcp import serve_stdio
    except ModuleNotFoundError as missing:
        hint = "pip install 'debubble[mcp]'"
        raise MissingExtra("serving agents needs the package mcp", hint=hint) from missing
    # A thread that waits for stdin would outlast an interrupt; there is nothing to clean up.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    serve_stdio(folders)
