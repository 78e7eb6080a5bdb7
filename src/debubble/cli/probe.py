"""`debubble probe`: a model's layers timed on one device, and pipelines of it simulated."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from debubble.annexes.probe.answers import answer_probe
from debubble.annexes.probe.pipeline import (
    SCHEMA,
    Pipelines,
    Probe,
    Setting,
    Wire,
    read_probe,
    wire_of,
    wire_of_messages,
)
from debubble.annexes.probe.report import probe_page
from debubble.cli.options import (
    Manners,
    Verb,
    force_option,
    gathered,
    input_option,
    memory_limit_option,
    output_option,
    output_options,
    place_for,
    print_answer,
    progress,
    question_option,
)
from debubble.errors import MissingExtra, UsageError
from debubble.links.live import is_measured, read_measured, run_here
from debubble.report.op_table import write_table
from debubble.units import parse_duration, parse_rate, write_file

# What a hop test sends at most where no layer tells what it hands on.
_LEAST_LARGEST = 1 << 20
_LOG_TAIL_LINES = 4
_DIMENSIONS = ("layers", "width", "heads", "vocab")


def _device_words(*, tokens: str | None, copies: int | None, forward_only: bool) -> list[str]:
    """Write what the part on the device is told."""
    words = ["--tokens", tokens] if tokens else []
    words += ["--copies", str(copies)] if copies else []
    return [*words, *(["--forward-only"] if forward_only else [])]


_device_options = gathered(
    "device_words",
    _device_words,
    question_option(
        "--tokens", metavar="N,N", help="Tokens per microbatch: two or more sizes to time."
    ),
    question_option(
        "--copies", type=click.IntRange(min=1), metavar="N", help="Ranks that share this device."
    ),
    question_option("--forward-only", is_flag=True, help="Forward passes only (inference)."),
)


def _stated_wire(
    *, links: str | None, bandwidth: float | None, latency: float | None
) -> Wire | str | None:
    """Return the wire that was stated, or the file that has it; None: it is to be measured."""
    if latency is not None and bandwidth is None:
        raise UsageError("a latency alone is no wire", hint="add --bandwidth, such as 50GB/s")
    if links is not None and bandwidth is not None:
        raise UsageError("--links and --bandwidth both say what the wire does", hint="leave one")
    if bandwidth is None:
        return links
    return Wire(
        latency_ns=latency or 0.0,
        bytes_per_s=bandwidth,
        both_ways=1.0,
        told_by="as stated",
    )


_wire_options = gathered(
    "stated_wire",
    _stated_wire,
    input_option(
        "--links", metavar="FILE", help="Hop test of `debubble links run`, made elsewhere."
    ),
    input_option(
        "--bandwidth",
        type=parse_rate,
        metavar="RATE",
        help="Bandwidth of a hop, such as 50GB/s, instead of measuring it.",
    ),
    input_option(
        "--latency",
        type=parse_duration,
        metavar="TIME",
        help="Latency of a hop, such as 20us, with --bandwidth.",
    ),
)


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
@_device_options
@_wire_options
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
@output_option(
    "--tables", metavar="FOLDER", help="Folder for tables of a step of each size, for `plan`."
)
@force_option
@output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    model: str,
    device_words: list[str],
    stated_wire: Wire | str | None,
    stages: str,
    microbatches: str,
    limit_bytes: int | None,
    optimizer: float,
    out: str,
    tables: str | None,
    force: bool,
    manners: Manners,
) -> None:
    """Time the layers of MODEL on one device, and predict pipelines of it without a cluster.

    MODEL is file.py:function or module:function, which returns its modules and a function from
    tokens to a batch; transformer:layers=16,width=1024,heads=8,vocab=32000; or a file that an
    earlier probe wrote.
    """
    ranks, counts = _numbers(stages, "ranks"), _numbers(microbatches, "microbatches")
    model = _read_model(model)
    written = []
    if _is_probe(model):
        if device_words:
            raise UsageError(f"{model} was timed already: {device_words[0]} comes too late")
        data, name = json.loads(Path(model).read_text("utf-8")), model
    else:
        place = place_for(out, force=force)
        with progress("timing layers", manners):
            data = _time(model, device_words)
        name = str(place)
    probe = read_probe(data, name)
    wire = (
        stated_wire if isinstance(stated_wire, Wire) else _wire(stated_wire, probe, data, manners)
    )
    if not _is_probe(model):
        write_file(Path(name), (json.dumps(data, indent=1) + "\n").encode())
        written.append(name)
    pipelines = Pipelines(probe=probe, wire=wire, optimizer_bytes=optimizer)
    with progress("simulating", manners):
        numbers = pipelines.compare(ranks, counts, probe.sizes[-1] * counts[0])
    following = f"debubble probe {shlex.quote(name)} --stages {stages} --tables steps"
    if tables is not None:
        schedule = "1f1b" if probe.trains else "forward-only"
        usual = Setting(
            stages=ranks[0], microbatches=counts[0], tokens=probe.sizes[-1], schedule=schedule
        )
        usual = replace(usual, split=pipelines.simulate(usual).split)
        files = _write_tables(pipelines, usual, Path(tables), force=force)
        written += files
        split = ",".join(map(str, usual.split or ()))
        following = f"debubble plan {files[-1]} --also {files[0]} --layers {split}"
    limit = None if limit_bytes is None else float(limit_bytes)
    answer = answer_probe(pipelines, numbers, limit_bytes=limit, written=written)
    print_answer(probe_page(answer, manners.hint(following)), answer, manners)


def _read_model(model: str) -> str:
    """Return the model as the device part takes it: a transformer by its dimensions in order."""
    name, _, text = model.partition(":")
    if name != "transformer":
        return model
    sizes = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    if set(sizes) != set(_DIMENSIONS) or not all(size.isdigit() for size in sizes.values()):
        raise UsageError(
            f"{model!r} is no transformer",
            hint="write it as transformer:layers=16,width=1024,heads=8,vocab=32000",
        )
    return f"transformer:{','.join(sizes[dimension] for dimension in _DIMENSIONS)}"


def _time(model: str, words: list[str]) -> dict[str, Any]:
    """Run the part that needs torch, in a process of its own."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("timing a model needs torch", hint="pip install 'debubble[torch]'")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "probe.json"
        # -P: what lies in the folder of the call is no module of ours.
        command = [sys.executable, "-P", "-m", "debubble.annexes.probe.device", model]
        command += ["--out", str(out), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            tail = done.stderr.strip().splitlines()[-_LOG_TAIL_LINES:]
            said = "\n".join(tail).removeprefix("error: ") or f"exit code {done.returncode}"
            raise UsageError(
                f"the model was not timed: {said}",
                hint="MODEL returns its modules and a function from tokens to a batch",
            )
        numbers: dict[str, Any] = json.loads(out.read_text("utf-8"))
        return numbers


def _wire(file: str | None, probe: Probe, data: dict[str, Any], manners: Manners) -> Wire:
    """Return what was measured of links: elsewhere, by an earlier probe, or here and now."""
    if file is not None:
        try:
            numbers = json.loads(Path(file).read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            numbers = None
        if not is_measured(numbers):
            raise UsageError(f"{file} is no hop test", hint="write one with debubble links run")
        data["links"] = numbers
        return wire_of(read_measured(numbers, file), f"as measured in {file}")
    if probe.messages:
        return wire_of_messages(probe.messages, "as between two copies, the others at work")
    if probe.links is None:
        largest = max(round(probe.at(probe.sizes[-1]).message_bytes), _LEAST_LARGEST)
        words = ["--largest", str(largest), "--force"]
        if probe.device_bytes is None:
            words += ["--backend", "gloo"]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "links.json"
            with progress("measuring a link", manners) as show:
                run_here(2, words, out, on_progress=show)
            data["links"] = json.loads(out.read_text("utf-8"))
    return wire_of(
        read_measured(data["links"], probe.file),
        "as between two ranks on this machine",
    )


def _write_tables(pipelines: Pipelines, usual: Setting, folder: Path, *, force: bool) -> list[str]:
    """Write a step of each size that was timed, all cut alike."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = pipelines.probe.sizes
    places = [place_for(str(folder / f"tokens_{tokens}.csv"), force=force) for tokens in sizes]
    for tokens, place in zip(sizes, places, strict=True):
        wanted = replace(usual, tokens=tokens)
        step = pipelines.steady(pipelines.simulate(wanted)).simulate(wanted)
        table = write_table(step.program, step.times, step.message_bytes)
        write_file(Path(str(place)), table.encode())
    return list(map(str, places))


def _is_probe(path: str) -> bool:
    """Tell whether a file holds a probe."""
    place = Path(path)
    if not place.is_file() or place.suffix != ".json":
        return False
    try:
        data = json.loads(place.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("schema") == SCHEMA
