"""`debubble demo`: the whole loop on a real pipeline of this machine."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import click

from debubble.annexes.demo.improve import improve_once
from debubble.annexes.demo.report import answer_demo, demo_page
from debubble.annexes.demo.workload import BEFORE, MOST_MICROBATCHES, STEPS, WAIT, job_words
from debubble.annexes.tune.journal import clear_run
from debubble.annexes.tune.setting import Setting, Template
from debubble.annexes.tune.task import Budget, Scope, Task
from debubble.cli.options import (
    Manners,
    Verb,
    force_option,
    output_option,
    plain_output_options,
    print_answer,
)
from debubble.errors import MissingExtra, UsageError

WHAT_IT_IS = (
    f"real: {BEFORE.ranks} processes, gloo transfers, torch's {BEFORE.schedule} schedule, "
    "autograd, the profiler. "
    f"timed: each layer sleeps {BEFORE.forward_ms:g} ms forward and {BEFORE.backward_ms:g} ms "
    f"backward, so that {BEFORE.ranks} stages behave alike on any machine"
)


@click.command("demo", cls=Verb, examples=("debubble demo",))
@output_option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("debubble-demo"),
    show_default=True,
    help="Folder for the traces.",
)
@force_option
@plain_output_options
def command(*, out: Path, force: bool, manners: Manners) -> None:
    """Capture a real four-stage pipeline on this machine's CPU, improve it, and prove it."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra(
            "the demo runs a real pipeline, which needs torch", hint="pip install 'debubble[torch]'"
        )
    prepare_folder(out, force=force)
    # -P: a folder called torch where the user stands must not be taken for torch.
    template = Template(
        words=(sys.executable, "-P", *job_words(BEFORE)),
        now=Setting(split=BEFORE.layers, microbatches=BEFORE.microbatches),
    )
    task = Task(
        template=template,
        steps=STEPS,
        wait=WAIT,
        folder=out,
        budget=Budget(runs=2),
        scope=Scope(most_microbatches=MOST_MICROBATCHES),
    )
    made = improve_once(task, manners.say)
    before, after = (shlex.quote(str(out / name)) for name in ("before", "after"))
    typed = replace(template, words=("python", *template.words[2:]))
    first, second = (shlex.join(typed.fill(setting)) for setting in (template.now, made.setting))
    commands = [
        f"debubble capture --wait {WAIT} --steps {STEPS} --out {before} -- {first}",
        f"debubble find {before}",
        f"debubble plan {before} --max-microbatches {MOST_MICROBATCHES}",
        f"debubble capture --wait {WAIT} --steps {STEPS} --out {after} -- {second}",
        f"debubble compare {before} {after}",
    ]
    answer = answer_demo(made, WHAT_IT_IS, out, commands)
    print_answer(demo_page(made, answer, manners.hint(f"debubble find {before}")), answer, manners)


def prepare_folder(out: Path, *, force: bool) -> None:
    """Take an empty folder; with `force`, clear it of what an earlier demo wrote, by its names."""
    if not force and out.exists() and any(out.iterdir()):
        raise UsageError(
            f"{out} is not empty", hint="give another folder, or --force to replace an earlier run"
        )
    for name in ("before", "after"):
        clear_run(out / name)
