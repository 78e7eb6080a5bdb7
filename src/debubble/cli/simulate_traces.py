"""`debubble simulate TRACES`: a measured run, with one thing changed or several."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

import click

from debubble.answers.change import Tokens
from debubble.answers.simulate import Request, answer_simulate, ask_run
from debubble.cli.flags import gathered
from debubble.cli.options import (
    Manners,
    drawing_width,
    exit_strictly,
    print_answer,
    progress,
    typed,
)
from debubble.cli.planning import Traces, analyse_both, parse_layers, token_options
from debubble.plan.change import Hold
from debubble.report.lanes import draw_lanes
from debubble.report.simulate import simulate_page
from debubble.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
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
    memory_limit: str | None

    def read(self) -> Request:
        """Return what is asked for."""
        limit = self.memory_limit
        return Request(
            microbatches=self.microbatches,
            hold=self.hold,
            schedule=self.schedule,
            chunks=self.chunks,
            split=parse_layers(self.split),
            overlap=None if self.overlap is None else self.overlap == "on",
            recompute=None if self.recompute is None else self.recompute == "on",
            hops=self.hops,
            tokens=self.tokens,
            layers=parse_layers(self.layers),
            schedule_measured=self.schedule_measured,
            memory_limit_bytes=None if limit is None else float(parse_bytes(limit)),
        )


what_if_options = gathered(
    "said",
    Said,
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
    click.option("--memory-limit", metavar="SIZE", help="Of each rank, such as 80GiB."),
)


def simulate_traces(files: Traces, said: Said, manners: Manners, *, draws: bool) -> None:
    """Measure the run, change it, and say what it would take."""
    said.tokens.check(has_also=files.also is not None)
    request = said.read()
    run, also = analyse_both(files, said.schedule_measured, quiet=manners.quiet)
    with progress("simulating", quiet=manners.quiet):
        asked = ask_run(run, request, also)
        answer = answer_simulate(run, request, also, asked)
    following = ""
    if not manners.quiet and not draws:
        flags = typed(flags_of(files, said) | {"--hop": None, "--rank": None})
        hops = "".join(f" --hop {shlex.quote(hop)}" for hop in said.hops)
        words = f"{shlex.join(files.words)}{' ' if flags else ''}{flags}{hops}"
        following = f"debubble simulate {words} --timeline"
    page = simulate_page(answer, following)
    if draws:
        page.drawing = draw_lanes(asked.draw(), 0, None, drawing_width())
    print_answer(page, answer, manners)
    exit_strictly(answer.warnings, manners)


def flags_of(files: Traces, said: Said) -> dict[str, object]:
    """Return by flag what was said of a measured run and of its change."""
    return {
        "--microbatches": said.microbatches,
        "--hold": said.hold,
        "--schedule": said.schedule,
        "--chunks": said.chunks,
        "--split": said.split,
        "--overlap": said.overlap,
        "--hop": said.hops or None,
        "--tokens": said.tokens.asked,
        "--tokens-measured": said.tokens.measured,
        "--also": files.also,
        "--also-tokens": said.tokens.also,
        "--recompute": said.recompute,
        "--layers": said.layers,
        "--schedule-measured": said.schedule_measured,
        "--memory-limit": said.memory_limit,
        "--pipeline": files.pipeline,
        "--capture": files.reader.capture,
        "--rank": files.reader.rank,
    }
