"""`debubble probe`: a model's layers timed on one device, and pipelines of it simulated."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys

import click

from debubble.annexes.probe.pipeline import Pipelines, Setting, Wire, read_probe
from debubble.annexes.probe.report import probe_page
from debubble.cli.options import (
    Manners,
    Verb,
    force_option,
    input_option,
    memory_limit_option,
    output_option,
    place_for,
    plain_output_options,
    print_answer,
    progress,
    question_option,
)
from debubble.errors import MissingExtra, UsageError
from debubble.report.op_table import write_table
from debubble.units import NS_PER_S, parse_duration, parse_rate, write_file

_LOG_TAIL_LINES = 4


def _numbers(text: str, what: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{text!r} is no number of {what}", hint="write it as 4, or 2,4,8")
    return numbers


@click.command(
    "probe",
    cls=Verb,
    examples=(
        "debubble probe model.py:build --tokens 4096,8192 --stages 2,4",
        "debubble probe transformer:layers=16,width=1024,heads=8,vocab=32000 --tokens 2048,4096",
    ),
)
@click.argument("model")
@question_option(
    "--tokens", metavar="N,N", help="Tokens per microbatch: two or more sizes to time."
)
@question_option(
    "--copies", type=click.IntRange(min=1), metavar="N", help="Ranks that share this device."
)
@question_option("--forward-only", is_flag=True, help="Forward passes only (inference).")
@input_option(
    "--bandwidth", type=parse_rate, metavar="RATE", help="Bandwidth of a hop, such as 50GB/s."
)
@input_option(
    "--latency",
    type=parse_duration,
    metavar="TIME",
    help="Latency of a hop, such as 20us, with --bandwidth.",
)
@question_option("--stages", default="4", show_default=True, metavar="N,...", help="Ranks to try.")
@question_option(
    "--microbatches",
    default="8",
    show_default=True,
    metavar="N,...",
    help="Microbatches per batch to try.",
)
@memory_limit_option
@input_option(
    "--optimizer",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="TIMES",
    help="Optimizer state, as a multiple of the weights.",
)
@output_option(
    "--out", default="probe.debubble.json", show_default=True, metavar="FILE", help="File to write."
)
@output_option("--table", metavar="OUT", help="CSV file of a simulated step, for `plan`.")
@force_option
@plain_output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    model: str,
    tokens: str | None,
    copies: int | None,
    forward_only: bool,
    bandwidth: float | None,
    latency: float | None,
    stages: str,
    microbatches: str,
    limit_bytes: int | None,
    optimizer: float,
    out: str,
    table: str | None,
    force: bool,
    manners: Manners,
) -> None:
    """Time the layers of MODEL on one device, and predict pipelines of it without a cluster.

    MODEL is file.py:function or module:function, which returns its modules and a function from
    tokens to a batch; transformer:layers=16,width=1024,heads=8,vocab=32000; or a file that an
    earlier probe wrote.
    """
    ranks, counts = _numbers(stages, "ranks"), _numbers(microbatches, "microbatches")
    if latency is not None and bandwidth is None:
        raise UsageError("a latency alone is no wire", hint="add --bandwidth, such as 50GB/s")
    wire = None
    if bandwidth is not None:
        wire = Wire(bytes_per_s=bandwidth, latency_s=(latency or 0.0) / NS_PER_S)
    written = []
    if model.endswith(".json"):
        if tokens or copies or forward_only:
            raise UsageError(
                f"{model} was timed already: --tokens, --copies, --forward-only come too late"
            )
        file = model
    else:
        file = str(place_for(out, force=force))
        words = ["--tokens", tokens] if tokens else []
        words += ["--copies", str(copies)] if copies else []
        words += ["--forward-only"] * forward_only
        with progress("timing layers", manners):
            _time(model, [*words, "--out", file])
        written.append(file)
    probe = read_probe(file)
    limit = probe.device_bytes if limit_bytes is None else limit_bytes
    pipelines = Pipelines(probe=probe, wire=wire, optimizer_bytes=optimizer, limit_bytes=limit)
    following = f"debubble probe {shlex.quote(file)} --stages {stages} --table step.csv"
    place = place_for(table, force=force)
    if place is not None:
        step = pipelines.simulate(
            Setting(
                stages=ranks[0],
                microbatches=counts[0],
                tokens=probe.sizes[-1],
                schedule="1f1b" if probe.trains else "forward-only",
            )
        )
        write_file(place, write_table(step.program, step.times, step.message_bytes).encode())
        written.append(str(place))
        layers = ",".join(map(str, step.part.split))
        following = f"debubble plan {shlex.quote(str(place))} --layers {layers}"
    with progress("simulating", manners):
        answer = pipelines.answer(ranks, counts, written)
    print_answer(probe_page(answer, manners.hint(following)), answer, manners)


def _time(model: str, words: list[str]) -> None:
    """Run the part that needs torch, in a process of its own."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("timing a model needs torch", hint="pip install 'debubble[torch]'")
    # -P: what lies in the folder of the call is no module of ours.
    command = [sys.executable, "-P", "-m", "debubble.annexes.probe.device", model, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        tail = done.stderr.strip().splitlines()[-_LOG_TAIL_LINES:]
        problem = "\n".join(tail).removeprefix("error: ") or f"exit code {done.returncode}"
        raise UsageError(
            f"the model was not timed: {problem}",
            hint="MODEL returns its modules and a function from tokens to a batch, or is "
            "transformer:layers=16,width=1024,heads=8,vocab=32000",
        )
