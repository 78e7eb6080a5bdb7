"""Words in → calls of the other rooms out. One module a verb; only this room prints."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

import click

from debubble import __version__
from debubble.errors import (
    DebubbleError,
    GateError,
    Interrupted,
    MachineError,
    Unforeseen,
    UsageError,
)
from debubble.units import printable

# A verb's module is imported only when the verb is called: `debubble --help` stays instant.
VERBS = {
    "inspect": "What have I got? Files, ranks, steps and events; what is missing or broken.",
    "find": "Where does the time go? The bubble, measured, against theory.",
    "links": "Is it the wire? Each hop measured and judged, and what it costs the batch.",
    "simulate": "What if? A measured run changed, or a schedule simulated with given costs.",
    "plan": "What should I change? All options ranked by gain, ready to paste.",
    "probe": "Before the cluster: time a model's layers on one device, predict pipelines of it.",
    "tune": "Do all that for me: run, plan, try the best options for real, keep the winner.",
    "capture": "Take the traces: of a job on all its ranks, or of a serving engine.",
    "meter": "Meter a running job: its bubble all the time, unprofiled.",
    "compare": "Did it work? The runs before and after a change: one verdict.",
    "history": "What happened over time? The record of measurements, by name.",
    "watch": "Keep watching: a service that alerts when traffic moves or a pipeline slows.",
    "mcp": "For agents: the reading verbs as tools of the Model Context Protocol.",
    "demo": "Show me: a real four-stage pipeline on this machine, no GPU needed.",
}

EXIT_NO_ANSWER = 2
EXIT_INTERRUPTED = 130
# As a shell says it of whoever writes into a pipe that nobody reads; a gate was not judged.
EXIT_UNHEARD = 141
TRACEBACK = "DEBUBBLE_TRACEBACK"
# Objects between two looks for cycles. Importing makes tens of thousands, and none is garbage: with
# Python's 700 a twentieth of a `find` is spent looking.
_COLLECT_AFTER = 200_000


class Unheard(Exception):
    """Whoever read the answer has gone."""


@contextmanager
def telling_unheard() -> Iterator[None]:
    """Raise when the reader has gone: left alone, click and rich end with 1, the code of gates."""
    try:
        yield
    except BrokenPipeError as gone:
        raise Unheard from gone
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            raise Unheard from end
        raise


def prepare_streams() -> None:
    """Let print whatever there is to say: closed streams lead nowhere, strange letters become `?`.

    A closed stream has no file, and the next file to be opened would be taken for it.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def abandon_stdout() -> None:
    """Drop what could not be written, so that Python does not try again when it ends."""
    with suppress(OSError, ValueError):  # a stream without a file has nothing to write again
        file, nowhere = sys.stdout.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file)
        os.close(nowhere)


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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb; name the one that was meant where it was mistyped."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from difflib import get_close_matches

            meant = get_close_matches(args[0], VERBS, n=1)
            text = f"; did you mean {meant[0]}?" if meant else ""
            raise UsageError(f"there is no verb {args[0]!r}{text}", hint="debubble --help")
        return super().resolve_command(ctx, args)

    def make_context(
        self, info_name: str | None, args: list[str], *more: Any, **settings: Any
    ) -> click.Context:
        """Read the words, and print help."""
        with telling_unheard():
            return super().make_context(info_name, args, *more, **settings)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb."""
        with telling_unheard():
            return super().invoke(ctx)

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
    """Run the command line: the one place where errors are caught and the exit code is chosen.

    1 is the code of a closed gate, which a verb asks for itself: nothing that goes wrong has it.
    """
    gc.set_threshold(_COLLECT_AFTER)
    prepare_streams()
    as_json = asks_for_json(sys.argv[1:] if words is None else words)
    try:
        code = cli.main(
            args=None if words is None else list(words),
            prog_name="debubble",
            standalone_mode=False,
        )
        sys.stdout.flush()
    except GateError as error:  # after the answer: stdout has its one object
        _end(error)
    except DebubbleError as error:
        _end(error, as_json=as_json)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"{context.command_path} --help" if context else "debubble --help"
        _end(UsageError(error.format_message(), hint=hint), as_json=as_json)
    except (click.Abort, KeyboardInterrupt):
        _end(Interrupted("interrupted"), as_json=as_json, code=EXIT_INTERRUPTED)
    except (Unheard, BrokenPipeError):
        abandon_stdout()
        sys.exit(EXIT_UNHEARD)
    except OSError as error:
        file = str(error.filename or "")
        _end(MachineError(error.strerror or str(error), file=file), as_json=as_json)
    except Exception as error:  # noqa: BLE001 (the last place to say it in a line)
        _end(_unforeseen(error), as_json=as_json)
    # Without its standalone mode click returns the code that a command exited with.
    sys.exit(code if isinstance(code, int) else 0)


def own_words(words: Sequence[str]) -> list[str]:
    """Return the words before `--`: those after it belong to a command of the user's."""
    given = list(words)
    return given[: given.index("--")] if "--" in given else given


def asks_for_json(words: Sequence[str]) -> bool:
    """Tell whether a program waits for one object on stdout."""
    return any(word == "--json" or word.startswith("--json=") for word in own_words(words))


def _end(error: DebubbleError, *, as_json: bool = False, code: int = EXIT_NO_ANSWER) -> NoReturn:
    """Say why there is no answer, to a program that waits for one object on stdout as well."""
    if as_json:
        from debubble.report.answers.base import answer_error

        with suppress(OSError):  # stdout itself may be what cannot be written
            click.echo(answer_error(error).to_json())
    if isinstance(error, MachineError):
        abandon_stdout()
    complain(str(error), error.hint)
    sys.exit(code)


def _unforeseen(error: Exception) -> Unforeseen:
    """Name an error that is debubble's own fault, in a line or, where asked for, in full."""
    if os.environ.get(TRACEBACK):
        import traceback

        traceback.print_exception(error)
    text = " ".join(str(error).split())
    return Unforeseen(
        f"unforeseen: {type(error).__name__}{': ' if text else ''}{text}",
        hint=f"{TRACEBACK}=1 shows where; please report it with that",
    )


def complain(message: str, hint: str = "") -> None:
    """Say what is wrong and what to do about it, on stderr."""
    click.echo(f"error: {printable(message, breaks=True)}", err=True)
    if hint:
        click.echo(f"\nhint: {printable(hint, breaks=True)}", err=True)
