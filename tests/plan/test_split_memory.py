"""The memory a split search is given, against the peaks that memory's own prediction has."""

from __future__ import annotations

import numpy as np
import pytest
from support.simulator.allocator import allocator_run
from support.timelines.timed_splits import timer_of

from debubble.errors import NoSplitFits
from debubble.plan.split import all_splits, find_partition
from debubble.plan.split_problem import overflow_by_rank, split_memory, split_problem
from debubble.simulate.costs.memory import fit_memory, predict_peaks
from debubble.timeline.schedules import order_of

RUN = allocator_run("1f1b", 4, 8, [4, 4, 4, 4])
COSTS = fit_memory(RUN)


def problem_of(memory, ranks=4, stages=4):
    ones = np.ones(16)
    rank = np.arange(stages) % ranks
    return split_problem(ones, 2 * ones, rank=rank, microbatches=8, memory=memory)


@pytest.mark.parametrize("name", ["forward-only", "1f1b", "gpipe"])
def test_with_one_stage_a_rank_every_split_takes_what_is_predicted(name):
    order = order_of(name, 4, 8)
    memory = split_memory(COSTS, order, layers=16, limit_bytes=[0.0] * 4)
    splits = all_splits(16, 4)
    held = overflow_by_rank(problem_of(memory), splits)
    for split, bytes_of_ranks in zip(splits.tolist(), held, strict=True):
        peaks = [peak.peak_bytes for peak in predict_peaks(COSTS, order, layers=split)]
        assert bytes_of_ranks == pytest.approx(peaks, rel=1e-9)


def test_with_several_stages_a_rank_splits_near_even_take_about_what_is_predicted():
    order = order_of("interleaved-1f1b", 4, 8, 2)
    memory = split_memory(COSTS, order, layers=16, limit_bytes=[0.0] * 4)
    split = [2, 2, 3, 1, 2, 2, 1, 3]
    held = overflow_by_rank(problem_of(memory, stages=8), np.array([split]))[0]
    peaks = [peak.peak_bytes for peak in predict_peaks(COSTS, order, layers=split)]
    assert held == pytest.approx(peaks, rel=0.03)


def test_a_small_device_gets_fewer_layers_and_one_too_small_is_named():
    order = order_of("1f1b", 4, 8)
    needed = [peak.peak_bytes for peak in predict_peaks(COSTS, order)]
    small = predict_peaks(COSTS, order, layers=[2, 5, 5, 4])[0].peak_bytes
    problem = problem_of(split_memory(COSTS, order, layers=16, limit_bytes=[small, 1e9, 1e9, 1e9]))
    found = find_partition(problem, timer_of(problem, "1f1b"), given=(4, 4, 4, 4))
    assert found.split[0] <= 2
    tight = split_memory(COSTS, order, layers=16, limit_bytes=[0.9 * small, *needed[1:]])
    with pytest.raises(NoSplitFits, match=r"rank [0-3] lacks"):
        find_partition(problem_of(tight), timer_of(problem, "1f1b"))
