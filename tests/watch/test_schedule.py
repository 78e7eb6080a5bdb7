"""Servers are captured every so often, never in quiet hours, less often under pressure."""

from __future__ import annotations

from datetime import datetime, time

import pytest

from debubble.annexes.watch.config import Trigger
from debubble.annexes.watch.mix import (
    ServerMetrics,
    back_off,
    next_capture,
    parse_metrics,
    requests_between,
)


def trigger(*quiet):
    return Trigger(url="http://x", kind="vllm", every_s=3600, jitter=0.1, quiet_hours=quiet)


def at(hour, minute=0, day=10):
    return datetime(2026, 3, day, hour, minute).astimezone().timestamp()


def test_jitter_spreads_captures_around_the_hour():
    assert next_capture(trigger(), at(8), at(8), 0.0) == at(8, 54)
    assert next_capture(trigger(), at(8), at(8), 1.0) == at(9, 6)
    assert next_capture(trigger(), at(8), at(12), 0.5) == at(12)
    assert next_capture(trigger(), None, at(12), 0.5) == at(12, 3)


@pytest.mark.parametrize(
    ("quiet", "due"),
    [
        (((time(22), time(6)),), at(6, day=11)),
        (((time(23), time(23, 30)),), at(23, 30)),
        (((time(22), time(23, 30)), (time(23, 30), time(1))), at(1, day=11)),
        (((time(8), time(9)),), at(23)),
    ],
)
def test_quiet_hours_end_before_a_capture_begins(quiet, due):
    assert next_capture(trigger(*quiet), at(22), at(22), 0.5) == due


def test_a_pressed_server_is_asked_ever_less_often_up_to_a_limit():
    waits = [back_off(trigger(), refusals) for refusals in range(12)]
    assert waits[:3] == [180, 360, 720]
    assert waits[-1] == 4 * 3600


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
