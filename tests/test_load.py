"""Loads: which requests are sent, when, and what is measured of them."""

from __future__ import annotations

import pytest
from support.services.example_load import import_load

load = import_load()
Load, Request, drive = load.Load, load.Request, load.drive
read_load, summarise = load.read_load, load.summarise


def first(load, count):
    requests = load.requests()
    return [next(requests) for _ in range(count)]


def test_the_same_seed_sends_the_same_requests_and_shares_are_kept():
    words = ["clients=2", "prompt=512:0.8,2048:0.2", "output=4,8"]
    load = read_load([*words, "seed=1"])
    drawn = first(load, 2000)
    assert drawn == first(load, 2000)
    assert drawn != first(read_load([*words, "seed=2"]), 2000)
    prompts = [prompt for prompt, _ in drawn]
    assert set(prompts) == {512, 2048}
    assert prompts.count(512) / 2000 == pytest.approx(0.8, abs=0.03)
    assert {output for _, output in drawn} == {4, 8}


def request(sent_s, tokens):
    return Request(10, sent_s, tokens=tokens, output=len(tokens), ended_s=tokens[-1])


def test_the_warm_up_does_not_count_and_what_is_under_way_counts_by_its_tokens():
    made = [
        request(0.5, [0.9, 1.1, 1.3]),  # sent in the warm-up: two of its tokens count
        request(1.0, [2.0, 2.5, 3.0]),
        request(4.0, [5.5, 6.5, 12.0]),  # ends too late
        request(11.5, [12.0]),  # sent too late
    ]
    result = summarise(made, Load(clients=1, seconds=10, warm_up=1), 1.0, 11.0)
    assert (result["ttfts"], result["itls"], result["output_lens"]) == ([1.0], [[0.5, 0.5]], [3])
    assert (result["median_ttft_ms"], result["median_tpot_ms"]) == (1000.0, 500.0)
    assert result["output_throughput"] == 0.7
