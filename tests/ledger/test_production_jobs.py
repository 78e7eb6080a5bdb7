"""Jobs of the shapes that production has, written as ByteDance writes its tables.

They are played here by a 1F1B of their own: nothing of the code under test takes part. What a
repair is said to buy is held against a second play with it, step by step.
"""

from __future__ import annotations

import csv
import math
import random
from dataclasses import dataclass, field, replace
from statistics import median

import pytest

import debubble

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "mc", "mb_id")
LENGTH_S = {"forward": 0.2, "backward": 0.4}
WIRE_S, REDUCTION_S = 0.001, 0.05


@dataclass(frozen=True, kw_only=True)
class Job:
    """Replicas of a pipeline, and what is wrong with them."""

    replicas: int
    stages: int
    microbatches: int = 8
    steps: int = 4
    slow: dict[tuple[int, int], float] = field(default_factory=dict)
    """By replica and stage: how many times as long its device takes."""
    long: dict[int, float] = field(default_factory=dict)
    """By stage."""
    spread: float = 0.0
    """Of the logarithm of what a microbatch holds, drawn anew in every step."""
    evened: bool = False
    noise: float = 0.01

    def amounts(self, step, replica):
        """Return what the microbatches of a replica hold in a step."""
        drawn = [
            [math.exp(draw.gauss(0, self.spread)) for _ in range(self.microbatches)]
            for draw in (random.Random(f"{step} {one}") for one in range(self.replicas))  # noqa: S311
        ]
        if self.evened:
            return [sum(map(sum, drawn)) / self.replicas / self.microbatches] * self.microbatches
        return drawn[replica]

    def play(self, step, replica):
        """Yield stage, operation, microbatch, start and end of a replica's step."""
        draw = random.Random(f"noise {step} {replica}")  # noqa: S311
        held = self.amounts(step, replica)
        todo = [_order(self.stages, self.microbatches, stage) for stage in range(self.stages)]
        free, done = [0.0] * self.stages, {}
        while any(todo):
            for stage in range(self.stages):
                while todo[stage]:
                    kind, number = todo[stage][0]
                    ahead = 1 if kind == "forward" else -1
                    before = stage - ahead, kind, number
                    begin = free[stage]
                    if 0 <= before[0] < self.stages:
                        if before not in done:
                            break
                        begin = max(begin, done[before] + WIRE_S)
                        yield stage, f"{kind}-recv", number, free[stage], begin
                    times = self.long.get(stage, 1) * self.slow.get((replica, stage), 1)
                    times *= held[number] * (1 + draw.gauss(0, self.noise))
                    end = begin + LENGTH_S[kind] * times
                    yield stage, f"{kind}-compute", number, begin, end
                    if 0 <= stage + ahead < self.stages:
                        yield stage, f"{kind}-send", number, end, end + WIRE_S
                    done[stage, kind, number] = free[stage] = end
                    todo[stage].pop(0)

    def batches(self):
        """Return what each step takes: as long as its slowest pipeline."""
        return [
            max(row[4] for replica in range(self.replicas) for row in self.play(step, replica)
                if row[1].endswith("compute"))
            for step in range(20, 20 + self.steps)
        ]  # fmt: skip

    def write(self, path):
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for step in range(20, 20 + self.steps):
                plays = [list(self.play(step, replica)) for replica in range(self.replicas)]
                ends = [[max(row[4] for row in play if row[0] == stage)
                         for stage in range(self.stages)] for play in plays]  # fmt: skip
                for replica, play in enumerate(plays):
                    for stage in range(self.stages):
                        together = max(own[stage] for own in ends) + REDUCTION_S
                        play.append(
                            (stage, "grads-reduce-scatter", 0, ends[replica][stage], together)
                        )
                    for stage, op, number, begin, end in play:
                        rank = 4 * (stage * self.replicas + replica)
                        mb = number if op.endswith("compute") else 0
                        row = (replica, stage, rank, step, op, begin, end - begin, 0, mb)
                        writer.writerow(row)
        return str(path)


def _order(stages, microbatches, stage):
    ahead = min(stages - 1 - stage, microbatches)
    order = [("forward", number) for number in range(ahead)]
    for number in range(microbatches):
        if ahead + number < microbatches:
            order.append(("forward", ahead + number))
        order.append(("backward", number))
    return order


def saved(job, **repaired):
    pairs = zip(job.batches(), replace(job, **repaired).batches(), strict=True)
    return median(before - after for before, after in pairs)


def mean_of(job):
    mean = sum(job.long.get(stage, 1) for stage in range(job.stages)) / job.stages
    return dict.fromkeys(range(job.stages), mean)


def named(job, tmp_path):
    return {one.cause: one for one in debubble.analyse(job.write(tmp_path / "ops.csv")).causes}


FAULTS = {"worker", "imbalance", "data", "slow_link", "jitter"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        Job(replicas=8, stages=8, slow={(4, 3): 2.0}),
        Job(replicas=8, stages=8, slow={(5, 7): 1.15}),
        Job(replicas=4, stages=4, slow={(1, 1): 1.8, (2, 3): 1.5}),
        Job(replicas=4, stages=8, slow={(0, 2): 1.7, (0, 3): 1.7}),
        Job(replicas=4, stages=4, slow={(0, 2): 1.7, (1, 2): 1.7}),
        Job(replicas=4, stages=4, slow={(1, 2): 1.3}, noise=0.05),
    ],
    ids=["in the middle", "mildly", "two", "two of one replica", "half of a stage", "noisy"],
)
def test_slow_machines_are_named_with_what_their_repair_buys(job, tmp_path):
    found = named(job, tmp_path)
    assert FAULTS & found.keys() == {"worker"}
    ranks = {4 * (stage * job.replicas + replica) for replica, stage in job.slow}
    assert {worker.rank for worker in found["worker"].workers} == ranks
    assert found["worker"].buys_ns / 1e9 == pytest.approx(saved(job, slow={}), rel=0.05)


@pytest.mark.slow
def test_a_slow_machine_that_holds_the_longest_stage_is_both(tmp_path):
    job = Job(replicas=4, stages=4, slow={(2, 3): 1.6}, long={3: 1.5})
    found = named(job, tmp_path)
    assert FAULTS & found.keys() == {"worker", "imbalance"}
    assert found["worker"].buys_ns / 1e9 == pytest.approx(saved(job, slow={}), rel=0.05)
    assert found["imbalance"].stage == 3
    equal = saved(job, long=mean_of(job))
    assert found["imbalance"].buys_ns / 1e9 == pytest.approx(equal, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        Job(replicas=16, stages=2, spread=0.35, long={1: 1.4}),
        Job(replicas=8, stages=4, spread=0.25),
        Job(replicas=4, stages=2, microbatches=6, spread=0.3),
        Job(replicas=2, stages=3, spread=0.3),
    ],
    ids=["and a long last stage", "8 × 4", "4 × 2", "2 × 3"],
)
def test_sequences_that_differ_in_every_step_are_data(job, tmp_path):
    found = named(job, tmp_path)
    assert FAULTS & found.keys() <= {"data", *(["imbalance"] if job.long else [])}
    assert found["data"].buys_ns / 1e9 == pytest.approx(saved(job, evened=True), rel=0.05)
    if "imbalance" in found:
        equal = saved(job, long=mean_of(job))
        assert found["imbalance"].buys_ns / 1e9 == pytest.approx(equal, rel=0.05)


def test_a_healthy_job_has_no_fault(tmp_path):
    assert not FAULTS & named(Job(replicas=3, stages=4), tmp_path).keys()


def test_two_replicas_that_are_equally_slow_drag_together_and_neither_is_named_alone(tmp_path):
    job = Job(replicas=4, stages=3, slow={(0, 2): 1.7, (1, 2): 1.7})
    analysis = debubble.analyse(job.write(tmp_path / "ops.csv"))
    assert (analysis.replicas.verdict, analysis.replicas.slowest) == ("none", None)
    assert analysis.replicas.waited_fraction > 0.1
    assert analysis.pipeline.pipeline in {0, 1}
