"""Steps and figures of a rank in → op tables on disk, metrics, scalars, a line of the log.

A segment is a folder, as a capture is one: `20260131-235959-step000000040/rank0.csv` holds 20 steps
of rank 0, whole or not at all, and beside it lies what the job says of itself. Every verb reads it.
"""

from __future__ import annotations

import platform
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path

from debubble.annexes.meter.figures import Figure, Straggler
from debubble.annexes.meter.record import BYTES, END, MICROBATCH, OP, PEER, STAGE, START, Step
from debubble.annexes.meter.settings import CAPTURES, Settings
from debubble.capture.files import capture_name, keep_newest, list_captures
from debubble.capture.labels import Pipeline
from debubble.capture.sidecar import RankOfJob, describe_job
from debubble.units import NS_PER_S, replacing, show_percent, show_share

HEADER = "step,pipeline,stage,microbatch,op,start_ns,duration_ns,rank,bytes,peer,memory_bytes,host"
_PREFIX = "debubble_meter_"
_HELP = {
    "step_seconds": "From the start of one step to the start of the next.",
    "busy_seconds": "Passes of a step.",
    "wait_seconds": "What a step waited for messages of another rank.",
    "pass_seconds": "One pass of a stage.",
    "bubble_fraction": "1 - busy / (ranks x window), of this rank's pipeline.",
    "peak_memory_bytes": "The most that the device held.",
    "straggler_slower_fraction": "How much longer the rank that drags its pipeline takes.",
    "steps_total": "Steps that were metered.",
    "left_out_total": "Steps that did not fit into the meter's buffers.",
    "captures_total": "Captures that the meter has had taken.",
}


class Table:
    """Collects rows of steps, and writes them a segment at a time."""

    def __init__(self, settings: Settings, job: RankOfJob, pipeline: Pipeline) -> None:
        self.settings = settings
        self.job = job
        self.pipeline = pipeline
        self._lines: list[str] = []
        self._lengths: list[float] = []
        self._first = -1
        self._host = platform.node()

    def add(self, step: Step, pipeline: int, memory_bytes: int) -> None:
        """Add a step; write the segment before it, if that is complete now."""
        size = self.settings.segment
        if self._lines and step.number // size != self._first // size:
            self.write()
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

    def write(self) -> None:
        """Write what there is so that nobody sees half of it, and remove this rank's oldest.

        Those of steps that were captured stay as long as the capture does: held against it, they
        tell what lies inside passes.
        """
        if not self._lines:
            return
        settings, rank = self.settings, self.job.rank
        name = capture_name(self.job.started, self._first - self._first % settings.segment)
        sidecar = describe_job(
            name,
            self.job,
            self.pipeline,
            split=settings.split,
            tokens=settings.tokens,
            steps_s={"after_s": self._lengths},
        )
        table = "\n".join((HEADER, *self._lines, ""))
        self._lines, self._lengths = [], []
        folder, trace = settings.out / name, f"rank{rank}.csv"
        for file, text in ((f"{trace}.debubble.json", sidecar), (trace, table)):
            _write(folder / file, text)
        segments = [path.name for path in list_captures(settings.out, trace)]
        captured = {
            segments[bisect_right(segments, capture.name) - 1]
            for capture in list_captures(settings.out / CAPTURES)
        }
        keep_newest(settings.out, trace, settings.keep, spared={name, *captured})


def show_metrics(figures: Iterable[Figure], labels: Mapping[str, str]) -> str:
    """Write figures in the text format of Prometheus."""
    lines: dict[str, list[str]] = {}
    for name, labels_of_figure, value in figures:
        pairs = (f'{key}="{text}"' for key, text in {**labels, **labels_of_figure}.items())
        lines.setdefault(name, []).append(f"{_PREFIX}{name}{{{','.join(pairs)}}} {value!r}")
    text = []
    for name, samples in lines.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        text += [f"# HELP {_PREFIX}{name} {_HELP[name]}", f"# TYPE {_PREFIX}{name} {kind}"]
        text += samples
    return "\n".join(text) + "\n"


def write_metrics(out: Path, rank: int, text: str) -> None:
    """Put metrics where a collector of text files finds them, whole."""
    _write(out / f"rank{rank}.prom", text)


def _write(file: Path, text: str) -> None:
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
    step_s, wait_s, rank = 0.0, 0.0, ""
    for name, labels, value in figures:
        if name == "step_seconds":
            step_s = value
        elif name == "wait_seconds" and value > wait_s:
            wait_s, rank = value, labels["for_rank"]
    words = [f"steps {first} to {last}: {step_s * 1e3:.4g} ms a step"]
    if bubble is not None:
        words.append(f"bubble {show_share(bubble)}")
    if rank:
        words.append(f"this rank waits most for rank {rank}, {wait_s * 1e3:.4g} ms")
    if straggler is not None:
        by, since = show_percent(straggler.slower_by), straggler.since_step
        words.append(f"rank {straggler.rank} got slower, by {by} (step {since})")
    return ", ".join(words)


def scalars_of(figures: Iterable[Figure]) -> dict[str, float]:
    """Name figures as loggers do: `debubble/wait_seconds/for_rank0`."""
    return {
        "/".join(("debubble", name, *(f"{key}{text}" for key, text in labels.items()))): value
        for name, labels, value in figures
    }
