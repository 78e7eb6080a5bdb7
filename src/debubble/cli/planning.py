"""What `simulate` and `plan` share: the runs that were named, and what is said of tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from debubble.cli.options import Decorator, Reader, gathered, in_flight_option, refuse_typed
from debubble.errors import UsageError

if TYPE_CHECKING:
    from debubble.analysis import Analysis
    from debubble.plan.request import Tokens
    from debubble.serving.question import ServerQuestion


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Which files to read."""

    words: tuple[str, ...]
    also: str | None
    pipeline: int | None
    reader: Reader
    in_flight: int | None
    """That a server is said to keep."""


def analyse_both(
    files: Traces, schedule: str | None, *, quiet: bool
) -> tuple[Analysis, Analysis | None]:
    """Read the run, whose schedule may be stated, and the other one of its model, if any."""
    from debubble.timeline.fleet.survey import Question
    from debubble.timeline.schedules import SCHEDULES, state_schedule

    statement = None if schedule is None else state_schedule(schedule)
    if statement is not None and statement.order is not None:
        raise UsageError(
            f"what ran must have a name to be changed, and {schedule} is an order",
            hint=f"one of {', '.join(SCHEDULES)}; `find` takes orders",
        )
    question = Question(pipeline=files.pipeline, statement=statement, in_flight=files.in_flight)
    run = files.reader.analyse(files.words, question, quiet=quiet)
    if files.also is None:
        return run, None
    question = Question(pipeline=files.pipeline)
    return run, files.reader.analyse((files.also,), question, quiet=quiet)


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Read `4,4,4,4`."""
    if text is None:
        return None
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = ()
    if not sum(layers) or min(layers) < 0:
        raise UsageError(f"{text!r} is no split", hint="write it as 4,4,4,4: layers of each stage")
    return layers


def token_options(asked: str) -> Decorator:
    """Add what is said of tokens and of another run; the verb is handed `tokens` and `also`.

    `asked` says what `--tokens` asks the verb for.
    """
    count = click.IntRange(min=1)
    return gathered(
        "tokens",
        _make_tokens,
        click.option("--tokens", metavar="N", help=asked),
        click.option(
            "--tokens-measured", type=count, metavar="N", help="Tokens in the run as it is."
        ),
        click.option(
            "--also", metavar="TRACES", help="Another run of the same model, to learn from."
        ),
        click.option("--also-tokens", type=count, metavar="N", help="Tokens in that other run."),
    )


def _make_tokens(
    *, tokens: str | None, tokens_measured: int | None, also_tokens: int | None
) -> Tokens:
    from debubble.plan.request import Tokens

    return Tokens(asked=tokens, measured=tokens_measured, also=also_tokens)


def _check_way(_context: click.Context, _option: click.Parameter, way: str | None) -> str | None:
    """Refuse a way for messages to travel that there is not."""
    from debubble.simulate.communication import Communication

    if way is not None and way not in set(Communication):
        ways = ", ".join(Communication)
        raise UsageError(f"no messages travel by {way!r}", hint=f"one of {ways}")
    return way


def communication_option(words: str) -> Decorator:
    """Add `--communication`."""
    return click.option("--communication", metavar="WAY", callback=_check_way, help=words)


def refuse_for_streams(flags: Collection[str]) -> None:
    """Refuse what is only for runs with steps where batches overlap: a server."""
    refuse_typed(
        flags,
        "is about steps, and these batches overlap: a server has none",
        "leave it out; --load says what a server is asked",
    )


OF_SERVERS = (
    "--load",
    "--kv-tokens",
    "--in-flight",
    "--in-flight-measured",
    "--chunk",
    "--requests",
)


def refuse_for_steps() -> None:
    """Refuse what is only for a server where a run has steps."""
    refuse_typed(OF_SERVERS, "is about a server, and this run has steps", "leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What was typed of a server; None where nothing was."""

    load: str | None
    kv_tokens: int | None
    in_flight_measured: int | None
    in_flight: int | None = None
    chunk: int | None = None
    requests: int | None = None

    def asks(
        self,
        *,
        layers: tuple[int, ...] | None,
        split: tuple[int, ...] | None = None,
        prompts: str | None = None,
    ) -> ServerQuestion:
        """Return what is asked."""
        from debubble.serving.question import ServerQuestion, read_stated_load

        return ServerQuestion(
            load=None if self.load is None else read_stated_load(self.load),
            kv_tokens=self.kv_tokens,
            layers=layers,
            split=split,
            in_flight=self.in_flight,
            chunk=self.chunk,
            requests=self.requests,
            prompts=prompts,
        )


_OF_SERVERS = (
    click.option(
        "--load",
        metavar="WORDS",
        help="Of a server: 'clients=16 prompt=512:0.8,2048:0.2 output=64'.",
    ),
    click.option(
        "--kv-tokens", type=click.IntRange(min=1), metavar="N", help="That its cache holds."
    ),
    in_flight_option,
)


def _said_of_server(
    *, load: str | None, kv_tokens: int | None, in_flight_measured: int | None
) -> ServerOptions:
    return ServerOptions(load=load, kv_tokens=kv_tokens, in_flight_measured=in_flight_measured)


server_options = gathered("server", _said_of_server, *_OF_SERVERS)
server_change_options = gathered(
    "server",
    ServerOptions,
    *_OF_SERVERS,
    click.option(
        "--in-flight", type=click.IntRange(min=1), metavar="K", help="Of a server: batches at once."
    ),
    click.option(
        "--chunk", type=click.IntRange(min=1), metavar="N", help="Tokens of prompts in a batch."
    ),
    click.option(
        "--requests", type=click.IntRange(min=1), metavar="N", help="Requests in a batch at most."
    ),
)
