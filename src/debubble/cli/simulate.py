"""`debubble simulate`: a schedule with costs of your own, or a measured run changed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from debubble.cli.options import (
    Manners,
    Reader,
    drawing_width,
    exit_strictly,
    gathered,
    output_options,
    place_for,
    print_answer,
    progress,
    refuse_typed,
    trace_options,
    typed,
)
from debubble.cli.planning import (
    OF_SERVERS,
    ServerOptions,
    Traces,
    analyse_both,
    communication_option,
    parse_layers,
    refuse_for_steps,
    refuse_for_streams,
    server_change_options,
    token_options,
)
from debubble.errors import UsageError
from debubble.units import (
    PLAIN_NUMBER,
    counted,
    parse_duration,
    parse_memory,
    show_count,
    write_file,
)

if TYPE_CHECKING:
    from debubble.analysis import Analysis
    from debubble.plan.change import Hold
    from debubble.plan.request import ChangeRequest, Tokens
    from debubble.simulate.hand_set import HandSetCosts
    from debubble.timeline.schedules import Order, Statement


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What was typed of a measured run and of its change; None where nothing was."""

    microbatches: int | None
    hold: Hold | None
    schedule: str | None
    chunks: int | None
    split: str | None
    overlap: str | None
    recompute: str | None
    hops: tuple[str, ...]
    tokens: Tokens
    layers: str | None
    schedule_measured: str | None
    communication: str | None
    memory_limit: str | None

    def read(self) -> ChangeRequest:
        """Return what is asked for."""
        from debubble.plan.request import ChangeRequest, Stated

        limit = self.memory_limit
        return ChangeRequest(
            stated=Stated(
                tokens=self.tokens,
                layers=parse_layers(self.layers),
                limit_bytes=None if limit is None else float(parse_memory(limit)),
                schedule=self.schedule_measured,
                communication=self.communication,
            ),
            microbatches=self.microbatches,
            hold=self.hold,
            schedule=self.schedule,
            chunks=self.chunks,
            split=parse_layers(self.split),
            overlap=None if self.overlap is None else self.overlap == "on",
            recompute=None if self.recompute is None else self.recompute == "on",
            hops=self.hops,
        )


what_if_options = gathered(
    "said",
    RunOptions,
    click.option("--microbatches", type=int, metavar="M", help="Microbatches in a step."),
    click.option(
        "--schedule", metavar="NAME|FILE", help="The schedule, or an order of your own as CSV."
    ),
    click.option("--chunks", type=click.IntRange(min=1), metavar="N", help="Stages a rank."),
    click.option(
        "--hold",
        type=click.Choice(["microbatch", "batch"]),
        help="What keeps its size when --microbatches changes.  [default: microbatch]",
    ),
    click.option("--split", metavar="N,N,...", help="Layers of each stage."),
    click.option("--overlap", type=click.Choice(["on", "off"]), help="Transfers beside compute."),
    click.option(
        "--recompute", type=click.Choice(["on", "off"]), help="Activations once more, not kept."
    ),
    click.option(
        "--hop",
        "hops",
        multiple=True,
        metavar="A:B=RATE",
        help="From rank A to B, such as 2:3=5GB/s.",
    ),
    token_options("Tokens a microbatch, or times as many: 2x."),
    click.option("--layers", metavar="N,N,...", help="Layers of each stage as it is, if not told."),
    click.option("--schedule-measured", metavar="NAME", help="The schedule that ran, if not told."),
    communication_option(
        "How messages travel.  [default: as fits the run; without traces, latency]"
    ),
    click.option("--memory-limit", metavar="SIZE", help="Of each rank, such as 80GiB."),
)


def simulate_traces(
    files: Traces, said: RunOptions, server: ServerOptions, manners: Manners, *, draws: bool
) -> None:
    """Measure the run, change it, and say what it would take."""
    from debubble.report.answers.simulate import answer_simulate
    from debubble.report.lanes import draw_lanes
    from debubble.report.simulate import simulate_page

    run, also = analyse_both(files, said.schedule_measured, quiet=manners.quiet)
    if run.pipeline.kind == "stream":
        taken = {"--split", "--layers", "--tokens", "--pipeline", "--capture", "--rank"}
        refuse_for_streams({*_OF_RUNS, *_OF_BOTH, "--timeline"} - taken)
        _simulate_server(run, said, server, manners)
        return
    refuse_for_steps()
    said.tokens.check(has_also=files.also is not None)
    request = said.read()
    with progress("simulating", quiet=manners.quiet):
        asked = run.what_if(request, also)
        answer = answer_simulate(run, asked, request, also)
    following = "" if manners.quiet else f"debubble plan {shlex.join(files.words)}"
    page = simulate_page(answer, following)
    if draws:
        page.drawing = draw_lanes(asked.draw(), 0, None, drawing_width())
    print_answer(page, answer, manners)
    exit_strictly(answer.warnings, manners)


def _simulate_server(
    run: Analysis, said: RunOptions, server: ServerOptions, manners: Manners
) -> None:
    """Change a captured server, or what is asked of it, and say what it would do."""
    from debubble.report.answers.server_plan import answer_server_simulate
    from debubble.report.plan import server_plan_page

    question = server.asks(
        layers=parse_layers(said.layers),
        split=parse_layers(said.split),
        prompts=said.tokens.asked,
    )
    with progress("simulating", quiet=manners.quiet):
        answer = answer_server_simulate(run, question)
    print_answer(server_plan_page(answer), answer, manners)
    exit_strictly(answer.warnings, manners)


# What is said alike of a measured run and of one made by hand, and what of one of them alone.
_OF_BOTH = ("--microbatches", "--schedule", "--chunks", "--communication")
_OF_RUNS = (
    *("--hold", "--split", "--overlap", "--recompute", "--hop", "--layers", "--schedule-measured"),
    *("--tokens", "--tokens-measured", "--also", "--also-tokens", "--memory-limit"),
    *("--pipeline", "--capture", "--rank"),
)
_BY_HAND = (
    *("--stages", "--forward", "--backward", "--input-grad", "--weight-grad", "--transfer"),
    *("--costs", "--table", "--force"),
)


# A step of 512 ranks with 64 microbatches has 65,536 passes; beyond this somebody mistyped.
MOST_PASSES = 200_000
# Each rank is measured over all passes; no pipeline is as long, and these take half a minute.
MOST_RANKS = 2_048

_SEE = "or `debubble simulate --help`"
_PLAIN = re.compile(PLAIN_NUMBER)
_USUAL_SCHEDULE = "1f1b"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOptions:
    """The order that was typed, and how its messages travel; None where nothing was."""

    microbatches: int | None
    schedule: str | None
    chunks: int | None
    communication: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """What was typed in place of a measured run; None where nothing was."""

    ranks: int | None
    forward: str | None
    backward: str | None
    input_grad: str | None
    weight_grad: str | None
    transfer: str | None
    log: str | None = None
    """Whose timers say what passes cost."""
    table: str | None = None
    """Where to write the simulated step."""
    force: bool = False

    @property
    def costs(self) -> dict[str, str | None]:
        """Each by its flag."""
        return {
            "--forward": self.forward,
            "--backward": self.backward,
            "--input-grad": self.input_grad,
            "--weight-grad": self.weight_grad,
            "--transfer": self.transfer,
        }


by_hand_options = gathered(
    "by_hand",
    ByHand,
    click.option(
        "--stages", "--ranks", "ranks", type=int, metavar="P", help="Without traces: ranks."
    ),
    click.option("--forward", metavar="TIME", help="A forward pass; one, or one a stage: 5ms,6ms."),
    click.option(
        "--backward", metavar="TIME", help="A backward pass; by default two forward ones."
    ),
    click.option("--input-grad", metavar="TIME", help="Its one half, where a schedule splits it."),
    click.option("--weight-grad", metavar="TIME", help="Its other half."),
    click.option(
        "--transfer", metavar="TIME", help="A message; one, or one a hop.  [default: free]"
    ),
    click.option(
        "--costs", "log", metavar="LOG", help="Passes as Megatron's or DeepSpeed's timers say."
    ),
    click.option("--table", metavar="OUT", help="Write the simulated step, for `plan`."),
    click.option("--force", is_flag=True, help="Replace files."),
)


def _from_log(wanted: OrderOptions, by_hand: ByHand, log: str) -> tuple[OrderOptions, ByHand]:
    """Return what a log of timers says in place of what would be typed."""
    from debubble.simulate.hand_set import UNIT_NS
    from debubble.trace.timer_logs import read_stage_times

    flags = ("--forward", "--backward", "--input-grad", "--weight-grad")
    typed_too = [flag for flag in flags if by_hand.costs[flag] is not None]
    if typed_too:
        raise UsageError(f"--costs says what {typed_too[0]} would", hint="leave one of them")
    found = read_stage_times(log, ranks=by_hand.ranks, microbatches=wanted.microbatches)
    if wanted.chunks not in {None, found.chunks}:
        raise UsageError(
            f"the log is of {counted(found.chunks, 'chunk')} a rank", hint="leave --chunks out"
        )
    usual = _USUAL_SCHEDULE if found.chunks == 1 else "interleaved-1f1b"
    return (
        replace(
            wanted,
            microbatches=found.microbatches,
            schedule=wanted.schedule or usual,
            chunks=None if found.chunks == 1 else found.chunks,
        ),
        replace(
            by_hand,
            ranks=found.ranks,
            forward=",".join(f"{cost / UNIT_NS:.6g}ms" for cost in found.forward_ns),
            backward=",".join(f"{cost / UNIT_NS:.6g}ms" for cost in found.backward_ns),
        ),
    )


def simulate_by_hand(
    wanted: OrderOptions, by_hand: ByHand, manners: Manners, *, draws: bool
) -> None:
    """Run a schedule, and measure the bubble as `find` does."""
    from debubble.annexes.probe.pipeline import write_table
    from debubble.report.answers.simulate import answer_by_hand
    from debubble.report.lanes import draw_lanes
    from debubble.report.simulate import simulate_page
    from debubble.simulate.as_timeline import as_timeline
    from debubble.simulate.communication import Communication
    from debubble.simulate.hand_set import run_order, settle_costs
    from debubble.timeline.figures import measure_pipeline
    from debubble.timeline.schedules import state_schedule

    place = place_for(by_hand.table, force=by_hand.force)
    if by_hand.log is not None:
        wanted, by_hand = _from_log(wanted, by_hand, by_hand.log)
    schedule = wanted.schedule or _USUAL_SCHEDULE
    order = _order(state_schedule(schedule, wanted.chunks), by_hand.ranks, wanted.microbatches)
    hand_set, in_units = _hand_set(by_hand.costs)
    stages = 1 + max(action.stage for actions in order for action in actions)
    costs = settle_costs(hand_set, stages)
    way = Communication(wanted.communication or Communication.LATENCY)
    program, times = run_order(order, costs, way)
    timeline = as_timeline(program, times)
    answer = answer_by_hand(
        schedule=schedule,
        order=order,
        communication=way,
        costs=costs,
        in_units=in_units,
        figures=measure_pipeline(timeline, 0),
    )
    again = typed(
        {
            "--stages": by_hand.ranks,
            "--microbatches": wanted.microbatches,
            "--schedule": schedule,
            "--chunks": wanted.chunks,
            **by_hand.costs,
            "--communication": None if way is Communication.LATENCY else way,
        }
    )
    quiet = manners.quiet or draws
    following = f"debubble simulate {again} --timeline"
    if place is not None:
        write_file(place, write_table(program, times, None).encode())
        following = f"debubble plan {shlex.quote(str(place))}"
    page = simulate_page(answer, "" if quiet else following)
    if draws:
        page.drawing = draw_lanes(
            timeline, 0, None, drawing_width(), units="units" if in_units else ""
        )
    print_answer(page, answer, manners)


def _order(statement: Statement, ranks: int | None, microbatches: int | None) -> Order:
    """Return the order to run: a file has its own sizes, a name needs them."""
    if statement.order is not None:
        written = 1 + max(action.microbatch for actions in statement.order for action in actions)
        ranks = len(statement.order) if ranks is None else ranks
        microbatches = written if microbatches is None else microbatches
    if ranks is None or microbatches is None:
        raise UsageError(
            "how large is the pipeline?", hint="give --stages and --microbatches, such as 4 and 8"
        )
    chunks = statement.chunks or 1
    if ranks > MOST_RANKS or ranks * microbatches * chunks > MOST_PASSES:
        size = f"{counted(ranks, 'rank')} and {counted(microbatches, 'microbatch', 'microbatches')}"
        raise UsageError(
            f"{size} are more than can be simulated",
            hint=f"there may be {show_count(MOST_RANKS)} ranks, and ranks x chunks x microbatches "
            f"may be {show_count(MOST_PASSES)}",
        )
    return statement.order_for(ranks, microbatches, chunks)


def _hand_set(said: Mapping[str, str | None]) -> tuple[HandSetCosts, bool]:
    """Read the costs, all of them times or all of them plain numbers."""
    from debubble.simulate.hand_set import HandSetCosts

    read = {
        flag: [_read(value) for value in text.split(",")]
        for flag, text in said.items()
        if text is not None
    }
    # Nothing is nothing in any unit.
    plain = {is_plain for values in read.values() for number, is_plain in values if number}
    if len(plain) > 1:
        raise UsageError(
            "some costs are times and some plain numbers", hint="give all a unit, such as 18.5ms"
        )
    if False in plain and "--forward" not in read:
        raise UsageError("what does a forward pass take?", hint="give --forward, such as 18.5ms")
    costs = {
        flag.removeprefix("--").replace("-", "_"): [number for number, _ in values]
        for flag, values in read.items()
    }
    return HandSetCosts(**costs), False not in plain


def _read(text: str) -> tuple[float, bool]:
    """Return nanoseconds, and whether it was a plain number."""
    from debubble.simulate.hand_set import UNIT_NS

    if _PLAIN.fullmatch(text.strip()):
        return float(text) * UNIT_NS, True
    return parse_duration(text), False


@click.command("simulate")
@click.argument("traces", nargs=-1)
@what_if_options
@click.option("--pipeline", type=int, metavar="N", help="One pipeline alone, counted from 0.")
@by_hand_options
@server_change_options
@click.option("--timeline", "draws", is_flag=True, help="Draw the step, a lane a rank.")
@trace_options
@output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    traces: tuple[str, ...],
    said: RunOptions,
    also: str | None,
    pipeline: int | None,
    by_hand: ByHand,
    server: ServerOptions,
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
    files = Traces(
        words=traces,
        also=also,
        pipeline=pipeline,
        reader=reader,
        in_flight=server.in_flight_measured,
    )
    if traces:
        why, hint = "is for simulating without traces: here it is measured", "leave it out"
        refuse_typed(_BY_HAND, why, f"{hint}, {_SEE}")
        simulate_traces(files, said, server, manners, draws=draws)
        return
    wanted = OrderOptions(
        microbatches=said.microbatches,
        schedule=said.schedule,
        chunks=said.chunks,
        communication=said.communication,
    )
    why, hint = "is about a measured run, and no traces are given", "name its traces"
    refuse_typed((*_OF_RUNS, *OF_SERVERS), why, f"{hint}, {_SEE}")
    simulate_by_hand(wanted, by_hand, manners, draws=draws)
