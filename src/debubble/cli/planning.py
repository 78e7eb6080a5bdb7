"""What `simulate` and `plan` share: the runs that were named, and what is said of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import click

from debubble.analysis import Analysis
from debubble.answers.change import Tokens
from debubble.cli.options import Decorator, gathered
from debubble.cli.reading import Reader
from debubble.errors import UsageError
from debubble.fleet.survey import Question
from debubble.schedules import SCHEDULES, state_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Which files to read."""

    words: tuple[str, ...]
    also: str | None
    pipeline: int | None
    reader: Reader


def analyse_both(
    files: Traces, schedule: str | None, *, quiet: bool
) -> tuple[Analysis, Analysis | None]:
    """Read the run, whose schedule may be stated, and the other one of its model, if any."""
    statement = None if schedule is None else state_schedule(schedule)
    if statement is not None and statement.order is not None:
        raise UsageError(
            f"what ran must have a name to be changed, and {schedule} is an order",
            hint=f"one of {', '.join(SCHEDULES)}; `find` takes orders",
        )
    question = Question(pipeline=files.pipeline, statement=statement)
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
    return Tokens(asked=tokens, measured=tokens_measured, also=also_tokens)
