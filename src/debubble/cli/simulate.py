"""`debubble simulate`: one what-if, of a measured run or of costs of one's own."""

from __future__ import annotations

from collections.abc import Mapping

import click

from debubble.cli.options import Manners, output_options
from debubble.cli.planning import Traces
from debubble.cli.reading import Reader, trace_options
from debubble.cli.simulate_by_hand import ByHand, Wanted, by_hand_options, simulate_by_hand
from debubble.cli.simulate_traces import Said, flags_of, simulate_traces, what_if_options
from debubble.errors import UsageError

# What is said alike of a measured run and of one made by hand.
_OF_BOTH = ("--microbatches", "--schedule", "--chunks")


@click.command("simulate")
@click.argument("traces", nargs=-1)
@what_if_options
@click.option("--pipeline", type=int, metavar="N", help="One pipeline alone, counted from 0.")
@by_hand_options
@click.option("--timeline", "draws", is_flag=True, help="Draw the step, a lane a rank.")
@trace_options
@output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    traces: tuple[str, ...],
    said: Said,
    also: str | None,
    pipeline: int | None,
    by_hand: ByHand,
    draws: bool,
    reader: Reader,
    manners: Manners,
) -> None:
    """Change one thing in the run of TRACES, or several, and see what a batch would take.

    Without TRACES: run a schedule with costs of your own. Costs are times (18.5ms) or plain
    numbers, of which only the ratios count.
    """
    if draws and manners.as_json:
        raise UsageError("--timeline draws for people, --json is for programs", hint="leave one")
    files = Traces(words=traces, also=also, pipeline=pipeline, reader=reader)
    if traces:
        _refuse(
            by_hand.flags, "is for simulating without traces: here it is measured", "leave it out"
        )
        simulate_traces(files, said, manners, draws=draws)
        return
    wanted = Wanted(microbatches=said.microbatches, schedule=said.schedule, chunks=said.chunks)
    of_run = flags_of(files, said) | dict.fromkeys(_OF_BOTH)
    _refuse(of_run, "is about a measured run, and no traces are given", "name its traces")
    simulate_by_hand(wanted, by_hand, manners, draws=draws)


def _refuse(flags: Mapping[str, object], why: str, hint: str) -> None:
    for flag, value in flags.items():
        if value is not None:
            raise UsageError(f"{flag} {why}", hint=f"{hint}, or `debubble simulate --help`")
