"""Clients that wait for answers of a server in → what they saw, as `vllm bench serve` writes it.

For the demo, the examples and the tests: small, seeded, and without a tokenizer. Each client asks
OpenAI's completions route, streamed, and again as soon as it has its answer. Real servers have real
generators (`vllm bench serve`, guidellm, aiperf), and `debubble tune --load` takes any of them.

`python load.py URL clients=8 prompt=512 output=48`.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from debubble.errors import CaptureError, UsageError
from debubble.units import parse_lengths

# What requests that are under way at the end may take to come to theirs.
_DRAIN_S = 60.0
_ANSWER_S = 600.0
# A server that refuses is not asked again at once.
_REFUSED_S = 0.1
# Token numbers that every model has, and none of the special ones at the start.
_FIRST_TOKEN, _LAST_TOKEN = 1000, 9999


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of a server, and for how long."""

    clients: int
    """Each asks again as soon as it has its answer."""
    prompt: str = "512"
    """Tokens of a prompt: one length, or a mix such as 512:0.8,2048:0.2."""
    output: str = "48"
    """Tokens of an answer, likewise."""
    seconds: float = 30.0
    """What is measured."""
    warm_up: float = 5.0
    """Seconds before that, which do not count."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise UsageError("a load needs clients", hint="give 1 or more")
        if self.seconds <= 0 or self.warm_up < 0:
            raise UsageError("there is no time to measure in", hint="give seconds=30")
        for text in (self.prompt, self.output):
            parse_lengths(text)

    def requests(self) -> Iterator[tuple[int, int]]:
        """Yield the tokens of each request and of its answer, the same ones for the same seed."""
        draw = random.Random(self.seed)  # noqa: S311 (a load, no secret)
        mixes = [
            list(zip(*parse_lengths(text), strict=True)) for text in (self.prompt, self.output)
        ]
        while True:
            prompt, output = (draw.choices(*mix)[0] for mix in mixes)
            yield prompt, output


def read_load(words: Sequence[str]) -> Load:
    """Read `clients=8 prompt=512:0.8,2048:0.2 output=48 seconds=30`."""
    kinds: dict[str, Callable[[str], Any]] = {
        "clients": int, "seed": int, "seconds": float, "warm_up": float
    }  # fmt: skip
    names = [known.name for known in fields(Load)]
    values: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        name = name.replace("-", "_")
        if name not in names or not sign:
            raise UsageError(f"{word!r} says nothing of a load", hint=f"some of {', '.join(names)}")
        try:
            values[name] = kinds.get(name, str)(text)
        except ValueError as error:
            raise UsageError(f"{text!r} is no number", hint=f"write {name}=8") from error
    if "clients" not in values:
        raise UsageError("a load needs clients", hint="write clients=8")
    return Load(**values)


@dataclass(slots=True)
class Request:
    """What came of a request so far: one client writes it."""

    prompt: int
    sent_s: float
    tokens: list[float] = field(default_factory=list)
    """When each event with tokens came."""
    output: int = 0
    """How many tokens they were."""
    ended_s: float | None = None
    problem: str = ""


class _Clients:
    """The requests under way, and those that were made."""

    def __init__(self, url: str, load: Load, clock: Callable[[], float]) -> None:
        self.parts = urlsplit(url)
        if self.parts.scheme not in {"http", "https"}:
            raise UsageError(f"{url!r} is no address", hint="such as http://127.0.0.1:8000")
        self.load, self.clock = load, clock
        self.lock = threading.Lock()
        self.lengths = load.requests()
        self.made: list[Request] = []
        self.model = self._model()

    def _connect(self) -> http.client.HTTPConnection:
        secure = self.parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(self.parts.netloc, timeout=_ANSWER_S)

    def _model(self) -> str | None:
        """Return the name that the server wants to be asked by."""
        connection = self._connect()
        try:
            connection.request("GET", f"{self.parts.path.rstrip('/')}/v1/models")
            data = json.loads(connection.getresponse().read())
            return str(data["data"][0]["id"])
        except OSError as error:
            raise CaptureError(
                f"{self.parts.geturl()}: {error}", hint="does the server run?"
            ) from error
        except (ValueError, LookupError, TypeError, RecursionError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def ask(self) -> Request:
        """Send the next request, and note when its tokens come."""
        with self.lock:
            prompt, output = next(self.lengths)
            draw = random.Random(self.load.seed * 1_000_003 + len(self.made))  # noqa: S311
            request = Request(prompt, self.clock())
            self.made.append(request)
        body: dict[str, Any] = {
            # No two prompts are alike: a cache of prefixes would answer for the model.
            "prompt": draw.choices(range(_FIRST_TOKEN, _LAST_TOKEN), k=prompt),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.model is not None:
            body["model"] = self.model
        connection = self._connect()
        try:
            self._post(connection, json.dumps(body), request)
        except (OSError, http.client.HTTPException, ValueError) as error:
            request.problem = str(error) or type(error).__name__
        finally:
            connection.close()
        return request

    def _post(self, connection: http.client.HTTPConnection, body: str, request: Request) -> None:
        path = f"{self.parts.path.rstrip('/')}/v1/completions"
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            words = answer.read(300).decode("utf-8", "replace").strip()
            request.problem = f"{answer.status} {answer.reason}: {words}"
            return
        counted = None
        for line in answer:
            text = line.strip().removeprefix(b"data:").strip()
            if not text or text == b"[DONE]":
                continue
            data = json.loads(text)
            if any(choice.get("text") for choice in data.get("choices") or ()):
                request.tokens.append(self.clock())
            counted = (data.get("usage") or {}).get("completion_tokens") or counted
        if not request.tokens:
            request.problem = "it answered without a token"
            return
        # Engines may send several tokens at once: what they say in the end is believed.
        request.output = counted or len(request.tokens)
        request.ended_s = request.tokens[-1]


def drive(
    url: str,
    load: Load,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Put a load on a server; return what its users saw, with vLLM's names."""
    clients = _Clients(url, load, clock)
    start = clock() + load.warm_up
    end = start + load.seconds

    def keep_asking() -> None:
        while clock() < end:
            if clients.ask().problem:
                sleep(_REFUSED_S)

    threads = [threading.Thread(target=keep_asking, daemon=True) for _ in range(load.clients)]
    for thread in threads:
        thread.start()
    sleep(max(0.0, end - clock()))
    deadline = clock() + _DRAIN_S
    for thread in threads:
        thread.join(max(0.0, deadline - clock()))
    return summarise(clients.made, load, start, end)


def summarise(made: Sequence[Request], load: Load, start: float, end: float) -> dict[str, Any]:
    """Return what `vllm bench serve --save-detailed` would write of the requests in that time.

    Requests count that were sent and answered in it; tokens, also those of others that came in it.
    """
    sent = [request for request in made if start <= request.sent_s < end]
    failed = [request.problem for request in sent if request.problem]
    done = [r for r in sent if r.ended_s is not None and r.ended_s < end]
    came = sum(
        request.output / len(request.tokens) if request.output else 1.0
        for request in made
        for at in tuple(request.tokens)
        if start <= at < end
    )
    ttfts = [request.tokens[0] - request.sent_s for request in done]
    tpots = [
        (request.tokens[-1] - request.tokens[0]) / (request.output - 1)
        for request in done
        if request.output > 1
    ]
    return {
        "label": f"debubble {load.prompt} in, {load.output} out, seed {load.seed}",
        "num_prompts": len(done) + len(failed),
        "request_rate": "inf",
        "max_concurrency": load.clients,
        "duration": end - start,
        "completed": len(done),
        "failed": len(failed),
        "total_input_tokens": sum(request.prompt for request in done),
        "total_output_tokens": sum(request.output for request in done),
        "output_throughput": came / (end - start),
        "median_ttft_ms": 1e3 * median(ttfts) if ttfts else None,
        "median_tpot_ms": 1e3 * median(tpots) if tpots else None,
        "input_lens": [request.prompt for request in done] + [0] * len(failed),
        "output_lens": [request.output for request in done] + [0] * len(failed),
        "ttfts": ttfts + [0.0] * len(failed),
        "itls": [[b - a for a, b in pairwise(r.tokens)] for r in done] + [[] for _ in failed],
        "errors": [""] * len(done) + failed,
    }


def main(words: Sequence[str]) -> int:
    """Drive a server as the words say, and print what came of it as JSON."""
    if not words:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    result = drive(words[0], read_load(words[1:]))
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if result["completed"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UsageError, CaptureError) as error:
        sys.exit(f"error: {error}\nhint: {error.hint}")
