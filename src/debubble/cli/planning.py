"""Options of verbs that predict: the schedule, layers, memory, and what is known of a server."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import click

from debubble.cli.options import (
    Decorator,
    Manners,
    Reader,
    gathered,
    input_option,
    limit_option,
    memory_limit_option,
    question_option,
    refuse_typed,
)
from debubble.errors import UsageError

if TYPE_CHECKING:
    from debubble.analysis import Analysis
    from debubble.plan.request import Stated
    from debubble.plan.server import ServerQuestion, StatedLoad


def analyse_stated(
    reader: Reader,
    traces: Sequence[str],
    manners: Manners,
    *,
    pipeline: int | None,
    schedule: str | None,
) -> Analysis:
    """Read the run, whose schedule may be stated."""
    from debubble.timeline.fleet.survey import Question
    from debubble.timeline.schedules import SCHEDULES, state_schedule

    statement = None if schedule is None else state_schedule(schedule)
    if statement is not None and statement.order is not None:
        raise UsageError(
            f"the schedule of the run must be named, and {schedule} is an order",
            hint=f"one of {', '.join(SCHEDULES)}; `find` takes orders",
        )
    return reader.analyse(traces, Question(pipeline=pipeline, statement=statement), manners)


def parse_layers(text: str) -> tuple[int, ...]:
    """Read `4,4,4,4`."""
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = ()
    if not sum(layers) or min(layers) < 0:
        raise UsageError(f"{text!r} is no split", hint="write it as 4,4,4,4: layers of each stage")
    return layers


def _make_stated(
    *, layers: tuple[int, ...] | None, limit_bytes: int | None, schedule_measured: str | None
) -> Stated:
    from debubble.plan.request import Stated

    return Stated(
        layers=layers,
        limit_bytes=None if limit_bytes is None else float(limit_bytes),
        schedule=schedule_measured,
    )


def stated_options(schedule_flag: str) -> Decorator:
    """Add what is said of a run that its traces may not tell, as `stated`."""
    return gathered(
        "stated",
        _make_stated,
        input_option(
            schedule_flag,
            "schedule_measured",
            metavar="NAME",
            help="Schedule of the run, if it is not recognised.",
        ),
        input_option(
            "--layers",
            type=parse_layers,
            metavar="N,N,...",
            help="Layers of each stage now, if the traces do not show them.",
        ),
        memory_limit_option,
    )


max_microbatches_option = limit_option(
    "--max-microbatches",
    "most_microbatches",
    type=click.IntRange(min=1),
    metavar="N",
    help="Largest number of microbatches to try.",
)


def hold_option(default: str) -> Decorator:
    """Add what keeps its size where microbatches change."""
    return question_option(
        "--hold",
        type=click.Choice(["microbatch", "batch"]),
        help="Size kept when the number of microbatches changes: of the microbatch, or of the "
        f"global batch.  [default: {default}]",
    )


def refuse_for_streams(flags: Collection[str]) -> None:
    """Refuse what is only for runs with steps where batches overlap: a server."""
    refuse_typed(
        flags,
        "needs steps, and this is a server: its batches overlap",
        "leave it out; --load states the load of a server",
    )


OF_SERVERS = ("--load", "--kv-tokens", "--in-flight", "--chunk")


def refuse_for_steps() -> None:
    """Refuse what is only for a server where a run has steps."""
    refuse_typed(OF_SERVERS, "is only for servers, and this run has steps", "leave it out")


def _parse_load(text: str) -> StatedLoad:
    from debubble.plan.server import read_stated_load

    return read_stated_load(text)


def _ask_server(**known: Any) -> ServerQuestion:
    from debubble.plan.server import ServerQuestion

    return ServerQuestion(**known)


_OF_SERVERS = (
    input_option(
        "--load",
        type=_parse_load,
        metavar="WORDS",
        help="Load of a server: 'clients=16 prompt=512:0.8,2048:0.2 output=64'.",
    ),
    input_option(
        "--kv-tokens",
        type=click.IntRange(min=1),
        metavar="N",
        help="Tokens in a server's KV cache, per stage.",
    ),
)
server_options = gathered("server", _ask_server, *_OF_SERVERS)
server_change_options = gathered(
    "server",
    _ask_server,
    *_OF_SERVERS,
    question_option(
        "--in-flight",
        type=click.IntRange(min=1),
        metavar="K",
        help="Batches in flight at once, of a server.",
    ),
    question_option(
        "--chunk",
        type=click.IntRange(min=1),
        metavar="N",
        help="Prompt tokens in a batch, of a server.",
    ),
)
