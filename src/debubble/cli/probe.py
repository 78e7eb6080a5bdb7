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
from debubble.annexes.probe.pipeline import write_table as table_of
from debubble.cli.options import (
    Manners,
    gathered,
    output_options,
    place_for,
    print_answer,
    progress,
)
from debubble.errors import MissingExtra, UsageError
from debubble.links.live import FEWEST_SAMPLES, is_measured, read_measured, run_here
from debubble.report.answers.probe import answer_probe
from debubble.report.probe import probe_page
from debubble.units import parse_duration, parse_memory, parse_rate, write_file

# What a hop test sends at most where no layer tells what it hands on.
_LEAST_LARGEST = 1 << 20
_LOG_TAIL_LINES = 4


def _device_words(  # noqa: PLR0913 (one argument a flag)
    *,
    tokens: str | None,
    device: str | None,
    copies: int | None,
    threads: int | None,
    samples: int | None,
    forward_only: bool,
) -> list[str]:
    """Write what the part on the device is told."""
    told = {
        "--tokens": tokens,
        "--device": device,
        "--copies": copies,
        "--threads": threads,
        "--samples": samples,
    }
    words = [word for flag, value in told.items() if value for word in (flag, str(value))]
    return [*words, *(["--forward-only"] if forward_only else [])]


_device_options = gathered(
    "device_words",
    _device_words,
    click.option("--tokens", metavar="N,N", help="Of a microbatch: two sizes or more to time."),
    click.option("--device", metavar="NAME", help="cpu, cuda or cuda:1.  [default: as torch has]"),
    click.option("--copies", type=click.IntRange(min=1), metavar="N", help="Ranks on this device."),
    click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Of a rank's CPU."),
    click.option("--samples", type=click.IntRange(min=4), metavar="N", help="Passes of each kind."),
    click.option("--forward-only", is_flag=True, help="Nothing is trained."),
)


def _wire_said(
    *, links: str | None, bandwidth: str | None, latency: str | None
) -> Wire | str | None:
    """Return the wire that was stated, or the file that has it; None: it is to be measured."""
    if latency is not None and bandwidth is None:
        raise UsageError("a latency alone is no wire", hint="add --bandwidth, such as 50GB/s")
    if links is not None and bandwidth is not None:
        raise UsageError("--links and --bandwidth both say what the wire does", hint="leave one")
    if bandwidth is None:
        return links
    return Wire(
        latency_ns=0.0 if latency is None else parse_duration(latency),
        bytes_per_s=parse_rate(bandwidth),
        both_ways=1.0,
        told_by="as stated",
    )


_wire_options = gathered(
    "wire_said",
    _wire_said,
    click.option("--links", metavar="FILE", help="What `debubble links run` measured elsewhere."),
    click.option("--bandwidth", metavar="RATE", help="Of a hop, such as 50GB/s: none is measured."),
    click.option("--latency", metavar="TIME", help="Of a hop, such as 20us, with --bandwidth."),
)


def _numbers(text: str, what: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise UsageError(f"{text!r} is no number of {what}", hint="write it as 4, or 2,4,8")
    return found


@click.command("probe")
@click.argument("model")
@click.option("--layers", type=click.IntRange(min=1), metavar="N", help="Of MODEL transformer.")
@click.option("--width", type=click.IntRange(min=1), metavar="N", help="Of MODEL transformer.")
@click.option("--heads", type=click.IntRange(min=1), metavar="N", help="Of MODEL transformer.")
@click.option("--vocab", type=click.IntRange(min=1), metavar="N", help="Of MODEL transformer.")
@_device_options
@_wire_options
@click.option(
    "--stages", default="4", show_default=True, metavar="N,...", help="Ranks to plan for."
)
@click.option(
    "--microbatches", default="8", show_default=True, metavar="N,...", help="Of a batch, to try."
)
@click.option(
    "--batch-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of a whole batch.  [default: the first --microbatches of the largest size timed]",
)
@click.option("--memory-limit", metavar="SIZE", help="Of each rank, such as 80GiB.")
@click.option(
    "--optimizer",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="TIMES",
    help="Its state, in times of the weights.",
)
@click.option("--out", default="probe.debubble.json", show_default=True, metavar="FILE")
@click.option("--tables", metavar="FOLDER", help="Write a step of each size timed, for `plan`.")
@click.option("--force", is_flag=True, help="Replace files.")
@output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    model: str,
    layers: int | None,
    width: int | None,
    heads: int | None,
    vocab: int | None,
    device_words: list[str],
    wire_said: Wire | str | None,
    stages: str,
    microbatches: str,
    batch_tokens: int | None,
    memory_limit: str | None,
    optimizer: float,
    out: str,
    tables: str | None,
    force: bool,
    manners: Manners,
) -> None:
    """Time the layers of MODEL on one device, and plan pipelines of it before there is a cluster.

    MODEL is file.py:function or module:function, which returns its modules and a function from
    tokens to a batch; transformer, with dimensions; or a file that an earlier probe wrote.
    """
    ranks, counts = _numbers(stages, "ranks"), _numbers(microbatches, "microbatches")
    limit = None if memory_limit is None else float(parse_memory(memory_limit))
    model = _named(model, (layers, width, heads, vocab))
    written = []
    if _is_probe(model):
        if device_words:
            raise UsageError(f"{model} was timed already: {device_words[0]} comes too late")
        data, name = json.loads(Path(model).read_text("utf-8")), model
    else:
        place = place_for(out, force=force)
        with progress("timing layers", quiet=manners.quiet):
            data = _time(model, device_words)
        name = str(place)
    probe = read_probe(data, name)
    wire = wire_said if isinstance(wire_said, Wire) else _wire(wire_said, probe, data, manners)
    if not _is_probe(model):
        write_file(Path(name), (json.dumps(data, indent=1) + "\n").encode())
        written.append(name)
    pipelines = Pipelines(probe=probe, wire=wire, optimizer_bytes=optimizer)
    with progress("simulating", quiet=manners.quiet):
        found = pipelines.compare(ranks, counts, batch_tokens or probe.sizes[-1] * counts[0])
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
    answer = answer_probe(pipelines, found, limit_bytes=limit, written=written)
    print_answer(probe_page(answer, "" if manners.quiet else following), answer, manners)


def _named(model: str, dimensions: tuple[int | None, ...]) -> str:
    """Return the model as the device part takes it: a transformer with its dimensions."""
    if model != "transformer":
        if any(dimension is not None for dimension in dimensions):
            raise UsageError(
                "--layers, --width, --heads and --vocab are of a transformer",
                hint="give MODEL as transformer, or leave them out",
            )
        return model
    missing = [
        flag
        for flag, dimension in zip(
            ("--layers", "--width", "--heads", "--vocab"), dimensions, strict=True
        )
        if dimension is None
    ]
    if missing:
        raise UsageError(f"a transformer without {', '.join(missing)}", hint="give all four")
    return f"transformer:{','.join(map(str, dimensions))}"


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
        found: dict[str, Any] = json.loads(out.read_text("utf-8"))
        return found


def _wire(file: str | None, probe: Probe, data: dict[str, Any], manners: Manners) -> Wire:
    """Return what was measured of links: elsewhere, by an earlier probe, or here and now."""
    if file is not None:
        try:
            found = json.loads(Path(file).read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            found = None
        if not is_measured(found):
            raise UsageError(f"{file} is no hop test", hint="write one with debubble links run")
        data["links"] = found
        return wire_of(read_measured(found, file), f"as measured in {file}")
    if probe.messages:
        return wire_of_messages(probe.messages, "as between two copies, the others at work")
    if probe.links is None:
        largest = max(round(probe.at(probe.sizes[-1]).message_bytes), _LEAST_LARGEST)
        words = ["--largest", str(largest), "--samples", str(FEWEST_SAMPLES), "--force"]
        if probe.device_bytes is None:
            words += ["--backend", "gloo"]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "links.json"
            with progress("measuring a link", quiet=manners.quiet) as show:
                run_here(2, words, out, on_progress=show)
            data["links"] = json.loads(out.read_text("utf-8"))
    return wire_of(
        read_measured(data["links"], probe.file),
        "as between two ranks on this machine",
        of_one_host=True,
    )


def _write_tables(pipelines: Pipelines, usual: Setting, folder: Path, *, force: bool) -> list[str]:
    """Write a step of each size that was timed, all cut alike."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = pipelines.probe.sizes
    places = [place_for(str(folder / f"tokens_{tokens}.csv"), force=force) for tokens in sizes]
    for tokens, place in zip(sizes, places, strict=True):
        wanted = replace(usual, tokens=tokens)
        step = pipelines.steady(pipelines.simulate(wanted)).simulate(wanted)
        table = table_of(step.program, step.times, step.message_bytes)
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
