"""Traffic that moves is told from buckets that get slower."""

from __future__ import annotations

import numpy as np
import pytest

from debubble.annexes.drift import REFERENCE
from debubble.annexes.watch.mix import (
    Mix,
    ServerMetrics,
    advance,
    decompose,
    moved,
    parse_metrics,
    requests_between,
)


def first_moved(captures):
    mix = Mix()
    for place, counts in enumerate(captures):
        mix = advance(mix, counts)
        if moved(mix):
            return place - REFERENCE + 1
    return None


def drawn(rng, share, captures, *, requests=30, wander=None):
    for _ in range(captures):
        mine = share if wander is None else rng.dirichlet(np.array(share) * wander)
        counts = rng.multinomial(requests, mine)
        yield {512: int(counts[0]), 2048: int(counts[1]), 8192: int(counts[2])}


@pytest.mark.slow
@pytest.mark.parametrize("wander", [None, 30.0])
def test_quiet_traffic_raises_hardly_any_alarm(wander):
    rng = np.random.default_rng(5)
    captures = REFERENCE + 300
    raised = [
        first_moved(drawn(rng, (0.7, 0.2, 0.1), captures, wander=wander)) is not None
        for _ in range(60)
    ]
    assert sum(raised) <= 3  # 1 % are allowed, and three of 60 by chance


def test_traffic_that_moves_is_found_soon_even_where_shares_wander():
    rng = np.random.default_rng(6)
    delays = []
    for _ in range(40):
        before = drawn(rng, (0.8, 0.15, 0.05), REFERENCE, wander=30.0)
        after = drawn(rng, (0.3, 0.6, 0.1), 15, wander=30.0)
        delays.append(first_moved([*before, *after]))
    assert np.mean([delay is not None for delay in delays]) >= 0.95


def test_a_capture_without_requests_says_nothing():
    assert advance(Mix(), {}) == Mix()
    assert advance(Mix(), {512: 0}) == Mix()


def test_a_change_is_split_into_traffic_and_speed_exactly():
    found = decompose(
        {512: 3, 2048: 1}, {512: 1.0, 2048: 5.0}, {512: 1, 2048: 1}, {512: 2.0, 2048: 5.0}
    )
    assert found.before == pytest.approx(2.0)
    assert found.after == pytest.approx(3.5)
    assert found.traffic_moved == pytest.approx(1.0)
    assert found.buckets_slower == pytest.approx(0.5)
    assert found.after - found.before == pytest.approx(found.traffic_moved + found.buckets_slower)


def test_a_bucket_that_is_new_was_never_faster():
    found = decompose({512: 1}, {512: 1.0}, {2048: 1}, {512: 1.0, 2048: 5.0})
    assert (found.traffic_moved, found.buckets_slower) == (4.0, 0.0)


# What engines say of themselves, as vLLM and SGLang write it.
VLLM = """# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{engine="0",le="500.0"} 4.0
vllm:request_prompt_tokens_bucket{engine="0",le="1000.0"} 10
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf"} 11
vllm:request_prompt_tokens_bucket{engine="1",le="500.0"} 1
vllm:request_prompt_tokens_bucket{engine="1",le="1000.0"} 1
vllm:request_prompt_tokens_bucket{engine="1",le="+Inf"} 1
vllm:num_requests_waiting{engine="0"} 3
vllm:num_requests_waiting{engine="1"} 2
other 7 nonsense
broken{ 1
"""


def test_only_requests_between_two_readings_count_by_the_bucket_of_their_bound():
    after = parse_metrics(VLLM)
    assert after.waiting == 5
    assert requests_between(ServerMetrics(), after) == {512: 5, 1024: 6, 2048: 1}
    before = ServerMetrics(lengths={500.0: 5.0, 1000.0: 10.0, float("inf"): 10.0})
    assert requests_between(before, after) == {1024: 1, 2048: 1}


def test_a_server_that_was_started_again_counts_from_its_start():
    before, after = (
        ServerMetrics(lengths={500.0: count, float("inf"): count}) for count in (9.0, 2.0)
    )
    assert requests_between(before, after) == {512: 2.0}


def test_ranks_of_a_pipeline_tell_one_queue_and_replicas_have_their_own():
    queues = {(0, 0): 3.0, (0, 1): 2.0, (1, 0): 4.0, (1, 1): 4.0}
    page = "".join(
        f'sglang:num_queue_reqs{{dp_rank="{replica}",model="a, \\"b\\"",pp_rank="{rank}"}} {long}\n'
        for (replica, rank), long in queues.items()
    )
    assert parse_metrics(page).waiting == 7.0


@pytest.mark.parametrize("page", ["", "nonsense", "sglang:num_queue_reqs NaN\n"])
def test_a_page_without_figures_tells_nothing(page):
    told = parse_metrics(page)
    assert (told.waiting, dict(told.lengths)) == (0.0, {})
