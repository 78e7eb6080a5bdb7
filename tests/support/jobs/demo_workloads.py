"""Runs several workloads of the demo, and tells which of them need their true lengths."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from support.jobs.forked_ranks import run_ranks
from support.jobs.recorded_pipeline import WORKLOAD

# Of their time, layers whose length nobody measures.
HASTE = 0.3


def hasty(workload):
    """Return a workload whose shape is looked at, and not its times."""
    short = {name: HASTE * getattr(workload, name) for name in ("forward_ms", "backward_ms")}
    return replace(workload, **short)


def measured_in(session):
    """Tell whether times are measured in this session, by `make accuracy`."""
    return any(item.get_closest_marker("accuracy") for item in session.items)


def run_several(workloads, root):
    """Run each workload, by name, into a folder of that name."""
    for name, workload in workloads.items():
        folder = root / name
        folder.mkdir(parents=True)
        (folder / WORKLOAD).write_bytes(msgspec.json.encode(workload))
        run = "support.jobs.recorded_pipeline:run_recorded"
        codes, output = run_ranks(run, workload.world, folder)
        assert not any(codes), output
