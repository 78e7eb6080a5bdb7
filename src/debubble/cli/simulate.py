"""`debubble simulate`: a schedule with costs of your own, or a measured run changed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import click

from debubble.cli.options import (
    BY_HAND,
    RUNS,
    SERVERS,
    STEPS,
    Manners,
    Reader,
    Verb,
    drawing_width,
    finish,
    force_option,
    gathered,
    imported,
    input_option,
    output_option,
    output_options,
    pipeline_option,
    place_for,
    progress,
    question_option,
    refuse_others,
    trace_options,
    typed_questions,
)
from debubble.cli.planning import (
    analyse_stated,
    hold_option,
    parse_layers,
    server_change_options,
    stated_options,
)
from debubble.errors import UsageError
from debubble.units import (
    PLAIN_NUMBER,
    counted,
    parse_duration,
    show_count,
    write_file,
)

if TYPE_CHECKING:
    from debubble.plan.request import ChangeRequest, Stated
    from debubble.plan.server import ServerQuestion
    from debubble.timeline.schedules import Order, Statement


def _switch(_context: click.Context, _option: click.Parameter, word: str | None) -> bool | None:
    return None if word is None else word == "on"


_order_option = partial(question_option, of=(STEPS, BY_HAND))
_cost_option = partial(input_option, of=(BY_HAND,))
request_options = gathered(
    "request",
    imported("debubble.plan.request:ChangeRequest"),
    _order_option("--microbatches", type=int, metavar="M", help="Microbatches per step."),
    _order_option(
        "--schedule", metavar="NAME|FILE", help="Schedule, by name or as an order in CSV."
    ),
    _order_option("--chunks", type=click.IntRange(min=1), metavar="N", help="Stages per rank."),
    hold_option("microbatch"),
    question_option(
        "--split",
        of=RUNS,
        type=parse_layers,
        metavar="N,N,...",
        help="Layers of each stage after the change.",
    ),
    question_option(
        "--overlap",
        of=(STEPS,),
        type=click.Choice(["on", "off"]),
        callback=_switch,
        help="Overlap of transfers with compute.",
    ),
    question_option(
        "--recompute",
        of=(STEPS,),
        type=click.Choice(["on", "off"]),
        callback=_switch,
        help="Recomputation of activations.",
    ),
    question_option(
        "--hop",
        "hops",
        of=(STEPS,),
        multiple=True,
        metavar="A:B=RATE",
        help="Rate of messages from rank A to B, such as 2:3=5GB/s.",
    ),
    question_option(
        "--tokens",
        of=RUNS,
        metavar="N",
        help="Tokens per microbatch after the change, or a factor: 2x.",
    ),
)


# A step of 512 ranks with 64 microbatches has 65,536 passes; beyond this somebody mistyped.
MOST_PASSES = 200_000
# Each rank is measured over all passes; no pipeline is as long, and these take half a minute.
MOST_RANKS = 2_048

_PLAIN = re.compile(PLAIN_NUMBER)
_USUAL_SCHEDULE = "1f1b"


Costs = Sequence[tuple[float, bool]]
"""Nanoseconds, one value for all or one a stage, and whether each was typed as a plain number."""


def _parse_costs(text: str) -> Costs:
    """Read `5ms,6ms`, or plain numbers: a unit is run as so many nanoseconds."""
    from debubble.simulate.hand_set import UNIT_NS

    return [
        (float(value) * UNIT_NS, True)
        if _PLAIN.fullmatch(value)
        else (parse_duration(value), False)
        for value in map(str.strip, text.split(","))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """What was typed in place of a measured run; None where nothing was."""

    ranks: int | None
    forward: Costs | None
    backward: Costs | None
    input_grad: Costs | None
    weight_grad: Costs | None
    transfer: Costs | None
    log: str | None
    """Whose timers say what passes cost."""
    table: str | None
    """Where to write the simulated step."""
    force: bool

    @property
    def costs(self) -> dict[str, Costs]:
        """Those that are known, by name."""
        names = ("forward", "backward", "input_grad", "weight_grad", "transfer")
        return {name: costs for name in names if (costs := getattr(self, name)) is not None}


_time_option = partial(_cost_option, type=_parse_costs, metavar="TIME")
by_hand_options = gathered(
    "by_hand",
    ByHand,
    _cost_option("--stages", "ranks", type=int, metavar="P", help="Ranks, without traces."),
    _time_option(
        "--forward",
        help="Forward pass: one time, or one per stage: 5ms,6ms.",
    ),
    _time_option(
        "--backward",
        help="Backward pass.  [default: twice the forward pass]",
    ),
    _time_option(
        "--input-grad",
        help="Input gradient, where the schedule splits the backward pass.",
    ),
    _time_option("--weight-grad", help="Weight gradient, likewise."),
    _time_option(
        "--transfer",
        help="Transfer: one time, or one per hop.  [default: 0]",
    ),
    _cost_option(
        "--costs",
        "log",
        metavar="LOG",
        help="Log of Megatron's or DeepSpeed's timers, for the times of passes.",
    ),
    output_option(
        "--table",
        of=(BY_HAND,),
        metavar="OUT",
        help="CSV file of the simulated step, for `plan`.",
    ),
    force_option,
)


def _from_log(wanted: ChangeRequest, by_hand: ByHand, log: str) -> tuple[ChangeRequest, ByHand]:
    """Return what a log of timers says in place of what would be typed."""
    from debubble.trace.timer_logs import read_stage_times

    typed_too = [name.replace("_", "-") for name in by_hand.costs if name != "transfer"]
    if typed_too:
        raise UsageError(f"--costs and --{typed_too[0]} exclude each other", hint="leave one out")
    times_read = read_stage_times(log, ranks=by_hand.ranks, microbatches=wanted.microbatches)
    if wanted.chunks not in {None, times_read.chunks}:
        raise UsageError(
            f"the log is of {counted(times_read.chunks, 'chunk')} a rank", hint="leave --chunks out"
        )
    usual = _USUAL_SCHEDULE if times_read.chunks == 1 else "interleaved-1f1b"
    return (
        replace(
            wanted,
            microbatches=times_read.microbatches,
            schedule=wanted.schedule or usual,
            chunks=None if times_read.chunks == 1 else times_read.chunks,
        ),
        replace(
            by_hand,
            ranks=times_read.ranks,
            forward=[(cost, False) for cost in times_read.forward_ns],
            backward=[(cost, False) for cost in times_read.backward_ns],
        ),
    )


def simulate_by_hand(
    wanted: ChangeRequest, by_hand: ByHand, manners: Manners, *, draws: bool
) -> None:
    """Run a schedule, and measure the bubble as `find` does."""
    from debubble.report.answers.simulate import answer_by_hand
    from debubble.report.frame import frame_step
    from debubble.report.lanes import draw_lanes
    from debubble.report.op_table import write_table
    from debubble.report.simulate import simulate_page
    from debubble.simulate.as_timeline import as_timeline
    from debubble.simulate.communication import Communication
    from debubble.simulate.hand_set import run_order, settle_costs
    from debubble.timeline.figures import measure_pipeline
    from debubble.timeline.schedules import state_schedule

    table_path = place_for(by_hand.table, force=by_hand.force)
    if by_hand.log is not None:
        wanted, by_hand = _from_log(wanted, by_hand, by_hand.log)
    schedule = wanted.schedule or _USUAL_SCHEDULE
    order = _order(state_schedule(schedule, wanted.chunks), by_hand.ranks, wanted.microbatches)
    hand_set, in_units = _hand_set(by_hand.costs)
    stages = 1 + max(action.stage for actions in order for action in actions)
    costs = settle_costs(hand_set, stages)
    program, times = run_order(order, costs, Communication.LATENCY)
    timeline = as_timeline(program, times)
    answer = answer_by_hand(
        schedule=schedule,
        order=order,
        communication=Communication.LATENCY,
        costs=costs,
        in_units=in_units,
        figures=measure_pipeline(timeline, 0),
    )
    following = f"debubble simulate {typed_questions()} --timeline"
    if table_path is not None:
        write_file(table_path, write_table(program, times, None).encode())
        following = f"debubble plan {shlex.quote(str(table_path))}"
    page = simulate_page(answer, "" if draws else manners.hint(following))
    if draws:
        frame = frame_step(timeline, 0, None)
        page.drawing = draw_lanes(frame, drawing_width(), units="units" if in_units else "")
    finish(page, answer, manners)


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


def _hand_set(known: Mapping[str, Costs]) -> tuple[dict[str, list[float]], bool]:
    """Return the costs, and whether all of them are plain numbers: else all of them are times."""
    # Nothing is nothing in any unit.
    plain = {is_plain for costs in known.values() for cost, is_plain in costs if cost}
    if len(plain) > 1:
        raise UsageError(
            "some costs are times and some plain numbers", hint="give all a unit, such as 18.5ms"
        )
    if False in plain and "forward" not in known:
        raise UsageError("what does a forward pass take?", hint="give --forward, such as 18.5ms")
    values = {name: [cost for cost, _ in costs] for name, costs in known.items()}
    return values, False not in plain


@click.command(
    "simulate",
    cls=Verb,
    examples=(
        "debubble simulate traces/ --microbatches 16",
        "debubble simulate --stages 4 --microbatches 8 --schedule zb-h1 --forward 5ms",
    ),
)
@click.argument("traces", nargs=-1)
@request_options
@stated_options("--schedule-measured")
@pipeline_option
@by_hand_options
@server_change_options
@output_option(
    "--timeline", "draws", of=(STEPS, BY_HAND), is_flag=True, help="Timeline of the step, as text."
)
@trace_options
@output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    traces: tuple[str, ...],
    request: ChangeRequest,
    stated: Stated,
    pipeline: int | None,
    by_hand: ByHand,
    server: ServerQuestion,
    draws: bool,
    reader: Reader,
    manners: Manners,
) -> None:
    """Predict the run of TRACES with one or more changes.

    Without TRACES: simulate a schedule with given costs, as times (18.5ms) or plain numbers, of
    which only the ratios count.
    """
    if draws:
        manners.refuse_drawing()
    if not traces:
        refuse_others(BY_HAND)
        simulate_by_hand(request, by_hand, manners, draws=draws)
        return
    run = analyse_stated(
        reader,
        traces,
        manners,
        pipeline=pipeline,
        schedule=stated.schedule,
    )
    if run.pipeline.kind == "stream":
        from debubble.report.answers.server_plan import answer_server_simulate
        from debubble.report.plan import server_plan_page

        refuse_others(SERVERS)
        question = replace(
            server, layers=stated.layers, split=request.split, prompts=request.tokens
        )
        with progress("simulating", manners):
            served = answer_server_simulate(run, run.ask_server(question))
        finish(server_plan_page(served), served, manners)
        return
    from debubble.report.answers.simulate import answer_simulate
    from debubble.report.frame import frame_step
    from debubble.report.lanes import draw_lanes
    from debubble.report.simulate import simulate_page

    refuse_others(STEPS)
    with progress("simulating", manners):
        asked = run.what_if(request, stated)
        answer = answer_simulate(run, asked, request)
    page = simulate_page(answer, manners.hint(f"debubble plan {shlex.join(traces)}"))
    if draws:
        page.drawing = draw_lanes(frame_step(asked.draw(), 0, None), drawing_width())
    finish(page, answer, manners)
