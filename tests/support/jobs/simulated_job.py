"""A job that never ran: it leaves the traces that a pipeline with its setting would have left.

`python simulated_job.py --split 4,4,4,4 --microbatches 8` in an environment of `debubble capture`.
What it is not told it takes from DEBUBBLE_SPLIT and so on; `--do` makes it misbehave.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.simulator.devices import Play
from support.simulator.host_programs import Setup
from support.simulator.written_traces import ELEMENTS, STATIC_BYTES, Writing, write_run

RANKS = 4
STEPS = 4
LAYERS_OF_A_UNIT = 4
# Of a job that holds its batch: with more microbatches each is as much smaller.
USUAL_COUNT = 4


class Hangs(Exception):
    """Nobody waits for it here: how a process that hangs is ended, test_killed.py tells."""


def main(words=None, environment=os.environ):
    parser = argparse.ArgumentParser()
    parser.add_argument("--split", default="4,4,4,4")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--overlap", type=int, default=0)
    parser.add_argument("--do", default="")
    parser.add_argument("--at", type=int, default=0, help="microbatches from which on it does so")
    parser.add_argument("--drift", type=float, default=0.0, help="slower with each run")
    parser.add_argument("--busy", type=int, default=0, help="runs that something else disturbs")
    parser.add_argument("--log", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=0.0)
    said = parser.parse_args(words)
    run = 0
    if said.log is not None:
        run = len(said.log.read_text().splitlines()) if said.log.exists() else 0
        with said.log.open("a") as log:
            log.write(f"{said.split} {said.microbatches} {said.schedule} {said.overlap}\n")
    time.sleep(said.seconds)
    written = {}
    pace = 1 + said.drift * run
    if said.do and said.microbatches >= said.at:
        misbehave(said)
        if said.do == "bloat":
            written["static_bytes"] = 2 * STATIC_BYTES
        if said.do == "hold-batch":
            pace *= USUAL_COUNT / said.microbatches
            written["elements"] = ELEMENTS * USUAL_COUNT // said.microbatches
    layers = [int(part) for part in said.split.split(",")]
    setup = Setup(
        schedule=said.schedule,
        ranks=RANKS,
        microbatches=said.microbatches,
        chunks=len(layers) // RANKS,
        steps=STEPS,
        weights=tuple(pace * count / LAYERS_OF_A_UNIT for count in layers),
        layers=tuple(layers),
        fused=said.schedule == "1f1b" and not said.overlap,
        early=bool(said.overlap),
        noise=0.01,
        spikes=(0, 1.5) if run < said.busy else None,
        seed=run,
    )
    out = Path(json.loads(environment["DEBUBBLE_CAPTURE"])["out"])
    out = out / "20260101-000000-step000000011"
    out.mkdir(parents=True)
    for name, packed in traces_of(setup, **written):
        (out / f"{name}.gz").write_bytes(packed)


def misbehave(said):
    if said.do == "crash":
        raise ValueError("this setting is not for me")
    if said.do == "memory":
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if said.do == "hang":
        raise Hangs
    if said.do == "nothing":
        sys.exit(0)
    if said.do == "ignore-split":
        said.split = "3,3,3,7"
    if said.do == "ignore-microbatches":
        said.microbatches = 4
    if said.do == "cap-microbatches":
        said.microbatches = said.at - 1


@cache
def traces_of(setup, **written):
    """Return the traces of a setting, packed; tests in one process ask for the same few."""
    with tempfile.TemporaryDirectory() as folder:
        write_run(Play(setup), Path(folder), Writing(labels="runtime", **written))
        traces = sorted(Path(folder).iterdir())
        return [(trace.name, gzip.compress(trace.read_bytes(), 1)) for trace in traces]


if __name__ == "__main__":
    main()
