"""Options of verbs that predict: the schedule, layers, memory, and what is known of a server."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from debubble.cli.options import (
    RUNS,
    SERVERS,
    STEPS,
    Decorator,
    Manners,
    Reader,
    gathered,
    imported,
    input_option,
    limit_option,
    memory_limit_option,
    question_option,
)
from debubble.errors import UsageError

if TYPE_CHECKING:
    from debubble.analysis import Analysis
    from debubble.plan.request import Stated


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


def _make_stated(*, schedule_measured: str | None, **known: Any) -> Stated:
    from debubble.plan.request import Stated

    return Stated(schedule=schedule_measured, **known)


def stated_options(schedule_flag: str) -> Decorator:
    """Add what is said of a run that its traces may not tell, as `stated`."""
    return gathered(
        "stated",
        _make_stated,
        input_option(
            schedule_flag,
            "schedule_measured",
            of=(STEPS,),
            metavar="NAME",
            help="Schedule of the run, if it is not recognised.",
        ),
        input_option(
            "--layers",
            of=RUNS,
            type=parse_layers,
            metavar="N,N,...",
            help="Layers of each stage now, if the traces do not show them.",
        ),
        memory_limit_option,
    )


max_microbatches_option = limit_option(
    "--max-microbatches",
    "most_microbatches",
    of=(STEPS,),
    type=click.IntRange(min=1),
    metavar="N",
    help="Largest number of microbatches to try.",
)


def hold_option(default: str) -> Decorator:
    """Add what keeps its size where microbatches change."""
    return question_option(
        "--hold",
        of=(STEPS,),
        type=click.Choice(["microbatch", "batch"]),
        help="Size kept when the number of microbatches changes: of the microbatch, or of the "
        f"global batch.  [default: {default}]",
    )


_server_option, _server_question = (
    partial(option, of=(SERVERS,)) for option in (input_option, question_option)
)
_count = click.IntRange(min=1)
_KNOWN_OF_SERVERS = (
    _server_option(
        "--load",
        type=imported("debubble.plan.server:read_stated_load"),
        metavar="WORDS",
        help="Load of a server: 'clients=16 prompt=512:0.8,2048:0.2 output=64'.",
    ),
    _server_option(
        "--kv-tokens", type=_count, metavar="N", help="Tokens in a server's KV cache, per stage."
    ),
)
_ask_server = imported("debubble.plan.server:ServerQuestion")
server_options = gathered("server", _ask_server, *_KNOWN_OF_SERVERS)
server_change_options = gathered(
    "server",
    _ask_server,
    *_KNOWN_OF_SERVERS,
    _server_question(
        "--in-flight", type=_count, metavar="K", help="Batches in flight at once, of a server."
    ),
    _server_question(
        "--chunk", type=_count, metavar="N", help="Prompt tokens in a batch, of a server."
    ),
)
