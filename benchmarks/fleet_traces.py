"""A job of many ranks that never ran, written as torch and NCCL would have.

Each pipeline is played on its own, with its own noise, and its passes are made of the kernels of a
recorded one. All replicas reduce their gradients at the end of a step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

import numpy as np
from isal import igzip

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.simulator.devices import Play
from support.simulator.host_programs import AUTOGRAD, Kernel, Setup
from support.simulator.written_traces import RankWriter, Writing
from support.traces.kineto_events import Event, document, kernel, launch

from debubble.trace.columns import KernelKind
from debubble.trace.kineto import read_kineto

RECORDED = Path(__file__).parents[1] / "tests" / "data" / "h200" / "1f1b_p2_m4" / "rank0.json.gz"
STAGES = 64
_MICROBATCHES = 16
_STEPS = 2
# Of a layer's kernels, forward and backward.
_KERNELS = 10


@cache
def _recorded() -> dict[bool, list[tuple[str, float]]]:
    """Return names and shares of time of a layer's kernels, forward and backward.

    Passes here are shorter: no kernel may become shorter than any device runs one.
    """
    trace = read_kineto(str(RECORDED))
    kernels = trace.kernels
    computes = np.flatnonzero(kernels.kind == KernelKind.COMPUTE)
    middle = len(computes) // 3
    layers = {False: computes[:_KERNELS], True: computes[middle : middle + _KERNELS]}
    return {
        backward: [
            (
                trace.names[kernels.name[row]],
                max(float(kernels.duration_ns[row]), kernels.duration_ns[rows].max() / _KERNELS),
            )
            for row in rows.tolist()
        ]
        for backward, rows in layers.items()
    }


class _RecordedWriter(RankWriter):
    """Writes each stretch of compute as the kernels of a recorded layer."""

    def _compute(self, work: Kernel, correlation: int) -> Iterator[Event]:
        parts = _recorded()[work.thread == AUTOGRAD]
        whole = sum(share for _, share in parts)
        length = work.end_ns - work.start_ns
        at = work.start_ns
        for number, (name, share) in enumerate(parts):
            ends = at + round(length * share / whole)
            issued = self.clock.us(work.launch_ns) + number * 0.5
            own = correlation if not number else next(self.correlation)
            yield launch(issued, 0.4, tid=work.thread, correlation=own)
            begin = self.clock.us(at)
            yield kernel(
                name, ts=begin, dur=self.clock.us(ends) - begin, stream=work.stream, correlation=own
            )
            at = ends


def write_pipeline(replica: int, *, folder: Path, replicas: int, stages: int) -> None:
    """Write one replica's ranks: those of a stage, over all replicas, stand side by side."""
    play = Play(
        Setup(
            schedule="1f1b", ranks=stages, microbatches=_MICROBATCHES, steps=_STEPS, fused=True,
            seed=replica,
        )
    )  # fmt: skip
    members = tuple(range(replica, stages * replicas, replicas))
    writing = Writing(members=members, world=stages * replicas, groups={"pp": members})
    for stage in range(stages):
        writer = _RecordedWriter(play, stage, writing)
        events = list(writer.events([step[stage] for step in play.steps]))
        content = document(events, rank=members[stage], world=stages * replicas)
        content["distributedInfo"]["pg_config"] = [{"pg_name": "pp", "ranks": list(members)}]
        with igzip.open(folder / f"rank{members[stage]}.json.gz", "wb", compresslevel=1) as out:
            out.write(json.dumps(content).encode())


def write_fleet(folder: Path, replicas: int, stages: int = STAGES) -> None:
    """Write all ranks, unless they are there."""
    if folder.is_dir() and len(list(folder.iterdir())) == stages * replicas:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2) as pool:
        write = partial(write_pipeline, folder=folder, replicas=replicas, stages=stages)
        list(pool.map(write, range(replicas)))


if __name__ == "__main__":
    write_fleet(Path(sys.argv[1]), int(sys.argv[2]))
