"""`debubble simulate`: one what-if, of a measured run or of costs of one's own."""

from __future__ import annotations

from collections.abc import Mapping

import click

from debubble.cli.options import Manners, output_options
from debubble.cli.planning import Tokens, Traces
from debubble.cli.reading import Reader, trace_options
from debubble.cli.simulate_by_hand import Wanted, simulate_by_hand
from debubble.cli.simulate_traces import Said, simulate_traces
from debubble.errors import UsageError
from debubble.simulate.communication import Communication


@click.command("simulate")
@click.argument("traces", nargs=-1)
@click.option("--microbatches", type=int, metavar="M", help="Microbatches in a step.")
@click.option(
    "--schedule", metavar="NAME|FILE", help="The schedule, or an order of your own as CSV."
)
@click.option("--chunks", type=click.IntRange(min=1), metavar="N", help="Stages a rank.")
@click.option(
    "--hold",
    type=click.Choice(["microbatch", "batch"]),
    help="What keeps its size when --microbatches changes.  [default: microbatch]",
)
@click.option("--split", metavar="N,N,...", help="Layers of each stage.")
@click.option("--overlap", type=click.Choice(["on", "off"]), help="Transfers beside compute.")
@click.option(
    "--hop", "hops", multiple=True, metavar="A:B=RATE", help="From rank A to B, such as 2:3=5GB/s."
)
@click.option("--tokens", metavar="N", help="Tokens a microbatch, or times as many: 2x.")
@click.option(
    "--tokens-measured", type=click.IntRange(min=1), metavar="N", help="Tokens in the run as it is."
)
@click.option("--also", metavar="TRACES", help="Another run of the same model, to learn from.")
@click.option(
    "--also-tokens", type=click.IntRange(min=1), metavar="N", help="Tokens in that other run."
)
@click.option("--layers", metavar="N,N,...", help="Layers of each stage as it is, if not told.")
@click.option("--schedule-measured", metavar="NAME", help="The schedule that ran, if not told.")
@click.option("--memory-limit", metavar="SIZE", help="Of each rank, such as 80GiB.")
@click.option("--pipeline", type=int, metavar="N", help="One pipeline alone, counted from 0.")
@click.option("--stages", "--ranks", "ranks", type=int, metavar="P", help="Without traces: ranks.")
@click.option("--forward", metavar="TIME", help="A forward pass; one, or one a stage: 5ms,6ms.")
@click.option("--backward", metavar="TIME", help="A backward pass; by default two forward ones.")
@click.option("--input-grad", metavar="TIME", help="Its one half, where a schedule splits it.")
@click.option("--weight-grad", metavar="TIME", help="Its other half.")
@click.option("--transfer", metavar="TIME", help="A message; one, or one a hop.  [default: free]")
@click.option(
    "--communication",
    type=click.Choice([str(one) for one in Communication]),
    help="How messages are posted and waited for.  [default: latency]",
)
@click.option("--timeline", "draws", is_flag=True, help="Draw the step, a lane a rank.")
@trace_options
@output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    traces: tuple[str, ...],
    microbatches: int | None,
    schedule: str | None,
    chunks: int | None,
    hold: str | None,
    split: str | None,
    overlap: str | None,
    hops: tuple[str, ...],
    tokens: str | None,
    tokens_measured: int | None,
    also: str | None,
    also_tokens: int | None,
    layers: str | None,
    schedule_measured: str | None,
    memory_limit: str | None,
    pipeline: int | None,
    ranks: int | None,
    forward: str | None,
    backward: str | None,
    input_grad: str | None,
    weight_grad: str | None,
    transfer: str | None,
    communication: str | None,
    draws: bool,
    reader: Reader,
    as_json: bool,
    strict: bool,
    color: str,
    quiet: bool,
) -> None:
    """Change one thing in the run of TRACES, or several, and see what a batch would take.

    Without TRACES: run a schedule with costs of your own. Costs are times (18.5ms) or plain
    numbers, of which only the ratios count.
    """
    if draws and as_json:
        raise UsageError("--timeline draws for people, --json is for programs", hint="leave one")
    manners = Manners(as_json=as_json, strict=strict, color=color, quiet=quiet)
    costs = {
        "--forward": forward,
        "--backward": backward,
        "--input-grad": input_grad,
        "--weight-grad": weight_grad,
        "--transfer": transfer,
    }
    by_hand = {"--stages": ranks, **costs, "--communication": communication}
    of_traces = {
        "--hold": hold,
        "--split": split,
        "--overlap": overlap,
        "--hop": hops or None,
        "--tokens": tokens,
        "--tokens-measured": tokens_measured,
        "--also": also,
        "--also-tokens": also_tokens,
        "--layers": layers,
        "--schedule-measured": schedule_measured,
        "--memory-limit": memory_limit,
        "--pipeline": pipeline,
        "--capture": reader.capture,
        "--rank": reader.rank,
    }
    if not traces:
        _refuse(of_traces, "is about a measured run, and no traces are given", "name its traces")
        wanted = Wanted(
            ranks=ranks,
            microbatches=microbatches,
            schedule=schedule,
            chunks=chunks,
            costs=costs,
            communication=communication,
        )
        simulate_by_hand(wanted, manners, draws=draws)
        return
    _refuse(by_hand, "is for simulating without traces: here it is measured", "leave it out")
    said = Said(
        microbatches=microbatches,
        hold=hold,
        schedule=schedule,
        chunks=chunks,
        split=split,
        overlap=overlap,
        hops=hops,
        tokens=Tokens(asked=tokens, measured=tokens_measured, also=also_tokens),
        layers=layers,
        schedule_measured=schedule_measured,
        memory_limit=memory_limit,
    )
    files = Traces(
        words=traces,
        also=also,
        pipeline=pipeline,
        reader=reader,
    )
    simulate_traces(files, said, manners, draws=draws)


def _refuse(flags: Mapping[str, object], why: str, hint: str) -> None:
    for flag, value in flags.items():
        if value is not None:
            raise UsageError(f"{flag} {why}", hint=f"{hint}, or `debubble simulate --help`")
