"""Words in → calls of the other rooms out. One module a verb; only this room prints."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import click

from debubble import __version__
from debubble.errors import DebubbleError
from debubble.report.names import printable

# A verb's module is imported only when the verb is called: `debubble --help` stays instant.
VERBS = {
    "inspect": "What have I got? Files, ranks, steps and events; what is missing or broken.",
    "find": "Where does the time go? The bubble, measured, against theory.",
    "links": "Is it the wire? Each hop measured, judged, and what it costs the batch.",
    "simulate": "What if? A schedule run with costs of your own, or a measured run changed.",
    "plan": "What should I change? Every lever ranked by what it buys, ready to paste.",
    "tune": "Do all that for me: run, plan, try the best options for real, keep the winner.",
    "capture": "Take the traces: of a job on all its ranks, or of a serving engine.",
    "compare": "Did it work? The run after a change against the one before: one verdict.",
    "history": "What happened over time? The record of measurements, by name.",
    "watch": "Keep watching: a service that says when traffic moved or a pipeline got slower.",
    "demo": "Show me: a real four-stage pipeline on this machine, no GPU needed.",
}

EXIT_NO_ANSWER = 2
EXIT_INTERRUPTED = 130


class Verbs(click.Group):
    """Commands by name, imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the verbs in the order of a user's questions."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a verb's module and return its command."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"debubble.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the verbs without importing them."""
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="debubble")
@click.pass_context
def cli(context: click.Context) -> None:
    """Find the bubble in a pipeline-parallel PyTorch job, and pay it down."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line: the one place where errors are caught and the exit code is chosen."""
    try:
        code = cli.main(
            args=None if words is None else list(words),
            prog_name="debubble",
            standalone_mode=False,
        )
    except DebubbleError as error:
        complain(str(error), error.hint)
        sys.exit(EXIT_NO_ANSWER)
    except click.ClickException as error:
        complain(error.format_message(), _usage_hint(error))
        sys.exit(EXIT_NO_ANSWER)
    except (click.Abort, KeyboardInterrupt):
        complain("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(EXIT_INTERRUPTED)
    # Without its standalone mode click returns the code that a command exited with.
    sys.exit(code if isinstance(code, int) else 0)


def complain(message: str, hint: str = "") -> None:
    """Say what is wrong and what to do about it, on stderr."""
    click.echo(f"error: {printable(message, breaks=True)}", err=True)
    if hint:
        click.echo(f"\nhint: {printable(hint, breaks=True)}", err=True)


def _usage_hint(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path} --help" if context else "debubble --help"
