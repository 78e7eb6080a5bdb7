"""Jobs of several pipelines, written as traces, and read in parts."""

from __future__ import annotations

from played import setup_of
from simulated import Play
from simulated_traces import Clock, Writing, write_run

from debubble.fleet.survey import Means

IN_PARTS = Means(held_ranks=0)
BEHAVIOUR = {
    "1f1b": {"fused": True},
    "gpipe": {},
    "forward-only": {},
    "zb-h1": {"early": True},
    "interleaved-1f1b": {"early": True},
}


def replicas(folder, count=3, *, schedule="1f1b", ranks=4, microbatches=4, skews=(0,), **writing):
    """Write a job of several pipelines whose ranks take turns."""
    for replica in range(count):
        play = Play(setup_of(schedule, ranks, microbatches, seed=replica, **BEHAVIOUR[schedule]))
        members = tuple(range(replica, ranks * count, count))
        clock = Clock(skew_ns=skews[replica % len(skews)])
        write_run(
            play,
            folder,
            Writing(
                members=members,
                world=ranks * count,
                groups={"pp": members},
                clocks=[Clock(), *[clock] * (ranks - 1)],
                **writing,
            ),
        )
