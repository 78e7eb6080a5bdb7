"""An engine's page for Prometheus, and what is told of the profiler by it."""

from __future__ import annotations

import shutil
from dataclasses import replace

import msgspec
import pytest
from support.services.engine_routes import serving
from support.traces.recordings import H200

import debubble
from debubble.capture.server import ServerCapture, ServerOrder, capture_server
from debubble.errors import CaptureError
from debubble.report.inspect import server_json, server_page
from debubble.trace.server_notes import (
    NAME,
    SCHEMA,
    ServerNotes,
    Span,
    read_page,
    read_server_notes,
    span_of,
    write_server_notes,
)

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} 3.0
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {prompt}
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
vllm:generation_tokens_total{{engine="1",model_name="m"}} {tokens}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.1",model_name="m"}} 5.0
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="m"}} {first_s}
vllm:time_to_first_token_seconds_count{{engine="0",model_name="m"}} {first}
vllm:inter_token_latency_seconds_sum{{engine="0",model_name="m"}} {later_s}
vllm:inter_token_latency_seconds_count{{engine="0",model_name="m"}} {later}
vllm:time_per_output_token_seconds_sum{{engine="0",model_name="m"}} {later_s}
vllm:time_per_output_token_seconds_count{{engine="0",model_name="m"}} {later}
"""


def vllm(at_s, **values):
    known = {"running": 8, "prompt": 0, "tokens": 0, "first_s": 0, "first": 0}
    return read_page(VLLM.format(**{**known, "later_s": 0, "later": 0, **values}), at_s)


def test_what_grew_between_two_looks_is_told_by_the_second():
    looks = [
        vllm(10.0, running=8, prompt=1000, tokens=500, first_s=2.0, first=4, later_s=1.0, later=50),
        vllm(11.0, running=2, prompt=1500, tokens=600, first_s=2.5, first=5, later_s=2.0, later=60),
        vllm(14.0, running=2, prompt=3000, tokens=900, first_s=3.0, first=8, later_s=9.0, later=90),
    ]
    assert span_of(looks) == Span(
        seconds=4.0,
        tokens_in_per_s=500.0,
        tokens_out_per_s=200.0,  # of two replicas
        requests_running=4.0,
        requests_waiting=3.0,
        ttft_s=0.25,
        first_tokens=4,
        tpot_s=0.2,
        later_tokens=40,
    )


def test_an_engine_that_was_started_again_tells_nothing_of_that_time():
    span = span_of([vllm(0.0, tokens=500), vllm(1.0, tokens=20)])
    assert (span.tokens_out_per_s, span.requests_running) == (None, 8)


def test_ranks_of_one_engine_tell_the_same_and_replicas_their_own():
    page = "".join(
        f'sglang:num_queue_reqs{{dp_rank="{replica}",pp_rank="{rank}"}} {replica + 2}\n'
        for replica in (0, 1)
        for rank in (0, 1, 2)
    )
    assert read_page(page, 0.0).waiting == 2 + 3


def test_sglang_is_read_by_the_tokens_that_it_counts_as_they_come():
    page = (
        'sglang:prompt_tokens_total{model_name="m"} 7\n'
        'sglang:generation_tokens_total{model_name="m"} 8\n'
    )
    live = (
        'sglang:realtime_tokens_total{mode="prefill_compute",model_name="m",tp_rank="0"} 70\n'
        'sglang:realtime_tokens_total{mode="prefill_compute",model_name="m",tp_rank="1"} 70\n'
        'sglang:realtime_tokens_total{mode="prefill_cache",model_name="m",tp_rank="0"} 5\n'
        'sglang:realtime_tokens_total{mode="decode",model_name="m",tp_rank="0"} 80\n'
    )
    old, new = read_page(page, 0.0), read_page(page + live, 0.0)
    assert (old.tokens_in, old.tokens_out) == (7, 8)
    assert (new.tokens_in, new.tokens_out) == (70, 80)


@pytest.mark.parametrize("page", ["", "nonsense", "sglang:num_queue_reqs NaN\n", "up 1\n"])
def test_a_page_without_an_engine_tells_nothing(page):
    assert read_page(page, 1.0).tells_nothing
    assert span_of([read_page(page, 1.0)]) is None


def notes(**spans):
    given = {"before": None, "during": None, "after": None, **spans}
    return ServerNotes(
        schema=SCHEMA, kind="vllm", url="http://x", began_unix_s=1.0, traces=("a.json.gz",), **given
    )


def test_the_profiler_is_held_against_both_sides_of_it():
    told = notes(
        before=Span(seconds=2.0, tokens_out_per_s=100.0, tpot_s=0.010, later_tokens=300),
        during=Span(seconds=2.0, tokens_out_per_s=40.0, tpot_s=0.026, later_tokens=200),
        after=Span(seconds=6.0, tokens_out_per_s=60.0, tpot_s=0.022, later_tokens=100),
    )
    assert told.around.seconds == 8.0
    assert told.around.later_tokens == 400
    assert told.around.tpot_s == pytest.approx(0.013)
    assert told.ratio("tokens_out_per_s") == pytest.approx(40 / 70)
    assert told.slowdown == pytest.approx(2.0)
    assert told.ratio("ttft_s") is None


def test_a_span_with_other_work_says_nothing_of_the_profiler():
    busy = Span(seconds=2.0, requests_running=16.0, tpot_s=0.010, later_tokens=300)
    idle = Span(seconds=2.0, requests_running=2.0, tpot_s=0.002, later_tokens=300)
    under = Span(seconds=2.0, requests_running=14.0, tpot_s=0.030, later_tokens=200)
    told = notes(before=busy, during=under, after=idle)
    assert told.around == busy
    assert told.slowdown == pytest.approx(3.0)
    assert notes(during=under, after=idle).slowdown is None


def test_a_few_tokens_or_answers_alone_say_nothing_of_the_profiler():
    free = Span(
        seconds=4.0, tokens_out_per_s=500.0, first_tokens=32, tpot_s=0.014, later_tokens=2e3
    )
    few = Span(seconds=0.5, first_tokens=1, tpot_s=0.149, later_tokens=31)
    alone = Span(seconds=1.0, first_tokens=0, tpot_s=0.010, later_tokens=900)
    assert notes(before=free, during=few).slowdown is None
    assert notes(before=free, during=alone).slowdown is None


def test_a_capture_without_prompts_says_how_long_would_hold_some():
    told = notes(
        before=Span(
            seconds=2.0,
            tokens_out_per_s=1000.0,
            first_tokens=32,
            ttft_s=0.96,
            tpot_s=0.0235,
            later_tokens=1970,
        ),
        during=Span(seconds=0.8, first_tokens=0, tpot_s=0.0246, later_tokens=992),
    )
    assert told.seconds_for_both == 3.0
    answer = ServerCapture(kind="vllm", url="http://x", files=(), metrics=told)
    assert "--seconds 3 would hold prompts" in server_page(answer, "").findings[1]


def test_the_page_of_a_capture_shows_all_three_spans_and_what_the_profiler_cost(tmp_path):
    answer = ServerCapture(
        kind="vllm",
        url="http://x",
        files=(tmp_path / "a.json.gz",),
        metrics=notes(
            before=Span(seconds=2.0, tokens_out_per_s=100.0, tpot_s=0.010, later_tokens=400),
            during=Span(seconds=2.0, tokens_out_per_s=40.0, tpot_s=0.025, later_tokens=200),
        ),
    )
    page = server_page(answer, "debubble find x")
    assert page.findings == ["Profiled, a token took 2.5 times as long as unprofiled."]
    assert [row[0] for row in page.tables[1].rows] == ["before", "profiled"]
    assert page.tables[1].rows[1][2:] == ("–", "40.0", "–", "–", "–", "25.0 ms")
    assert server_json(answer)["metrics"]["during"]["tpot_s"] == 0.025
    unknown = server_page(replace(answer, metrics=notes()), "")
    assert "unknown" in unknown.findings[0]


def test_without_times_the_rate_tells_and_without_either_nothing_does():
    fast, slow = (Span(seconds=1.0, tokens_out_per_s=rate) for rate in (90.0, 30.0))
    assert notes(after=fast, during=slow).slowdown == pytest.approx(3.0)
    assert notes(during=slow).slowdown is None
    assert notes(before=Span(seconds=1.0, tokens_out_per_s=0.0), during=slow).slowdown is None


def test_notes_come_back_as_they_were_written(tmp_path):
    told = notes(during=Span(seconds=2.0, tpot_s=0.5, later_tokens=3))
    assert read_server_notes(tmp_path) is None
    assert write_server_notes(tmp_path, told) == tmp_path / "server.debubble.json"
    assert read_server_notes(tmp_path) == told
    assert [file.name for file in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("broken", ["{", "[]", '{"schema": "debubble.server-notes/9"}'])
def test_notes_that_are_none_are_named(tmp_path, broken):
    (tmp_path / NAME).write_text(broken)
    with pytest.raises(CaptureError) as refusal:
        read_server_notes(tmp_path)
    assert refusal.value.file == str(tmp_path / NAME)


def test_notes_are_of_the_capture_that_they_name(tmp_path):
    """Folders of a service hold many captures: the newest one's notes are not those of others."""
    for file in (H200 / "fwd_closed_m4").glob("rank*.json.gz"):
        shutil.copy(file, tmp_path / f"1-{file.name}")
    other = notes(before=Span(seconds=2.0, tokens_out_per_s=100.0))
    write_server_notes(tmp_path, other)
    assert debubble.analyse(tmp_path).server_notes is None
    mine = msgspec.structs.replace(other, traces=("1-rank0.json.gz", "1-rank1.json.gz"))
    write_server_notes(tmp_path, mine)
    assert debubble.analyse(tmp_path).server_notes == mine


def test_whoever_is_told_to_stop_looks_no_longer(tmp_path):
    """A service that stops cuts every sleep short: it must not ask the engine in a loop."""
    looks = []

    def page():
        looks.append(1)
        return "vllm:num_requests_running 8\n"

    with serving(page, lambda _path, _body: (200, "")) as url:
        order = ServerOrder(url=url, kind="vllm", out=tmp_path, seconds=3600.0, around_s=3600.0)
        capture_server(order, sleep=lambda _seconds: None)
    assert len(looks) < 10
