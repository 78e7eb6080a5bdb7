"""What users of a server saw, held against what they saw before."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.services.console import type_command

from debubble.errors import UsageError
from debubble.load import SCHEMA, Load, LoadResult, Request
from debubble.measure.compare import compare
from debubble.measure.comparison import Direction, Verdict
from debubble.measure.measurement import join_measurements, measure_load, read_load_result

CLOSED, OPEN = Load(clients=4), Load(rate=3.0)


def result(*, load=CLOSED, ttft=0.1, tpot=0.01, failed=0):
    """Thirty requests around these figures; tokens come in waves."""
    rate = 100.0
    noise = [1 + 0.01 * (step % 5 - 2) for step in range(30)]
    asked = tuple(
        Request(
            prompt=512,
            output=48,
            ttft_s=ttft * share,
            tpot_s=tpot * share,
            latency_s=(ttft + 47 * tpot) * share,
        )
        for share in noise
    )
    return LoadResult(
        schema=SCHEMA,
        url="http://x",
        load=load,
        seconds=30.0,
        requests=asked,
        failed=failed,
        problem="503" if failed else "",
        unfinished=0,
        requests_per_s=1.0,
        tokens_in_per_s=512.0,
        tokens_out_per_s=rate,
        out_per_s=(0.0, 2 * rate) * 5,
        ttft_s=ttft,
        tpot_s=tpot,
        latency_s=ttft + 47 * tpot,
    )


def compared(before, after):
    return compare(measure_load(before), measure_load(after))


def test_more_tokens_a_second_are_better_and_every_number_has_its_way():
    found = compared(result(), result(ttft=0.1, tpot=0.006))
    assert (found.verdict, found.decided_by) == (Verdict.BETTER, "throughput")
    # Four clients, 48 tokens in 0.57 s before and in 0.382 s after.
    assert found.delta("throughput").before.median == pytest.approx(4 * 48 / 0.57)
    assert found.delta("throughput").change == pytest.approx(0.57 / 0.382 - 1)
    assert found.delta("tpot").change == pytest.approx(-0.4)
    assert found.delta("tpot").direction is Direction.BETTER
    assert found.delta("ttft").direction is Direction.UNCLEAR
    assert found.reasons == ()
    assert found.throughput_unit == "tokens"


def test_noise_is_no_change():
    assert compared(result(), result(tpot=0.01002)).verdict is Verdict.NO_CLEAR_CHANGE


def test_more_for_all_and_later_for_each_is_said():
    found = compared(result(), result(ttft=0.15, tpot=0.005))
    assert found.verdict is Verdict.BETTER
    assert found.reasons == ("more gets done, yet a user waits longer for the first token",)


def test_where_requests_come_at_a_rate_their_latency_decides():
    found = compared(result(load=OPEN), result(load=OPEN, tpot=0.02))
    assert (found.verdict, found.decided_by) == (Verdict.WORSE, "request_latency")


def test_other_loads_are_other_work():
    found = compared(result(), result(load=Load(clients=8)))
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert found.reasons == (
        "512 tokens in, 48 out, 4 clients before, 512 tokens in, 48 out, 8 clients after",
    )
    longer = replace(CLOSED, seconds=60.0, seed=7)
    assert compared(result(), result(load=longer)).verdict is Verdict.NO_CLEAR_CHANGE


def test_failures_and_single_runs_are_noted():
    found = compared(result(failed=2), result())
    assert found.notes[0] == "2 requests failed before"
    assert "one run" in found.notes[1]
    runs = [measure_load(result(tpot=tpot)) for tpot in (0.01, 0.0101)]
    joined = join_measurements(runs)
    assert (joined.served.runs, len(joined.served.out_per_s)) == (2, 60)
    assert len(joined.served.latency_s) == 60
    assert compare(joined, joined).notes == ()


def test_runs_under_different_loads_are_not_put_together():
    with pytest.raises(UsageError, match="differ"):
        join_measurements([measure_load(result()), measure_load(result(load=OPEN))])


def test_a_load_without_an_answer_measures_nothing():
    with pytest.raises(UsageError, match="no request was answered in 30 s: 503"):
        measure_load(replace(result(failed=3), requests=()))


def test_a_result_comes_back_from_its_file(tmp_path):
    file = tmp_path / "before.json"
    file.write_text(json.dumps(result().as_data()))
    assert read_load_result(str(file)) == measure_load(result())
    other = tmp_path / "trace.json"
    other.write_text('{"traceEvents": []}')
    assert read_load_result(str(other)) is None
    assert read_load_result("a-name-in-the-history") is None
    file.write_text(json.dumps({"schema": SCHEMA}))
    with pytest.raises(UsageError) as refusal:
        read_load_result(str(file))
    assert refusal.value.file == str(file)


def test_compare_says_what_users_saw(tmp_path):
    for name, tpot in (("before", 0.01), ("after", 0.006)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result(tpot=tpot).as_data()))
    said = type_command("debubble compare before.json after.json", tmp_path)
    assert said.code == 0, said.text
    assert said.out.startswith("Better: throughput +49.2 % (")
    assert "time to first token" in said.out
    assert "next:" not in said.out
    worse = type_command("debubble compare after.json before.json --fail-on worse", tmp_path)
    assert worse.code == 1
