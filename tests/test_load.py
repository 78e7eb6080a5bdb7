"""Loads: which requests are sent, when, and what is measured of them."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.services.example_load import import_load

from debubble.errors import UsageError
from debubble.measure.load_results import parse_load_result

load = import_load()
Load, Request, drive = load.Load, load.Request, load.drive
read_load, summarise = load.read_load, load.summarise


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
    ("words", "problem"),
    [
        ([], "needs clients"),
        (["clients=0"], "needs clients"),
        (["clients=many"], "no number"),
        (["clients=2", "size=3"], "says nothing of a load"),
        (["clients=2", "seconds=0"], "no time"),
        (["clients=2", "prompt=512:x"], "no mix"),
    ],
)
def test_loads_that_cannot_be_are_refused(words, problem):
    with pytest.raises(UsageError, match=problem):
        read_load(words)


def test_a_closed_loop_asks_again_and_counts_what_came():
    load = Load(clients=3, prompt="5", output="4", seconds=0.3, warm_up=0.1)
    with answering() as (url, asked):
        clock = ByRequests(asked)
        result = drive(url, load, clock=clock, sleep=clock.sleep)
    assert {body["model"] for body in asked} == {"the-model"}
    assert {len(body["prompt"]) for body in asked} == {5}
    prompts = [tuple(body["prompt"]) for body in asked]
    assert len(set(prompts)) == len(prompts)  # no cache of prefixes answers
    assert 3 < result["completed"] < len(asked)
    assert (set(result["input_lens"]), set(result["output_lens"])) == ({5}, {4})
    assert (result["failed"], set(result["errors"])) == (0, {""})
    read = parse_load_result(json.dumps(result).encode())
    assert (read.clients, read.rate, len(read.latency_s)) == (3, None, result["completed"])


def test_what_a_server_refuses_is_counted_with_its_words():
    load = Load(clients=1, prompt="1", output="1", seconds=0.25, warm_up=0)
    waited = []

    def sleep(seconds):  # of the client: it waits before it asks again, which takes its time
        waited.append(seconds)

    with answering(refuse=True) as (url, asked):
        result = drive(url, load, clock=lambda: 0.1 * len(waited), sleep=sleep)
    assert result["completed"] == 0
    assert 0 < result["failed"] == len(asked) < 5
    assert result["errors"][0].startswith("429 too many")


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
