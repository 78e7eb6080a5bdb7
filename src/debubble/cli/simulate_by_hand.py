"""`debubble simulate` without traces: a schedule, run with costs of one's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import click

from debubble.answers.simulate import answer_by_hand
from debubble.cli.flags import gathered
from debubble.cli.options import Manners, drawing_width, print_answer, typed
from debubble.errors import UsageError
from debubble.report.lanes import draw_lanes
from debubble.report.simulate import simulate_page
from debubble.schedules import Order, Statement, state_schedule
from debubble.simulate.communication import Communication
from debubble.simulate.hand_set import UNIT_NS, HandSet, settle_costs, simulate_order
from debubble.timeline.figures import measure_pipeline
from debubble.units import PLAIN_NUMBER, counted, parse_duration

# A step of 512 ranks with 64 microbatches has 65,536 passes; beyond this somebody mistyped.
MOST_PASSES = 200_000
# Each rank is measured over all passes; no pipeline is as long, and these take half a minute.
MOST_RANKS = 2_048

_PLAIN = re.compile(PLAIN_NUMBER)
_USUAL_SCHEDULE = "1f1b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The order that was typed; None where nothing was."""

    microbatches: int | None
    schedule: str | None
    chunks: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """What was typed in place of a measured run; None where nothing was."""

    ranks: int | None
    forward: str | None
    backward: str | None
    input_grad: str | None
    weight_grad: str | None
    transfer: str | None
    communication: str | None

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

    @property
    def flags(self) -> dict[str, object]:
        """All of it by flag."""
        return {
            "--stages": self.ranks,
            **self.costs,
            "--communication": self.communication,
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
        "--communication",
        type=click.Choice([str(one) for one in Communication]),
        help="How messages are posted and waited for.  [default: latency]",
    ),
)


def simulate_by_hand(wanted: Wanted, by_hand: ByHand, manners: Manners, *, draws: bool) -> None:
    """Run a schedule, and measure the bubble as `find` does."""
    schedule = wanted.schedule or _USUAL_SCHEDULE
    order = _order(state_schedule(schedule, wanted.chunks), by_hand.ranks, wanted.microbatches)
    hand_set, in_units = _hand_set(by_hand.costs)
    stages = 1 + max(action.stage for actions in order for action in actions)
    costs = settle_costs(hand_set, stages)
    way = Communication(by_hand.communication or Communication.LATENCY)
    timeline = simulate_order(order, costs, way)
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
    page = simulate_page(answer, "" if quiet else f"debubble simulate {again} --timeline")
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
            hint=f"there may be {MOST_RANKS:,} ranks, and ranks x chunks x microbatches may be "
            f"{MOST_PASSES:,}",
        )
    return statement.order_for(ranks, microbatches, chunks)


def _hand_set(said: Mapping[str, str | None]) -> tuple[HandSet, bool]:
    """Read the costs, all of them times or all of them plain numbers."""
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
    given = {
        flag.removeprefix("--").replace("-", "_"): [number for number, _ in values]
        for flag, values in read.items()
    }
    return HandSet(**given), False not in plain


def _read(text: str) -> tuple[float, bool]:
    """Return nanoseconds, and whether it was a plain number."""
    if _PLAIN.fullmatch(text.strip()):
        return float(text) * UNIT_NS, True
    return parse_duration(text), False
