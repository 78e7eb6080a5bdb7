"""What users of a server saw, as load generators write it, held against what they saw before."""

from __future__ import annotations

import json

import pytest

from debubble.errors import UsageError
from debubble.measure.compare import Direction, Verdict, compare
from debubble.measure.load_results import measure_load, parse_load_result, read_load_result
from debubble.measure.measurement import join_measurements

NOISE = [1 + 0.01 * (step % 5 - 2) for step in range(30)]


def vllm(*, clients=4, rate="inf", ttft=0.1, tpot=0.01, failed=0, prompt=512):
    """Thirty requests around these figures, as `vllm bench serve --save-detailed` writes them."""
    return {
        "date": "20261101-120000",
        "endpoint_type": "openai",
        "num_prompts": 30 + failed,
        "request_rate": rate,
        "max_concurrency": clients,
        "duration": 30.0,
        "completed": 30,
        "failed": failed,
        "total_input_tokens": 30 * prompt,
        "total_output_tokens": 30 * 48,
        "output_throughput": 100.0,
        "median_ttft_ms": 1e3 * ttft,
        "median_tpot_ms": 1e3 * tpot,
        "input_lens": [prompt] * 30 + [prompt] * failed,
        "output_lens": [48] * 30 + [0] * failed,
        "ttfts": [ttft * share for share in NOISE] + [0.0] * failed,
        "itls": [[tpot * share] * 47 for share in NOISE] + [[]] * failed,
        "errors": [""] * 30 + ["503"] * failed,
    }


def summary(**given):
    """The same without `--save-detailed`."""
    lists = ("input_lens", "output_lens", "ttfts", "itls", "errors")
    return {name: value for name, value in vllm(**given).items() if name not in lists}


def guidellm(*, clients=4, ttft=0.1, tpot=0.01, failed=0):
    """The same as guidellm 0.8 writes it."""
    return {
        "metadata": {"version": 2, "guidellm_version": "0.8.1"},
        "benchmarks": [
            {
                "config": {"strategy": {"type_": "concurrent", "streams": clients}},
                "duration": 14.4,
                "requests": {
                    "successful": [
                        {
                            "prompt_tokens": 512,
                            "output_tokens": 48,
                            "request_latency": (ttft + 47 * tpot) * share,
                            "time_to_first_token_ms": 1e3 * ttft * share,
                            "inter_token_latency_ms": 1e3 * tpot * share,
                        }
                        for share in NOISE
                    ],
                    "errored": [{}] * failed,
                },
            }
        ],
    }


def aiperf(*, clients=4, ttft=0.1, tpot=0.01, failed=0):
    """The same as aiperf 0.13 sums it up."""
    return {
        "schema_version": "1.4",
        "aiperf_version": "0.13.0",
        "request_count": {"unit": "requests", "avg": 30.0},
        "error_request_count": {"unit": "requests", "avg": float(failed)},
        "benchmark_duration": {"unit": "sec", "avg": 14.4},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 100.0},
        "input_sequence_length": {"unit": "tokens", "avg": 512.0, "p50": 512.0},
        "output_sequence_length": {"unit": "tokens", "avg": 48.0, "p50": 48.0},
        "time_to_first_token": {"unit": "ms", "avg": 1.0, "p50": 1e3 * ttft},
        "inter_token_latency": {"unit": "ms", "avg": 1.0, "p50": 1e3 * tpot},
        "request_latency": {"unit": "ms", "avg": 1.0, "p50": 1e3 * (ttft + 47 * tpot)},
        "input_config": {
            "phases": [
                {"kind": "warmup", "concurrency": 1},
                {"kind": "profiling", "type": "concurrency", "concurrency": clients},
            ]
        },
    }


def read(data):
    return parse_load_result(json.dumps(data).encode())


def measure(data):
    return measure_load(read(data))


def compared(before, after):
    return compare(measure(before), measure(after))


@pytest.mark.parametrize("written", [vllm, summary, guidellm, aiperf])
def test_every_generator_tells_the_same_load(written):
    result = read(written(failed=2))
    assert (result.load, result.failed) == ("4 clients", 2)
    served = measure_load(result).served
    assert (served.prompt_tokens, served.output_tokens) == (512, 48)
    medians = [sorted(values)[len(values) // 2] for values in (served.ttft_s, served.tpot_s)]
    assert medians == pytest.approx([0.1, 0.01])
    assert sorted(served.latency_s)[len(served.latency_s) // 2] == pytest.approx(0.57)
    detailed = written in (vllm, guidellm)
    assert len(served.out_per_s) == (30 if detailed else 1)
    assert served.out_per_s[0] == pytest.approx(4 * 48 / 0.57 if detailed else 100, rel=0.03)


def test_two_summaries_of_each_side_tell_a_change():
    sides = [
        join_measurements([measure(summary(tpot=tpot) | {"output_throughput": rate})
                           for tpot, rate in side])
        for side in (((0.0100, 100.0), (0.0101, 101.0)), ((0.006, 150.0), (0.0061, 151.0)))
    ]  # fmt: skip
    found = compare(*sides)
    assert (found.verdict, found.confidence.value) == (Verdict.BETTER, "indicative")


def test_a_sweep_is_no_single_load():
    report = guidellm()
    with pytest.raises(UsageError, match="2 benchmarks"):
        read(report | {"benchmarks": report["benchmarks"] * 2})


def test_more_tokens_a_second_are_better_and_every_number_has_its_way():
    found = compared(vllm(), vllm(ttft=0.1, tpot=0.006))
    assert (found.verdict, found.decided_by) == (Verdict.BETTER, "throughput")
    # Four clients, 48 tokens in 0.57 s before and in 0.382 s after.
    assert found.deltas["throughput"].before.median == pytest.approx(4 * 48 / 0.57)
    assert found.deltas["throughput"].change == pytest.approx(0.57 / 0.382 - 1)
    assert found.deltas["tpot"].change == pytest.approx(-0.4)
    assert found.deltas["tpot"].direction is Direction.BETTER
    assert found.deltas["ttft"].direction is Direction.UNCLEAR
    assert found.reasons == ()
    assert found.throughput_unit == "tokens"


def test_where_requests_come_at_a_rate_their_latency_decides():
    found = compared(vllm(clients=None, rate=3.0), vllm(clients=None, rate=3.0, tpot=0.02))
    assert (found.verdict, found.decided_by) == (Verdict.WORSE, "request_latency")


def test_other_loads_are_other_work():
    found = compared(vllm(), vllm(clients=8))
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert found.reasons == ("4 clients before, 8 clients after",)
    found = compared(vllm(), vllm(prompt=2048))
    assert found.reasons == ("prompts of 512 tokens before, of 2048 after",)
    assert compared(vllm(), vllm(prompt=550)).verdict is Verdict.NO_CLEAR_CHANGE


def test_a_load_without_an_answer_measures_nothing():
    nobody = vllm(failed=3) | {"completed": 0, "output_lens": [0] * 33, "errors": ["503"] * 33}
    with pytest.raises(UsageError, match="no request was answered in 30 s: 503"):
        measure(nobody)


def test_a_result_comes_back_from_its_file(tmp_path):
    file = tmp_path / "before.json"
    file.write_text(json.dumps(vllm()))
    assert read_load_result(file) == read(vllm())
    other = tmp_path / "trace.json"
    other.write_text('{"traceEvents": []}')
    assert read_load_result(other) is None
    assert read_load_result("a-name-in-the-history") is None
    file.write_text(json.dumps({"total_input_tokens": "many"}))
    with pytest.raises(UsageError) as refusal:
        read_load_result(file)
    assert refusal.value.file == str(file)
