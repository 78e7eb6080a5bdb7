"""A simulated run in → what `debubble simulate` prints out, as text or JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from debubble.report.text import Page, Table
from debubble.schedules import SCHEDULES, Order
from debubble.simulate.communication import Communication
from debubble.simulate.hand_set import UNIT_NS, GivenCosts, mean_lengths
from debubble.simulate.theory import bubble_fraction, ideal_bubble
from debubble.timeline.figures import PipelineFigures, RankShares
from debubble.units import NS_PER_S, counted, show_duration, show_share

SCHEMA = "debubble.simulate/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What was asked, and what came out."""

    schedule: str
    """As the user wrote it: a name, or a file."""
    order: Order
    communication: Communication
    costs: GivenCosts
    in_units: bool
    """Costs are plain numbers, not times."""
    figures: PipelineFigures

    @property
    def microbatches(self) -> int:
        """How many a step has."""
        return 1 + max(action.microbatch for actions in self.order for action in actions)

    @property
    def stages(self) -> int:
        """How many the model is cut into."""
        return 1 + max(action.stage for actions in self.order for action in actions)

    @property
    def window_ns(self) -> int:
        """The batch latency."""
        return self.figures.windows[0].length_ns

    def theory(self) -> float | None:
        """Return the formula's bubble; it is for one stage a rank."""
        single = self.stages == len(self.order)
        return bubble_fraction(len(self.order), self.microbatches) if single else None

    def theory_of_schedule(self) -> float:
        """Return the bubble of this order with equal stages and free transfers."""
        return ideal_bubble(self.order, mean_lengths(self.costs.passes))


def simulate_page(run: Simulated, next_command: str) -> Page:
    """Lay out the answer: the bubble, against theory, then the ranks."""
    page = Page(answer=_answer(run))
    page.tables = [_rank_table(run)]
    page.notes = [_about(run)]
    page.next_command = next_command
    return page


def simulate_json(run: Simulated) -> dict[str, Any]:
    """Return the same as data."""
    one = run.figures
    seconds = None if run.in_units else run.window_ns / NS_PER_S
    scale = UNIT_NS if run.in_units else NS_PER_S
    kinds = sorted({action.kind for actions in run.order for action in actions})
    passes = {kind.name: of_stage / scale for kind, of_stage in run.costs.passes.items()}
    transfer = run.costs.one_way
    return {
        "schema": SCHEMA,
        "given": {
            "schedule": run.schedule,
            "ranks": len(run.order),
            "stages": run.stages,
            "chunks": max(len(rank.stages) for rank in one.ranks),
            "microbatches": run.microbatches,
            "communication": str(run.communication),
            "unit": "1" if run.in_units else "s",
            "passes": {kind: passes[kind].tolist() for kind in kinds},
            "transfer": [] if isinstance(transfer, int) else (transfer / scale).tolist(),
        },
        "numbers": {
            "bubble_fraction": one.bubble_fraction,
            "batch_latency_s": seconds,
            "batch_latency_units": run.window_ns / UNIT_NS if run.in_units else None,
            "step_time_s": None,
            "peak_memory_bytes": None,
            "microbatches_per_s": run.microbatches / seconds if seconds else None,
            "tokens_per_s": None,
        },
        "interval": None,
        "theory": {
            "bubble_fraction": run.theory(),
            "schedule_bubble_fraction": run.theory_of_schedule(),
        },
        "longest_stage_bubble": one.longest_stage_bubble,
        "bubble_over_ideal": one.bubble_over_ideal,
        "ranks": [
            {"rank": shares.rank, "bubble_fraction": shares.bubble_fraction}
            for shares in one.shares
        ],
        "verdict": _answer(run),
        "warnings": [],
    }


def _answer(run: Simulated) -> str:
    sentence = f"Ranks wait {show_share(run.figures.bubble_fraction)} of the batch"
    formula = run.theory()
    if formula is not None:
        ranks = counted(len(run.order), "rank")
        microbatches = counted(run.microbatches, "microbatch", "microbatches")
        return f"{sentence} (theory for {ranks}, {microbatches}: {show_share(formula)})."
    alike = show_share(run.theory_of_schedule())
    named = run.schedule if run.schedule in SCHEDULES else "this order"
    return f"{sentence} ({named} with equal stages and free transfers: {alike})."


def _about(run: Simulated) -> str:
    one = run.figures
    parts = [
        run.schedule,
        f"batch latency {_length(run, run.window_ns)}",
        f"against the longest rank {show_share(one.longest_stage_bubble)}",
        f"bubble over ideal {show_share(one.bubble_over_ideal)}",
    ]
    return "; ".join(parts)


def _rank_table(run: Simulated) -> Table:
    table = Table(columns=("rank", "stage", "computes", "waits", "bubble"))
    for rank, shares in zip(run.figures.ranks, run.figures.shares, strict=True):
        busy = round(_computes(shares) * run.window_ns)
        table.rows.append(
            (
                str(rank.rank),
                " ".join(map(str, rank.stages)),
                _length(run, busy),
                _length(run, run.window_ns - busy),
                show_share(shares.bubble_fraction),
            )
        )
    return table


def _computes(shares: RankShares) -> float:
    return 1 - (shares.bubble_fraction or 0.0)


def _length(run: Simulated, nanoseconds: int) -> str:
    if not run.in_units:
        return show_duration(nanoseconds)
    return f"{nanoseconds / UNIT_NS:.4g} units"
