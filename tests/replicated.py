"""Pipelines side by side that reduce their gradients together: played, and written as traces.

A reduction begins on a replica when its gradients are there and the one before it is through, and
ends on all of them at once. What a replica costs the others is the difference to the same run
without what was planted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from host_programs import MS, Block, Kernel, Setup
from simulated import Play, RankStep
from simulated_traces import Clock, Writing, write_run

REDUCTION_STREAM = 20


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
