"""Pipelines that were played, written as a table of operations: what timers of a job would hold."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.simulator.devices import Play, true_passes
from support.simulator.host_programs import Kernel

COLUMNS = ("step", "pipeline", "stage", "rank", "microbatch", "op", "start_ns", "duration_ns")
_PASSES = {"F": "forward", "B": "backward", "I": "input-grad", "W": "weight-grad"}


def write_table(path: Path, plays: Sequence[Play]) -> None:
    """Write all pipelines of a job: passes, both sides of messages, reductions."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for replica, play in enumerate(plays):
            for place, *row in _rows(play):
                rank = place * len(plays) + replica
                step, stage, microbatch, op, start, end = row
                writer.writerow((step, replica, stage, rank, microbatch, op, start, end - start))


def _rows(play: Play) -> Iterator[tuple[int, int, int, int, str, int, int]]:
    for one in true_passes(play):
        kind = _PASSES[one.kind]
        yield one.rank, one.step, one.stage, one.microbatch, kind, one.start_ns, one.end_ns
    home = play.programs.home
    for number, step in enumerate(play.steps):
        for place, mine in enumerate(step):
            stage = min(stage for stage, rank in home.items() if rank == place)
            for kernel in mine.kernels:
                if kernel.collective and not kernel.action:
                    times = kernel.start_ns, kernel.end_ns
                    yield place, number, stage, -1, "grads-reduce-scatter", *times
                for op, stage_of, microbatch in _messages(kernel, place):
                    yield place, number, stage_of, microbatch, op, kernel.start_ns, kernel.end_ns


def _messages(kernel: Kernel, place: int) -> Iterator[tuple[str, int, int]]:
    """Yield each message of a kernel, with the stage of the rank that sends or receives it."""
    for message in kernel.messages:
        kind, sender, microbatch, _ = message.what
        if kind == "token":
            continue
        direction = "forward" if kind == "F" else "backward"
        if message.source == place:
            yield f"{direction}-send", sender, microbatch
        else:
            yield f"{direction}-recv", sender + (1 if kind == "F" else -1), microbatch
