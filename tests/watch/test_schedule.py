"""Requests between two looks at a server are counted by length."""

from __future__ import annotations

from debubble.annexes.watch.mix import (
    ServerMetrics,
    parse_metrics,
    requests_between,
)

PAGE = """# TYPE vllm:request_prompt_tokens histogram
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


def test_requests_are_counted_by_the_bucket_of_their_bound():
    after = parse_metrics(PAGE)
    assert after.waiting == 5
    assert requests_between(ServerMetrics(), after) == {512: 5, 1024: 6, 2048: 1}


def test_only_what_came_between_two_readings_counts():
    before = ServerMetrics(lengths={500.0: 5.0, 1000.0: 10.0, float("inf"): 10.0})
    assert requests_between(before, parse_metrics(PAGE)) == {1024: 1, 2048: 1}
