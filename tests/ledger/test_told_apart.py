"""A slow device, a long stage, long data and a slow wire: four reasons for one picture.

Replicas that reduce together are played, written as a table, and read back. What putting a thing
right is said to buy is held against a second play without it; of data, with the same work spread
evenly over all microbatches. Sizes, places, factors and noise are fixed in the first tests, and
drawn in those of `drawn`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import combinations
from statistics import median

import numpy as np
import pytest
from support.simulator.devices import true_windows
from support.simulator.host_programs import Setup
from support.simulator.op_tables import write_table
from support.simulator.replicas import Replicas, members_of

import debubble

SCHEDULES = {
    "1f1b": {"schedule": "1f1b", "fused": True},
    "gpipe": {"schedule": "gpipe", "buffered": True},
    "zb-h1": {"schedule": "zb-h1", "early": True},
}
KINDS = ("worker", "imbalance", "data", "slow_link")
RANKS, MICROBATCHES = 4, 8


@dataclass(frozen=True, kw_only=True)
class Job:
    """Replicas of which one has what is planted; a long stage is long in all."""

    count: int
    schedule: str
    ranks: int = RANKS
    microbatches: int = MICROBATCHES
    steps: int = 3
    noise: float = 0.002
    seed: int = 0
    replica: int = -1
    """Which one has it."""
    place: int = 2
    """Of the slow device."""
    slow: float = 1.7
    stage: int = 2
    """The long one; all of them together take as long as equal ones."""
    long: float = 2.0
    data: tuple[int, float] = (3, 2.5)
    hop: tuple[int, int, float] = (1, 2, 30.0)

    @property
    def members(self):
        return members_of(self.replica % self.count, self.count, self.ranks)

    def replicas(self, planted, spread=()):
        """Return them with what is planted. Of what is spread evenly, the work stays."""
        base = Setup(
            ranks=self.ranks, microbatches=self.microbatches, steps=self.steps, noise=self.noise,
            wire_ns=200_000, **SCHEDULES[self.schedule],
        )  # fmt: skip
        weights = [1.0] * self.ranks
        if "imbalance" in planted:
            weights = [self.ranks / (self.ranks - 1 + self.long)] * self.ranks
            weights[self.stage] *= self.long
        if "data" in spread:
            more = 1 + (self.data[1] - 1) / (self.microbatches * self.count)
            weights = [more * weight for weight in weights]
        setups = [
            replace(base, seed=100 * self.seed + number, weights=tuple(weights))
            for number in range(self.count)
        ]
        own = setups[self.replica]
        if "worker" in planted:
            weights[self.place] *= self.slow
            own = replace(own, weights=tuple(weights))
        if "data" in planted:
            own = replace(own, slow_data=(self.data,))
        if "slow_link" in planted:
            own = replace(own, slow_hop=self.hop)
        setups[self.replica] = own
        return Replicas(setups=tuple(setups), in_step=True)


def drawn(seed):
    """Draw a job and what is planted in it."""
    draw = random.Random(seed)  # noqa: S311 (cases, not secrets)
    ranks, count = draw.choice([2, 3, 4, 6, 8]), draw.randint(2, 8)
    microbatches = max(draw.choice([4, 6, 8, 12, 16]), ranks)
    here = draw.randrange(ranks - 1)
    hop = (here, here + 1) if draw.random() < 0.6 else (here + 1, here)
    job = Job(
        count=count,
        schedule=draw.choice(list(SCHEDULES)),
        ranks=ranks,
        microbatches=microbatches,
        steps=draw.choice([2, 3, 5]),
        noise=draw.choice([0.002, 0.005, 0.01]),
        seed=seed,
        replica=draw.randrange(count),
        place=draw.randrange(ranks),
        slow=draw.choice([1.15, 1.3, 1.7, 2, 3]),
        stage=draw.randrange(ranks),
        long=draw.choice([1.15, 1.3, 1.6, 2, 3]),
        data=(draw.randrange(microbatches), draw.choice([1.3, 1.7, 2.5, 3])),
        hop=(*hop, draw.choice([8, 15, 30, 60])),
    )
    return job, draw.choice([*((one,) for one in KINDS), *combinations(KINDS, 2)])


@lru_cache(maxsize=1)
def played(replicas):
    return replicas.play()


@cache
def batch_of(replicas):
    """Return what a batch takes: as long as the slowest pipeline of each step."""
    windows = [[end - begin for begin, end in true_windows(play)] for play in played(replicas)]
    return median(max(step) for step in zip(*windows, strict=True))


def causes_of(folder, replicas):
    write_table(folder / "ops.csv", played(replicas))
    return debubble.analyse(str(folder / "ops.csv")).causes


def check(named, job, planted):
    """Hold what is named, whose it is and its price against what was planted."""
    together = batch_of(job.replicas(planted))
    ranks = job.members
    culprit = {
        "worker": lambda one: one.rank == ranks[job.place],
        "imbalance": lambda one: one.stage == job.stage,
        "data": lambda one: one.times_expected == pytest.approx(job.data[1], rel=0.05),
        "slow_link": lambda one: one.hop == (ranks[job.hop[0]], ranks[job.hop[1]]),
    }
    found = {one.cause: one for one in named}
    for cause in planted:
        rest = [other for other in planted if other != cause]
        spread = ("data",) if cause == "data" else ()
        true_saving = together - batch_of(job.replicas(rest, spread))
        if true_saving < 0.03 * together:  # hidden behind the other: nothing to be had
            continue
        assert cause in found, (cause, named)
        assert culprit[cause](found[cause]), found[cause]
        assert found[cause].buys_ns == pytest.approx(true_saving, rel=0.05), cause
        if cause == "data" and len(planted) == 1:  # and without the longest ones, with less work
            without = together - batch_of(job.replicas(rest))
            assert found[cause].culprit_saved_ns == pytest.approx(without, rel=0.05)
    wrong = {"worker", "imbalance", "data", "slow_link", "jitter"} - set(planted)
    assert not wrong & set(found), named


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("planted", KINDS)
def test_each_reason_is_named_with_its_culprit_and_its_price(tmp_path, count, schedule, planted):
    job = Job(count=count, schedule=schedule)
    named = causes_of(tmp_path, job.replicas([planted]))
    assert named[0].cause == planted
    check(named, job, [planted])


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pair", list(combinations(KINDS, 2)), ids="-".join)
def test_two_reasons_are_both_named_with_their_prices(tmp_path, count, schedule, pair):
    job = Job(count=count, schedule=schedule)
    check(causes_of(tmp_path, job.replicas(pair)), job, pair)


@pytest.mark.accuracy
@pytest.mark.parametrize("count", range(2, 9))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_reasons_alone_and_in_pairs_over_all_numbers_of_replicas(tmp_path, count, schedule):
    for number, planted in enumerate([*((one,) for one in KINDS), *combinations(KINDS, 2)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = Job(count=count, schedule=schedule)
        named = causes_of(folder, job.replicas(planted))
        assert len(planted) > 1 or named[0].cause == planted[0]
        check(named, job, planted)


TWO_RANKS = {"ranks": 2, "microbatches": 6, "place": 0, "stage": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "planted"),
    [
        (Job(count=3, schedule="zb-h1", ranks=6, microbatches=6, steps=2), ["data"]),
        (Job(count=4, schedule="1f1b", hop=(1, 0, 60), **TWO_RANKS), ["worker", "slow_link"]),
        (Job(count=3, schedule="1f1b", hop=(0, 1, 8), **TWO_RANKS), ["slow_link"]),
        (Job(count=2, schedule="gpipe", microbatches=16, hop=(1, 2, 60), long=1.6),
         ["imbalance", "slow_link"]),
        (Job(count=3, schedule="zb-h1", ranks=6, microbatches=6, place=0, slow=2), ["worker"]),
    ],
    ids=["two steps", "exchanges of two ranks", "a hop of two ranks", "a wire slower than passes",
         "sends behind each other"],
)  # fmt: skip
def test_other_sizes_and_places_change_nothing(job, planted, tmp_path):
    check(causes_of(tmp_path, job.replicas(planted)), job, planted)


@pytest.mark.accuracy
def test_reasons_in_a_hundred_jobs_that_were_drawn(tmp_path):
    """Two miss the bar of 5 %: long data 6.5 % low (seed 9), a long stage 6.7 % high (71)."""
    missed = []
    for seed in range(100):
        job, planted = drawn(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            check(causes_of(folder, job.replicas(planted)), job, planted)
        except AssertionError as error:
            missed.append((seed, planted, str(error)[:200]))
    assert len(missed) <= 2, missed


@pytest.mark.slow
def test_sequences_of_all_lengths_are_data_and_no_device_is_slow(tmp_path):
    """Sixteen replicas whose microbatches each hold another amount, the same in every step."""
    base = Setup(
        schedule="1f1b", fused=True, ranks=RANKS, microbatches=MICROBATCHES, steps=3, noise=0.01,
        wire_ns=200_000,
    )  # fmt: skip
    amounts = np.exp(np.random.default_rng(0).normal(0, 0.35, (16, MICROBATCHES)))
    uneven = tuple(
        replace(base, seed=number, slow_data=tuple(enumerate(mine.tolist())))
        for number, mine in enumerate(amounts)
    )
    spread = tuple(replace(one, slow_data=(), weights=(amounts.mean(),) * 4) for one in uneven)
    jobs = [Replicas(setups=setups, in_step=True) for setups in (uneven, spread)]
    named = causes_of(tmp_path, jobs[0])
    assert named[0].cause == "data"
    assert named[0].buys_ns == pytest.approx(batch_of(jobs[0]) - batch_of(jobs[1]), rel=0.05)
    assert not {"worker", "imbalance", "jitter"} & {one.cause for one in named}


def test_a_device_is_slow_and_its_stage_is_not_long(tmp_path):
    named = causes_of(tmp_path, Job(count=2, schedule="1f1b").replicas(["worker"]))
    assert [one.cause for one in named if one.cause != "schedule"] == ["worker"]


def test_equal_replicas_have_none_of_it(tmp_path):
    named = causes_of(tmp_path, Job(count=3, schedule="1f1b").replicas([]))
    assert not {*KINDS, "jitter"} & {one.cause for one in named}


@pytest.fixture(scope="module")
def straggler(public_data):
    """A production job of four replicas, one of whose machines is slow."""
    return debubble.analyse(str(public_data / "bytedance-straggler-AR"))


@pytest.mark.slow
def test_the_slow_machine_of_a_production_job_is_named_first(straggler):
    """Its authors: repairing it takes a step from 46.3 to 23.5 s."""
    first = straggler.causes[0]
    assert (first.cause, first.rank, first.workers[0].pipeline) == ("worker", 0, 0)
    assert first.buys_ns / 1e9 == pytest.approx(22, abs=3)
    assert straggler.ledger.job_latency_ns / 1e9 == pytest.approx(45.7, abs=0.1)
    assert "imbalance" not in [one.cause for one in straggler.causes]
    assert straggler.replicas.verdict == "drags"
    assert straggler.replicas.saved_s == pytest.approx(22, abs=3)


@pytest.mark.slow
def test_no_split_is_offered_for_it(straggler):
    plan = debubble.plan(straggler, layers=(8, 8, 8, 8))
    assert plan.verdict.startswith("The device of rank 0 is slow")
    assert not any(option.change.split for option in plan.options)
    assert [one.reason for one in plan.refused if one.lever == "split"] == [
        "rank 0 computes slowly, no stage is too long for it: repair its device first"
    ]


@pytest.mark.slow
def test_the_long_stage_of_another_stays_one(public_data):
    analysis = debubble.analyse(str(public_data / "bytedance-straggler-ST"))
    first = analysis.causes[0]
    assert (first.cause, first.stage) == ("imbalance", 3)
    assert first.buys_ns / 1e9 == pytest.approx(0.3, abs=0.03)
    assert analysis.workers.slow == ()
    assert analysis.replicas.verdict == "none"


def test_what_lies_between_steps_is_called_as_the_table_calls_it(public_data):
    figures = debubble.analyse(str(public_data / "bytedance-straggler-ST")).pipeline
    assert {"optimizer", "reduction", "clipping", "gc"} >= set(figures.outside_ns) - {"other"}
    assert figures.outside_ns["reduction"] > figures.outside_ns.get("other", 0)
