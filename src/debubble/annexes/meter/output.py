"""Steps and figures of a rank in → op tables on disk, metrics, scalars, a line of the log.

A segment is a folder, as a capture is one: `20260131-235959-step000000040/rank0.csv` holds 20 steps
of rank 0, whole or not at all, and beside it lies what the job says of itself. Every verb reads it.
"""

from __future__ import annotations

import json
import platform
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Any

from debubble import __version__
from debubble.annexes.meter.figures import Figure, Straggler
from debubble.annexes.meter.record import BYTES, END, MICROBATCH, OP, PEER, STAGE, START, Step
from debubble.annexes.meter.settings import CAPTURES, SEGMENT_NAME, Settings
from debubble.capture.files import capture_name
from debubble.capture.labels import Pipeline
from debubble.capture.sidecar import SCHEMA, RankOfJob, describe_environment, describe_memory
from debubble.errors import UsageError
from debubble.units import NS_PER_S, replacing, show_percent, show_share

HEADER = "step,pipeline,stage,microbatch,op,start_ns,duration_ns,rank,bytes,peer,memory_bytes,host"
_PREFIX = "debubble_meter_"
_HELP = {
    "step_seconds": "From the start of one step to the start of the next.",
    "busy_seconds": "Passes of a step.",
    "wait_seconds": "What a step waited for messages of another rank, less their way.",
    "transfer_seconds": "What messages of another rank were on their way while waited for.",
    "hop_seconds": "The quickest message from another rank.",
    "pass_seconds": "One pass of a stage.",
    "bubble_fraction": "1 - busy / (ranks x window), of this rank's pipeline.",
    "peak_memory_bytes": "The most that the device held.",
    "straggler_slower_fraction": "How much longer the rank that drags its pipeline takes.",
    "steps_total": "Steps that were metered.",
    "left_out_total": "Steps that did not fit into the meter's buffers.",
    "captures_total": "Captures that the meter has had taken.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Some steps of a rank, ready to be written."""

    name: str
    table: str
    sidecar: str


class Table:
    """Collects rows of steps, and hands them out a segment at a time."""

    def __init__(self, settings: Settings, job: RankOfJob, pipeline: Pipeline) -> None:
        self.settings = settings
        self.job = job
        self.pipeline = pipeline
        self._lines: list[str] = []
        self._lengths: list[float] = []
        self._first = -1
        self._host = platform.node()

    def add(self, step: Step, pipeline: int, memory_bytes: int) -> Segment | None:
        """Add a step; return the segment before it, if that is complete now."""
        size = self.settings.segment
        done = None
        if self._lines and step.number // size != self._first // size:
            done = self.close()
        if not self._lines:
            self._first = step.number
        number, rank, host = step.number, self.job.rank, self._host if not self._lines else ""
        for row in step.rows:
            start = row[START]
            self._lines.append(
                f"{number},{pipeline},{row[STAGE]},{row[MICROBATCH]},{row[OP]},{start},"
                f"{row[END] - start},{rank},{row[BYTES]},{row[PEER]},{memory_bytes},{host}"
            )
            host = ""
        self._lengths.append((step.end_ns - step.start_ns) / NS_PER_S)
        return done

    def close(self) -> Segment | None:
        """Return what there is, and begin anew."""
        if not self._lines:
            return None
        first = self._first - self._first % self.settings.segment
        name = capture_name(self.job.started, first)
        segment = Segment(
            name=name,
            table="\n".join((HEADER, *self._lines, "")),
            sidecar=json.dumps(self._describe(name), indent=2) + "\n",
        )
        self._lines, self._lengths = [], []
        return segment

    @cached_property
    def _environment(self) -> dict[str, Any]:
        return describe_environment()

    def _describe(self, name: str) -> dict[str, Any]:
        """Say of the job what a capture's sidecar says; the meter itself slows no step."""
        return {
            "schema": SCHEMA,
            "debubble": __version__,
            "capture": name,
            "trace": f"rank{self.job.rank}.csv",
            "rank": self.job.rank,
            "world_size": self.job.world_size,
            "first_step": self._first,
            "written_unix_s": time.time(),
            "pipeline": self.pipeline.describe(self.settings.split),
            "workload": {"tokens": self.settings.tokens},
            "steps": {"after_s": self._lengths, "unprofiled_median_s": median(self._lengths)},
            "memory": describe_memory(),
            "environment": self._environment,
            "tags": {},
        }


def write_segment(out: Path, rank: int, segment: Segment, keep: int) -> None:
    """Write a segment so that nobody sees half of it, and remove this rank's oldest.

    Those of steps that were captured stay as long as the capture does: held against it, they tell
    what lies inside passes.
    """
    folder = out / segment.name
    table = folder / f"rank{rank}.csv"
    for file, text in (
        (table.with_name(f"{table.name}.debubble.json"), segment.sidecar),
        (table, segment.table),
    ):
        with replacing(file, sync=False) as partial:
            partial.write_text(text, "utf-8")
    mine = sorted(
        path
        for path in out.glob(f"*/rank{rank}.csv")
        if SEGMENT_NAME.match(path.parent.name) and not path.parent.is_symlink()
    )
    names = [path.parent.name for path in mine]
    captured = {
        names[bisect_right(names, capture.name) - 1] for capture in (out / CAPTURES).glob("*-step*")
    }
    for old in mine[:-keep]:
        if old.parent == folder or old.parent.name in captured:
            continue
        old.unlink(missing_ok=True)
        old.with_name(f"{old.name}.debubble.json").unlink(missing_ok=True)
        with suppress(OSError):  # other ranks' files are still there
            old.parent.rmdir()


def show_metrics(figures: Iterable[Figure], labels: Mapping[str, str]) -> str:
    """Write figures in the text format of Prometheus."""
    lines: dict[str, list[str]] = {}
    for name, own, value in figures:
        told = ",".join(f'{key}="{one}"' for key, one in {**labels, **own}.items())
        lines.setdefault(name, []).append(f"{_PREFIX}{name}{{{told}}} {value!r}")
    text = []
    for name, found in lines.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        text += [f"# HELP {_PREFIX}{name} {_HELP[name]}", f"# TYPE {_PREFIX}{name} {kind}", *found]
    return "\n".join(text) + "\n"


def write_metrics(out: Path, rank: int, text: str) -> None:
    """Put metrics where a collector of text files finds them, whole."""
    file = out / f"rank{rank}.prom"
    with replacing(file, sync=False) as partial:
        partial.write_text(text, "utf-8")


def show_line(
    first: int,
    last: int,
    bubble: float | None,
    figures: Iterable[Figure],
    straggler: Straggler | None,
) -> str:
    """Say in a line how the pipeline did."""
    values = {name: value for name, labels, value in figures if not labels}
    waits = [(value, labels) for name, labels, value in figures if name == "wait_seconds"]
    said = [f"steps {first} to {last}: {values.get('step_seconds', 0) * 1e3:.4g} ms a step"]
    if bubble is not None:
        said.append(f"bubble {show_share(bubble)}")
    if waits and max(waits, key=lambda one: one[0])[0] > 0:
        value, whom = max(waits, key=lambda one: one[0])
        said.append(f"this rank waits most for rank {whom['for_rank']}, {value * 1e3:.4g} ms")
    if straggler is not None:
        by = show_percent(straggler.slower_by)
        how = "has more to do than the others, by" if straggler.always else "got slower, by"
        said.append(f"rank {straggler.rank} {how} {by} (step {straggler.since_step})")
    return ", ".join(said)


def scalars_of(figures: Iterable[Figure]) -> dict[str, float]:
    """Name figures as loggers do: `debubble/wait_seconds/for_rank0`."""
    return {
        "/".join(("debubble", name, *(f"{key}{one}" for key, one in labels.items()))): value
        for name, labels, value in figures
    }


def scalar_logger(logger: Any) -> Callable[[dict[str, float], int], None]:
    """Return how to hand scalars to whatever logger a job has.

    A function of values and step; a TensorBoard writer (`add_scalar`); MLflow's module or client,
    or Lightning's logger (`log_metrics`); a Weights & Biases run or module (`log`), whose own steps
    are left alone.
    """
    if hasattr(logger, "add_scalar"):

        def to_tensorboard(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                logger.add_scalar(name, value, step)

        return to_tensorboard
    if hasattr(logger, "log_metrics"):
        return lambda values, step: logger.log_metrics(values, step=step)
    if hasattr(logger, "log"):
        commits = "commit" in signature(logger.log).parameters
        more = {"commit": False} if commits else {}
        return lambda values, step: logger.log({**values, "debubble/step": step}, **more)
    if callable(logger):
        return logger  # type: ignore[no-any-return]
    raise UsageError(
        f"{type(logger).__name__} takes no scalars",
        hint="give a TensorBoard writer, a W&B run, MLflow, or a function of values and step",
    )
