"""The split search against every split there is."""

from __future__ import annotations

import numpy as np
import pytest
from support.timelines.timed_splits import timer_of

from debubble.errors import NoSplitFits, UsageError
from debubble.plan.split import all_splits, find_partition
from debubble.plan.split_problem import (
    SplitMemory,
    Work,
    bound_all,
    bound_splits,
    overflow_of,
    split_problem,
    turns_of,
)
from debubble.timeline.schedules import order_of

# name, chunks a rank
SCHEDULES = [
    ("forward-only", 1),
    ("gpipe", 1),
    ("1f1b", 1),
    ("zb-h1", 1),
    ("interleaved-1f1b", 2),
]
CASES = 50


def random_problem(rng, name, chunks, *, caps=False):
    ranks = 2 if chunks > 1 else int(rng.integers(2, 6))
    stages = ranks * chunks
    layers = int(rng.integers(stages, 17))
    microbatches = ranks * int(rng.integers(1, 4)) if chunks > 1 else int(rng.integers(1, 13))
    trains = name != "forward-only"
    # Layers of a few sorts, as in real models, or each of its own.
    sorts = rng.uniform(0.5, 3, size=(3, int(rng.choice([1, 2, layers]))))
    sort = rng.integers(0, sorts.shape[1], size=layers)
    forward, backward, weight = sorts[:, sort]
    extra = np.zeros((3, stages))
    extra[:, 0] = rng.uniform(0, 1, 3) * rng.integers(0, 2)
    extra[:, -1] = rng.uniform(0, 4, 3) * rng.integers(0, 2)
    if not trains:
        extra[1:] = 0
    speeds = rng.uniform(0.7, 2, ranks) if rng.random() < 0.4 else np.ones(ranks)
    rank = np.arange(stages) % ranks
    least = np.ones(stages, dtype=np.int64)
    least[[0, -1]] = extra[0, [0, -1]] == 0  # an embedding or a head alone is a stage
    return split_problem(
        forward,
        backward if trains else None,
        weight if trains and name.startswith("zb") else None,
        rank=rank,
        microbatches=microbatches,
        stages=Work(forward=extra[0], backward=extra[1], weight=extra[2] * (name == "zb-h1")),
        slowness=speeds[rank],
        least=least,
        memory=random_memory(rng, stages, layers, ranks) if caps else None,
        turns=turns_of(order_of(name, ranks, microbatches, chunks)) if rng.random() < 0.7 else None,
    )


def random_memory(rng, stages, layers, ranks):
    """Caps that a random split just keeps, or keeps by a little."""
    in_flight = np.arange(stages, 0, -1)[:, None]
    each = rng.uniform(1, 3, layers) + in_flight * rng.uniform(0, 1, layers)
    memory = SplitMemory(
        layer_bytes=each, stage_bytes=rng.uniform(0, 2, stages), cap_bytes=np.zeros(ranks)
    )
    cuts = np.sort(rng.choice(np.arange(1, layers), stages - 1, replace=False))
    held = np.zeros(ranks)
    for stage, (i, j) in enumerate(zip([0, *cuts], [*cuts, layers], strict=True)):
        held[stage % ranks] += each[stage, i:j].sum() + memory.stage_bytes[stage]
    memory.cap_bytes[:] = held * rng.uniform(1, 1.3)
    return memory


def best_of_all(problem, evaluate):
    splits = all_splits(problem.layer_count, problem.stage_count, problem.least)
    splits = splits[overflow_of(problem, splits) == 0]
    latencies = evaluate(splits)
    return float(latencies.min())


@pytest.mark.slow
@pytest.mark.parametrize("caps", [False, True], ids=["free", "caps"])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_both_searches_find_what_trying_every_split_finds(name, chunks, caps):
    rng = np.random.default_rng([len(name), chunks, caps])
    for _ in range(CASES):
        problem = random_problem(rng, name, chunks, caps=caps)
        evaluate = timer_of(problem, name, chunks)
        expected = best_of_all(problem, evaluate)
        for limit in (0, 10**6):
            found = find_partition(problem, evaluate, exhaustive_up_to=limit)
            assert found.latency_s == pytest.approx(expected, rel=1e-9), (limit, problem)
            assert evaluate(np.array([found.split]))[0] == found.latency_s
            assert overflow_of(problem, np.array([found.split]))[0] == 0
            assert found.lower_bound_s is not None
            assert found.lower_bound_s <= expected * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("caps", [False, True], ids=["free", "caps"])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_no_split_is_quicker_than_its_bound_and_none_than_the_bound_of_all(name, chunks, caps):
    rng = np.random.default_rng([1, len(name), caps])
    for _ in range(CASES // 2):
        problem = random_problem(rng, name, chunks, caps=caps)
        splits = all_splits(problem.layer_count, problem.stage_count, problem.least)
        splits = splits[overflow_of(problem, splits) == 0]
        bounds = bound_splits(problem, splits)
        latencies = timer_of(problem, name, chunks, hop_s=rng.uniform(0, 0.2))(splits)
        assert (latencies >= bounds * (1 - 1e-9)).all()
        assert bound_all(problem) <= bounds.min() * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "microbatches"), [("gpipe", 2), ("gpipe", 16), ("1f1b", 16), ("1f1b", 24)]
)
def test_equal_stages_of_a_known_order_meet_the_bound(name, microbatches):
    ones, turns = np.ones(64), turns_of(order_of(name, 8, microbatches))
    problem = split_problem(
        ones, 2 * ones, rank=np.arange(8), microbatches=microbatches, turns=turns
    )
    found = find_partition(problem, timer_of(problem, name))
    assert found.split == (8,) * 8
    assert found.exact
    assert found.latency_s == found.lower_bound_s == 3 * 8 * (microbatches + 7)


def test_a_hundred_layers_on_sixteen_stages_are_proved_best_by_timing_a_handful():
    times = np.where(np.arange(96) % 3 == 0, 1.3, 1.0)
    head = np.zeros(16)
    head[-1] = 2.5
    problem = split_problem(
        times,
        2 * times,
        rank=np.arange(16),
        microbatches=64,
        stages=Work(forward=head, backward=2 * head, weight=0 * head),
        turns=turns_of(order_of("1f1b", 16, 64)),
    )
    found = find_partition(problem, timer_of(problem, "1f1b"), given=(6,) * 16)
    assert found.exact
    assert found.timed < 20
    assert found.latency_s < 0.9 * found.given_latency_s


def test_the_given_split_is_never_made_worse():
    rng = np.random.default_rng(9)
    for _ in range(20):
        ranks = int(rng.integers(6, 11))
        layers = int(rng.integers(ranks, 64))
        times = rng.uniform(0.5, 3, layers)
        problem = split_problem(times, 2 * times, rank=np.arange(ranks), microbatches=16)
        cuts = np.sort(rng.choice(np.arange(1, layers), ranks - 1, replace=False))
        given_split = tuple(np.diff([0, *cuts, layers]).tolist())
        evaluate = timer_of(problem, "1f1b")
        found = find_partition(problem, evaluate, given=given_split, exhaustive_up_to=0)
        assert found.given_latency_s == evaluate(np.array([given_split]))[0]
        assert found.latency_s <= found.given_latency_s


def test_a_given_split_that_does_not_fit_is_timed_but_not_chosen():
    memory = SplitMemory(
        layer_bytes=np.ones((2, 4)), stage_bytes=np.zeros(2), cap_bytes=np.array([1.0, 3])
    )
    problem = split_problem(np.ones(4), rank=np.arange(2), microbatches=4, memory=memory)
    found = find_partition(problem, timer_of(problem, "forward-only"), given=(2, 2))
    assert found.split == (1, 3)
    assert found.given_latency_s == 10.0 < found.latency_s == 13.0


@pytest.mark.parametrize(
    ("caps", "said"),
    [
        ([4, 4, 0.5, 9], "rank 2 lacks 500 B with .*,1,"),
        ([4, 4, 4, 3], "rank [0-3] lacks 1000 B with "),
        ([0.5, 4, 3, 9], "rank 0 lacks 500 B with 1,"),
    ],
)
def test_what_fits_nowhere_is_refused_by_rank(caps, said):
    memory = SplitMemory(
        layer_bytes=np.full((4, 16), 1000.0),
        stage_bytes=np.zeros(4),
        cap_bytes=1000 * np.array(caps),
    )
    problem = split_problem(np.ones(16), rank=np.arange(4), microbatches=4, memory=memory)
    with pytest.raises(NoSplitFits, match=f"no split fits memory: {said}"):
        find_partition(problem, timer_of(problem, "forward-only"))


@pytest.mark.parametrize("limit", [0, 10**6])
def test_what_is_refused_fits_nowhere_and_nothing_else_is_refused(limit):
    rng = np.random.default_rng(11)
    refused = 0
    for _ in range(CASES):
        problem = random_problem(rng, "1f1b", 1, caps=True)
        problem.memory.cap_bytes[:] *= 0.9
        splits = all_splits(problem.layer_count, problem.stage_count, problem.least)
        if (overflow_of(problem, splits) == 0).any():
            find_partition(problem, timer_of(problem, "1f1b"), exhaustive_up_to=limit)
            continue
        refused += 1
        with pytest.raises(NoSplitFits, match="no split fits memory: rank "):
            find_partition(problem, timer_of(problem, "1f1b"), exhaustive_up_to=limit)
    assert refused > 10


def test_a_timing_below_the_bound_switches_the_bound_off():
    rng = np.random.default_rng(13)
    for _ in range(20):
        problem = random_problem(rng, "1f1b", 1)
        splits = all_splits(problem.layer_count, problem.stage_count, problem.least)
        # Nothing to do with the costs: one arbitrary split is best by far.
        odd = splits[int(rng.integers(len(splits)))]
        found = find_partition(problem, lambda rows, odd=odd: 1e-9 + np.abs(rows - odd).sum(axis=1))
        assert found.split == tuple(odd.tolist())
        if len(splits) > 1:
            assert found.lower_bound_s is None


def test_splits_of_the_wrong_size_are_refused():
    problem = split_problem(np.ones(8), rank=np.arange(4), microbatches=4)
    with pytest.raises(UsageError, match="does not split 8 layers into 4 stages"):
        find_partition(problem, timer_of(problem, "forward-only"), given=(4, 4))
    with pytest.raises(UsageError, match="3 layers cannot fill 4 stages"):
        split_problem(np.ones(3), rank=np.arange(4), microbatches=4)


@pytest.mark.parametrize("seed", range(12))
def test_a_search_from_the_best_split_for_half_the_microbatches_ends_near_the_whole_one(seed):
    rng = np.random.default_rng(seed)
    work = {"forward": rng.uniform(1, 2, 30), "backward": rng.uniform(2, 4, 30)}
    half, twice = (
        split_problem(**work, rank=np.arange(6), microbatches=microbatches)
        for microbatches in (6, 12)
    )
    near = find_partition(half, timer_of(half, "1f1b", 1)).split
    evaluate = timer_of(twice, "1f1b", 1)
    whole, short = (find_partition(twice, evaluate, near=one) for one in (None, near))
    assert short.latency_s <= 1.005 * whole.latency_s
    assert short.latency_s <= evaluate(np.array([near]))[0]
    assert short.timed < whole.timed
