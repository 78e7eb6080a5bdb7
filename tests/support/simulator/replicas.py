"""Pipelines side by side: those that reduce their gradients together, and those that take turns.

A reduction begins on a replica when its gradients are there and the one before it is through, and
ends on all of them at once. What a replica costs the others is the difference to the same run
without what was planted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.simulator.analysis import setup_of
from support.simulator.devices import Play, RankStep
from support.simulator.host_programs import MS, Block, Kernel, Setup
from support.simulator.written_traces import Clock, Writing, write_run

from debubble.timeline.fleet.survey import Means
from debubble.timeline.model import CollectiveKind, RankCollectives
from debubble.timeline.replicas import judge_replicas
from debubble.trace.columns import Group

REDUCTION_STREAM = 20
STEP_NS = 100_000_000
IN_PARTS = Means(held_ranks=0)
BEHAVIOUR = {
    "1f1b": {"fused": True},
    "gpipe": {},
    "forward-only": {},
    "zb-h1": {"early": True},
    "interleaved-1f1b": {"early": True},
}


class Bucketed(Play):
    """Reduces a part of its gradients after each kernel of its last backward pass."""

    def _programs(self) -> list[list[Block]]:
        programs = super()._programs()
        for blocks in programs:
            computing = [one for one in blocks if any(item.action for _, item in one.items)]
            computing[-1].items = [
                part for verb, item in computing[-1].items for part in _with_bucket(verb, item)
            ]
        return programs


def _with_bucket(verb: str, item: Kernel) -> list[tuple[str, Kernel]]:
    if not item.action:
        return [(verb, item)]
    return [(verb, item), ("run", Kernel(REDUCTION_STREAM, item.thread, collective=True))]


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Pipelines of the same shape, and how they reduce."""

    setups: tuple[Setup, ...]
    bucketed: bool = False
    transfer_ns: int = 2 * MS
    in_step: bool = False
    """All ranks begin a step together, as after a norm over all gradients."""

    def play(self) -> list[Play]:
        """Play all pipelines, step by step."""
        kind = Bucketed if self.bucketed else Play
        plays = [kind(replace(setup, steps=0)) for setup in self.setups]
        for _ in range(self.setups[0].steps):
            steps = [play.play_step() for play in plays]
            for ranks in zip(*steps, strict=True):
                self._reduce(ranks)
            for play, mine in zip(plays, steps, strict=True):
                play.finish(mine)
                play.steps.append(mine)
            if self.in_step:
                devices = [device for play in plays for device in play.devices]
                for device in devices:
                    device.free_ns = max(one.free_ns for one in devices)
                    device.host_ns = max(device.host_ns, device.free_ns)
        return plays

    def _reduce(self, ranks: Sequence[RankStep]) -> None:
        """End each reduction of one stage on all replicas at once, one after the other."""
        queues = [[k for k in step.kernels if k.collective] for step in ranks]
        free = 0
        for together in zip(*queues, strict=True):
            for kernel in together:
                kernel.start_ns = max(kernel.start_ns, free)
            free = max(kernel.start_ns for kernel in together) + self.transfer_ns
            for kernel in together:
                kernel.end_ns = free


def replicas_of(base: Setup, count: int, **planted: Any) -> Replicas:
    """Make replicas that differ in their seed, the last one also in what is planted."""
    setups = [replace(base, seed=1000 * base.seed + number) for number in range(count)]
    setups[-1] = replace(setups[-1], **planted)
    return Replicas(setups=tuple(setups))


def members_of(replica: int, count: int, ranks: int) -> tuple[int, ...]:
    """Return the ranks of a pipeline: replicas of a stage lie side by side."""
    return tuple(range(replica, count * ranks, count))


def write_replicas(folder: Path, plays: Sequence[Play], **writing: Any) -> None:
    """Write a trace a rank, each replica on a clock of its own."""
    count, ranks = len(plays), plays[0].setup.ranks
    data = tuple(tuple(range(place * count, (place + 1) * count)) for place in range(ranks))
    for number, play in enumerate(plays):
        clock = Clock(skew_ns=number * 7_654_321, drift_ppm=10.0 * number)
        told = Writing(
            members=members_of(number, count, ranks),
            world=count * ranks,
            clocks=(clock,) * ranks,
            data=data,
        )
        write_run(play, folder, replace(told, **writing))


def step_ends(plays: Sequence[Play]) -> list[int]:
    """Return when each step's last reduction ended."""
    return [
        max(k.end_ns for play in plays for rank in play.steps[step] for k in rank.kernels)
        for step in range(len(plays[0].steps))
    ]


def true_cost(replicas: Replicas, base: Setup) -> float:
    """Return how much longer a step is than without what was planted, in the middle."""
    plain = replace(
        replicas,
        setups=tuple(replace(base, seed=setup.seed) for setup in replicas.setups),
    )
    with_it, without = step_ends(replicas.play()), step_ends(plain.play())
    return median(
        (a - b) - (c - d)
        for a, b, c, d in zip(with_it, [0, *with_it], without, [0, *without], strict=False)
    )


def write_side_by_side(
    folder, count=3, *, schedule="1f1b", ranks=4, microbatches=4, skews=(0,), **writing
):
    """Write a job of several pipelines whose ranks take turns."""
    for replica in range(count):
        play = Play(setup_of(schedule, ranks, microbatches, seed=replica, **BEHAVIOUR[schedule]))
        members = members_of(replica, count, ranks)
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


# What `judge_replicas` is given, made by hand or of a play, without traces.


def collectives(groups, rows):
    """Make a rank's collectives of (group, step, start, end, in a forward pass)."""
    group, step, start, end, forward = (np.array(column) for column in zip(*rows, strict=True))
    return RankCollectives(
        groups=groups,
        group=group.astype(np.int32),
        kind=np.full(len(rows), CollectiveKind.ALL_REDUCE, dtype=np.uint8),
        step=step.astype(np.int32),
        ready_ns=start,
        start_ns=start,
        end_ns=end,
        exposed_ns=end - start,
        blocks=np.ones(len(rows), dtype=bool),
        in_forward=forward.astype(bool),
        message_bytes=np.full(len(rows), 1024),
    )


def figures(pipelines, steps=5):
    return [
        SimpleNamespace(
            pipeline=number,
            ranks=[SimpleNamespace(rank=rank, position=place) for place, rank in enumerate(ranks)],
            windows=[SimpleNamespace(step=step) for step in range(steps)],
            step_time_ns=STEP_NS,
            stages=(),
            hops=(),
            outside_ns={},
            microbatches=4,
        )
        for number, ranks in pipelines.items()
    ]


def judge_plays(plays):
    """Judge replicas by their reductions as they were played."""
    count, ranks, steps = len(plays), plays[0].setup.ranks, len(plays[0].steps)
    found = {}
    for replica, play in enumerate(plays):
        for place in range(ranks):
            members = tuple(range(place * count, (place + 1) * count))
            group = (Group(name="1", description="dp", ranks=members),)
            rows = [
                (0, number, kernel.start_ns, kernel.end_ns, False)
                for number, step in enumerate(play.steps)
                for kernel in step[place].kernels
                if kernel.collective
            ]
            found[members[replica]] = collectives(group, rows)
    pipelines = {replica: members_of(replica, count, ranks) for replica in range(count)}
    return judge_replicas(found, pipelines, figures(pipelines, steps))
