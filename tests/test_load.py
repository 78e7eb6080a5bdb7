"""Loads: which requests are sent, when, and what is measured of them."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from debubble.errors import CaptureError, UsageError
from debubble.load import Load, _Record, _result, drive, read_load, read_mix, read_requests


class Answering(BaseHTTPRequestHandler):
    """Streams what it was asked for at once, two tokens an event where it is told to."""

    asked: list
    together = 1
    refuse = False

    def do_GET(self):
        self._send(json.dumps({"data": [{"id": "the-model"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if self.refuse:
            self.send_error(429, "too many")
            return
        wanted, parts = body["max_tokens"], body["max_tokens"] // self.together
        events = [{"choices": [{"text": " x" * self.together}]}] * parts
        events.append({"choices": [], "usage": {"completion_tokens": wanted}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send("".join([*lines, "data: [DONE]\n\n"]).encode())

    def _send(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 512


@contextmanager
def answering(**ways):
    routes = type("Routes", (Answering,), {"asked": [], **ways})
    server = Server(("127.0.0.1", 0), routes)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", routes.asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class ByRequests:
    """A clock on which each request takes a hundredth of a second, however long it really takes."""

    def __init__(self, asked):
        self.asked = asked

    def __call__(self):
        return 0.01 * len(self.asked)

    def sleep(self, seconds):
        until = self() + seconds
        while self() < until:
            time.sleep(0.001)


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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,374,44\n2023-11-16,396,0\n"),
        ("b.csv", "Timestamp,Model,Request tokens,Response tokens\n5,x,374,44\n9,x,396,1\n"),
        (
            "c.jsonl",
            '{"input_length": 374, "output_length": 44}\n{"input_length":396, "output_length":1}\n',
        ),
    ],
)
def test_lengths_come_from_a_trace_of_requests_in_its_order_again_and_again(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    load = Load(clients=1, trace=str(tmp_path / name))
    assert first(load, 3) == [(374, 44), (396, 1), (374, 44)]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "{\n", "prompt_tokens,output_tokens\nx,2\n"])
def test_what_is_no_trace_of_requests_is_refused_by_name(tmp_path, text):
    file = tmp_path / "requests.csv"
    file.write_text(text)
    with pytest.raises(UsageError) as refusal:
        read_requests(str(file))
    assert refusal.value.file == str(file)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "clients or a rate"),
        (["clients=2", "rate=3"], "clients or a rate"),
        (["clients=0"], "needs clients"),
        (["rate=0"], "needs clients"),
        (["clients=many"], "no number"),
        (["clients=2", "size=3"], "says nothing of a load"),
        (["clients=2", "seconds=0"], "no time"),
        (["clients=2", "prompt=512:x"], "no mix"),
    ],
)
def test_loads_that_cannot_be_are_refused(words, problem):
    with pytest.raises(UsageError, match=problem):
        read_load(words)


@pytest.mark.parametrize("text", ["", "0", "512:0", "512,", "-5", "512:0.5:3"])
def test_mixes_that_are_none_are_refused(text):
    with pytest.raises(UsageError, match="no mix"):
        read_mix(text)


def test_a_closed_loop_asks_again_and_counts_what_came():
    load = Load(clients=3, prompt="5", output="4", seconds=0.3, warm_up=0.1)
    with answering() as (url, asked):
        clock = ByRequests(asked)
        result = drive(url, load, clock=clock, sleep=clock.sleep)
    assert {body["model"] for body in asked} == {"the-model"}
    assert {len(body["prompt"]) for body in asked} == {5}
    prompts = [tuple(body["prompt"]) for body in asked]
    assert len(set(prompts)) == len(prompts)  # no cache of prefixes answers
    assert 3 < len(result.requests) < len(asked)
    assert {(one.prompt, one.output) for one in result.requests} == {(5, 4)}
    assert result.tokens_out_per_s == pytest.approx(sum(result.out_per_s) / 10)
    assert (result.failed, result.problem) == (0, "")


def test_clients_leave_when_they_are_told_that_it_has_ended():
    ended = threading.Event()
    load = Load(clients=2, prompt="5", output="4", seconds=600, warm_up=0)
    with answering() as (url, asked):
        threading.Timer(0.2, ended.set).start()
        drive(url, load, ended=ended)
    assert asked


def test_events_of_several_tokens_count_as_the_server_says():
    load = Load(clients=1, prompt="5", output="8", seconds=0.2, warm_up=0)
    with answering(together=4) as (url, asked):
        clock = ByRequests(asked)
        result = drive(url, load, clock=clock, sleep=clock.sleep)
    assert {one.output for one in result.requests} == {8}


def test_an_open_loop_sends_at_its_rate_whatever_comes_back():
    sent = []

    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds
            sent.append(seconds)

    clock = Clock()
    load = Load(rate=50.0, prompt="1", output="1", seconds=3.0, warm_up=1.0, seed=4)
    with answering() as (url, asked):
        drive(url, load, clock=clock, sleep=clock.sleep)
    assert len(asked) == pytest.approx(200, abs=45)
    pauses = sent[:-1]
    # Exponential pauses: their spread is as large as their mean.
    mean = sum(pauses) / len(pauses)
    spread = (sum((pause - mean) ** 2 for pause in pauses) / len(pauses)) ** 0.5
    assert (mean, spread / mean) == (pytest.approx(0.02, rel=0.2), pytest.approx(1.0, abs=0.3))


def test_what_a_server_refuses_is_counted_with_its_words():
    load = Load(clients=1, prompt="1", output="1", seconds=0.25, warm_up=0)
    waited = []

    def sleep(seconds):  # of the client: it waits before it asks again, which takes its time
        waited.append(seconds)

    with answering(refuse=True) as (url, asked):
        result = drive(url, load, clock=lambda: 0.1 * len(waited), sleep=sleep)
    assert result.requests == ()
    assert 0 < result.failed == len(asked) < 5
    assert result.problem.startswith("429 too many")


def test_nobody_at_the_address_is_said_before_anything_is_sent():
    with answering() as (url, _):
        pass
    with pytest.raises(CaptureError, match="refused"):
        drive(url, Load(clients=1))


def record(sent_s, tokens, ended=True):
    made = _Record(10, sent_s)
    made.tokens = [(at, 1) for at in tokens]
    made.ended_s = tokens[-1] if ended else None
    return made


def test_the_warm_up_does_not_count_and_what_is_under_way_counts_by_its_tokens():
    records = [
        record(0.5, [0.9, 1.1, 1.3]),  # sent in the warm-up: two of its tokens count
        record(1.0, [2.0, 2.5, 3.0]),
        record(4.0, [5.5, 6.5, 12.0]),  # ends too late
        record(11.5, [12.0]),  # sent too late
    ]
    result = _result("http://x", Load(clients=1, seconds=10, warm_up=1), records, 1.0, 11.0)
    (one,) = result.requests
    assert (one.ttft_s, one.tpot_s, one.latency_s, one.output) == (1.0, 0.5, 2.0, 3)
    assert (result.ttft_s, result.tpot_s, result.latency_s) == (1.0, 0.5, 2.0)
    assert result.unfinished == 1
    assert result.tokens_out_per_s == 0.7
    assert result.out_per_s == (2.0, 2.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    assert result.tokens_in_per_s == 2.0
    assert result.requests_per_s == 0.2
