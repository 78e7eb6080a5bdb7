"""`debubble demo`: a real pipeline on this machine, profiled and inspected."""

from __future__ import annotations

from pathlib import Path

import click

from debubble.cli.options import exit_strictly, output_options, print_answer, progress
from debubble.demo import Workload, run_workload
from debubble.demo.workload import SCHEDULES
from debubble.report.inspect import inspect_json, inspect_page
from debubble.trace.run import find_run, read_run

WHAT_IT_IS = (
    "real: {ranks} processes, gloo transfers, torch's {schedule} schedule, autograd, the profiler. "
    "timed: each layer sleeps {forward:g} ms forward and {backward:g} ms backward, "
    "so that {ranks} stages behave alike on any machine"
)


@click.command("demo")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("debubble-demo"),
    show_default=True,
    help="Folder for the traces.",
)
@click.option("--force", is_flag=True, help="Replace an earlier run in that folder.")
@click.option(
    "--schedule",
    type=click.Choice([name for name, known in SCHEDULES.items() if known.layout == "single"]),
    default="1f1b",
    show_default=True,
    help="The order of the passes.",
)
@click.option("--microbatches", type=int, default=8, show_default=True)
@output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    out: Path,
    force: bool,
    schedule: str,
    microbatches: int,
    as_json: bool,
    strict: bool,
    color: str,
    quiet: bool,
) -> None:
    """Run a real four-stage pipeline on this machine's CPU, profile two steps, and inspect them."""
    workload = Workload(schedule=schedule, microbatches=microbatches)
    with progress("running the pipeline", quiet=quiet) as show:
        run_workload(workload, out, on_progress=show, force=force)
    run = read_run(find_run([str(out)]))
    page = inspect_page(run, "" if quiet else f"debubble inspect {out}")
    about = WHAT_IT_IS.format(
        ranks=workload.ranks,
        schedule=workload.schedule,
        forward=workload.forward_ms,
        backward=workload.backward_ms,
    )
    page.notes.insert(0, about)
    print_answer(page, inspect_json(run) | {"demo": about}, as_json=as_json, color=color)
    exit_strictly(run.gaps, strict=strict)
