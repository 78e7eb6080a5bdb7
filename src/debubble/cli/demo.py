"""`debubble demo`: the whole loop on a real pipeline of this machine."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import click

from debubble.annexes.demo.workload import (
    BEFORE,
    MOST_MICROBATCHES,
    SCHEDULES,
    STEPS,
    WAIT,
    Workload,
    job_words,
)
from debubble.annexes.tune.report import demo_json, demo_page
from debubble.annexes.tune.run import (
    Bench,
    Improvement,
    Setting,
    Template,
    clear_trial,
    improve_once,
)
from debubble.cli.options import (
    Manners,
    Verb,
    exit_strictly,
    force_option,
    output_option,
    output_options,
    print_answer,
    question_option,
)
from debubble.errors import MissingExtra, UsageError

# Nobody looks on for longer.
WITHIN_S = 55.0
WHAT_IT_IS = (
    "real: {ranks} processes, gloo transfers, torch's {schedule} schedule, autograd, the profiler. "
    "timed: each layer sleeps {forward:g} ms forward and {backward:g} ms backward, "
    "so that {ranks} stages behave alike on any machine"
)


@click.command("demo", cls=Verb, examples=("debubble demo", "debubble demo --schedule gpipe"))
@output_option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("debubble-demo"),
    show_default=True,
    help="Folder for the traces.",
)
@force_option
@question_option(
    "--schedule",
    type=click.Choice([name for name, known in SCHEDULES.items() if known.layout == "single"]),
    default=BEFORE.schedule,
    show_default=True,
    help="Order of the passes.",
)
@question_option(
    "--microbatches",
    type=int,
    default=BEFORE.microbatches,
    show_default=True,
    help="Microbatches per step before the change.",
)
@output_options
def command(
    *,
    out: Path,
    force: bool,
    schedule: str,
    microbatches: int,
    manners: Manners,
) -> None:
    """Capture a real four-stage pipeline on this machine's CPU, improve it, and prove it."""
    workload = replace(BEFORE, schedule=schedule, microbatches=microbatches)
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra(
            "the demo runs a real pipeline, which needs torch", hint="pip install 'debubble[torch]'"
        )
    _prepare(out, force=force)
    words = job_words(workload)
    now = Setting(split=workload.layers, microbatches=microbatches)
    # -P: a folder called torch where the user stands must not be taken for torch.
    template = Template(words=(sys.executable, "-P", *words), now=now)
    bench = Bench(template=template, steps=STEPS, wait=WAIT, folder=out)
    made = improve_once(
        bench,
        most_microbatches=MOST_MICROBATCHES,
        seconds=WITHIN_S,
        on_step=manners.say,
    )
    about = what_it_is(workload)
    commands = _commands(Template(words=("python", *words), now=now), made, out)
    page = demo_page(made, about, out, commands)
    page.next_command = manners.hint(f"debubble find {shlex.quote(str(out / 'before'))}")
    print_answer(page, demo_json(made, about, out, commands), manners)
    exit_strictly(
        (*made.before.measured_warnings, *made.after.measured_warnings, *made.gaps), manners
    )


def what_it_is(workload: Workload) -> str:
    """Say what is real in it."""
    return WHAT_IT_IS.format(
        ranks=workload.ranks,
        schedule=workload.schedule,
        forward=workload.forward_ms,
        backward=workload.backward_ms,
    )


def _prepare(out: Path, *, force: bool) -> None:
    """Take an empty folder; with `force`, clear it of what an earlier demo wrote, by its names."""
    if not force and out.exists() and any(out.iterdir()):
        raise UsageError(
            f"{out} is not empty", hint="give another folder, or --force to replace an earlier run"
        )
    for name in ("before", "after"):
        clear_trial(out / name)


def _commands(template: Template, made: Improvement, out: Path) -> list[str]:
    """Write what was done as one would type it."""
    before, after = (shlex.quote(str(out / name)) for name in ("before", "after"))

    def captured(setting: Setting, folder: str) -> str:
        words = shlex.join(template.fill(setting))
        return f"debubble capture --wait {WAIT} --steps {STEPS} --out {folder} -- {words}"

    return [
        captured(template.now, before),
        f"debubble find {before}",
        f"debubble plan {before} --max-microbatches {MOST_MICROBATCHES}",
        captured(made.setting, after),
        f"debubble compare {before} {after}",
    ]
