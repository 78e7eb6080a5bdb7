"""A serving engine's address and a mix of requests in → what its users would see, measured.

Over OpenAI's completions route, streamed, so that first tokens and later ones are timed apart. A
closed loop keeps so many clients waiting for answers; an open loop sends requests at a rate, with
exponential pauses between them, whether answers come or not. The same seed sends the same requests.

Needs the standard library alone: `python -m debubble.load URL clients=8 prompt=512 output=48`.
"""

from __future__ import annotations

import csv
import http.client
import io
import itertools
import json
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from debubble.errors import CaptureError, UsageError

SCHEMA = "debubble.load/1"
# Throughput is counted in so many equal parts of the time: a spread needs samples.
SLICES = 10
# What requests that are under way at the end may take to come to theirs.
_DRAIN_S = 60.0
_ANSWER_S = 600.0
# A server that refuses is not asked again at once.
_REFUSED_S = 0.1
# Token numbers that every model has, and none of the special ones at the start.
_FIRST_TOKEN, _LAST_TOKEN = 1000, 9999
# What traces of requests call the tokens of a prompt and of its answer, without case and signs.
_PROMPTS = (
    "prompttokens",
    "inputtokens",
    "contexttokens",
    "requesttokens",
    "inputlength",
    "prompt",
)
_OUTPUTS = ("outputtokens", "generatedtokens", "responsetokens", "completiontokens", "outputlength",
            "output")  # fmt: skip
_PART = re.compile(r"^(\d+)(?::([0-9.]+))?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of a server, and for how long."""

    prompt: str = "512"
    """Tokens of a prompt: one length, or a mix such as 512:0.8,2048:0.2."""
    output: str = "48"
    """Tokens of an answer, likewise."""
    trace: str | None = None
    """A file of requests, CSV or JSON lines, whose lengths are sent in their order instead."""
    clients: int | None = None
    """Of a closed loop: each asks again as soon as it has its answer."""
    rate: float | None = None
    """Of an open loop: requests a second."""
    seconds: float = 30.0
    """What is measured."""
    warm_up: float = 5.0
    """Seconds before that, which do not count."""
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.clients is None) == (self.rate is None):
            raise UsageError(
                "a load has clients or a rate",
                hint="write clients=8, or rate=2.5 requests a second",
            )
        if not (self.clients is None or self.clients > 0) or not (
            self.rate is None or self.rate > 0
        ):
            raise UsageError("a load needs clients", hint="give 1 or more, or a rate above 0")
        if self.seconds <= 0 or self.warm_up < 0:
            raise UsageError("there is no time to measure in", hint="give seconds=30")
        for text in (self.prompt, self.output):
            read_mix(text)

    def requests(self) -> Iterator[tuple[int, int]]:
        """Yield the tokens of each request and of its answer, the same ones for the same seed."""
        if self.trace is not None:
            return itertools.cycle(read_requests(self.trace))
        draw = random.Random(self.seed)  # noqa: S311 (a load, no secret)
        mixes = [read_mix(text) for text in (self.prompt, self.output)]

        def drawn() -> Iterator[tuple[int, int]]:
            while True:
                prompt, output = (draw.choices(*mix)[0] for mix in mixes)
                yield prompt, output

        return drawn()


def read_load(words: Sequence[str]) -> Load:
    """Read `clients=8 prompt=512:0.8,2048:0.2 output=48 seconds=30`."""
    kinds: dict[str, Callable[[str], Any]] = {
        "clients": int, "seed": int, "rate": float, "seconds": float, "warm_up": float
    }  # fmt: skip
    names = [field.name for field in fields(Load)]
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
    return Load(**values)


def read_mix(text: str) -> tuple[list[int], list[float]]:
    """Read `512`, or `512:0.8,2048:0.2`: lengths and their shares."""
    parts = [_PART.match(part.strip()) for part in text.split(",")]
    found = [(int(part[1]), float(part[2] or 1.0)) for part in parts if part]
    if len(found) < len(parts) or any(length < 1 or share <= 0 for length, share in found):
        raise UsageError(f"{text!r} is no mix of lengths", hint="write 512, or 512:0.8,2048:0.2")
    return [length for length, _ in found], [share for _, share in found]


def read_requests(file: str) -> list[tuple[int, int]]:
    """Read the lengths of a trace of requests: CSV with a heading, or an object a line."""
    try:
        text = Path(file).read_text("utf-8-sig")
        rows: list[dict[str, Any]]
        if text.lstrip().startswith("{"):
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            rows = list(csv.DictReader(io.StringIO(text)))
        lengths = [(_length(row, _PROMPTS), _length(row, _OUTPUTS)) for row in rows]
        problem = "" if lengths else "it has no rows"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        lengths, problem = [], str(error)
    if problem:
        raise UsageError(
            f"this is no trace of requests: {problem}",
            hint="CSV or JSON lines with columns such as prompt_tokens and output_tokens",
            file=file,
        )
    return lengths


def _length(row: dict[str, Any], names: Sequence[str]) -> int:
    known = {re.sub(r"[^a-z]", "", str(key).lower()): value for key, value in row.items()}
    found = [known[name] for name in names if name in known]
    if not found:
        raise KeyError(f"none of {', '.join(names)} in {', '.join(map(str, row))}")
    # An answer without a token still takes one to end.
    return max(1, int(float(found[0])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request that was measured."""

    prompt: int
    output: int
    """Tokens that came."""
    ttft_s: float
    """Time to the first token."""
    tpot_s: float | None
    """Time per token after the first; None where there was no other."""
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What users saw of a server under a load, the warm-up left out."""

    schema: str
    url: str
    load: Load
    seconds: float
    requests: tuple[Request, ...]
    """Those that were sent and answered in the time that counts."""
    failed: int
    problem: str
    """What the first that failed met."""
    unfinished: int
    """Sent in that time, and not answered in it: their tokens count, their latency does not."""
    requests_per_s: float
    tokens_in_per_s: float
    """Of prompts whose first token came."""
    tokens_out_per_s: float
    out_per_s: tuple[float, ...]
    """The same in equal parts of the time."""
    ttft_s: float | None
    tpot_s: float | None
    latency_s: float | None
    """Medians over the requests."""

    def as_data(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


class _Record:
    """What came of a request so far: one client writes it."""

    def __init__(self, prompt: int, sent_s: float) -> None:
        self.prompt, self.sent_s = prompt, sent_s
        self.tokens: list[tuple[float, int]] = []
        """When something came, and how many tokens it was."""
        self.ended_s: float | None = None
        self.problem = ""


class _Asking:
    """The requests under way, and those that were made."""

    def __init__(self, url: str, load: Load, clock: Callable[[], float]) -> None:
        self.parts = urlsplit(url)
        if self.parts.scheme not in {"http", "https"}:
            raise UsageError(f"{url!r} is no address", hint="such as http://127.0.0.1:8000")
        self.load, self.clock = load, clock
        self.lock = threading.Lock()
        self.requests = load.requests()
        self.number = 0
        self.records: list[_Record] = []
        self.model = self._model()

    def connect(self) -> http.client.HTTPConnection:
        kind = (
            http.client.HTTPSConnection
            if self.parts.scheme == "https"
            else http.client.HTTPConnection
        )
        return kind(self.parts.netloc, timeout=_ANSWER_S)

    def _model(self) -> str | None:
        """Return the name that the server wants to be asked by."""
        connection = self.connect()
        try:
            connection.request("GET", f"{self.parts.path.rstrip('/')}/v1/models")
            answer = connection.getresponse()
            data = json.loads(answer.read())
            return str(data["data"][0]["id"])
        except OSError as error:
            raise CaptureError(
                f"{self.parts.geturl()}: {error}", hint="does the server run?"
            ) from error
        except (ValueError, LookupError, TypeError, RecursionError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def ask(self) -> _Record:
        """Send the next request, and note when its tokens come."""
        with self.lock:
            prompt, output = next(self.requests)
            draw = random.Random(self.load.seed * 1_000_003 + self.number)  # noqa: S311
            self.number += 1
        # No two prompts are alike: a cache of prefixes would answer for the model.
        words = draw.choices(range(_FIRST_TOKEN, _LAST_TOKEN), k=prompt)
        body: dict[str, Any] = {
            "prompt": words,
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.model is not None:
            body["model"] = self.model
        record = _Record(prompt, self.clock())
        with self.lock:
            self.records.append(record)
        try:
            self._post(json.dumps(body), record)
        except (OSError, http.client.HTTPException, ValueError) as error:
            record.problem = str(error) or type(error).__name__
        return record

    def _post(self, body: str, record: _Record) -> None:
        connection = self.connect()
        try:
            path = f"{self.parts.path.rstrip('/')}/v1/completions"
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                said = answer.read(300).decode("utf-8", "replace").strip()
                record.problem = f"{answer.status} {answer.reason}: {said}"
                return
            told = None
            for line in answer:
                text = line.strip().removeprefix(b"data:").strip()
                if not text or text == b"[DONE]":
                    continue
                data = json.loads(text)
                now = self.clock()
                if any(choice.get("text") for choice in data.get("choices") or ()):
                    record.tokens.append((now, 1))
                told = (data.get("usage") or {}).get("completion_tokens") or told
            if not record.tokens:
                record.problem = "it answered without a token"
                return
            # Engines may send several tokens at once: what they say in the end is believed.
            if told is not None and told != len(record.tokens):
                share, more = divmod(told, len(record.tokens))
                record.tokens = [
                    (at, share + (place < more)) for place, (at, _) in enumerate(record.tokens)
                ]
            record.ended_s = record.tokens[-1][0]
        finally:
            connection.close()


def drive(
    url: str,
    load: Load,
    *,
    ended: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> LoadResult:
    """Put a load on a server, and measure what its users see; clients leave when it has `ended`."""
    asking = _Asking(url, load, clock)
    began = clock()
    start, end = began + load.warm_up, began + load.warm_up + load.seconds
    threads: list[threading.Thread] = []

    def begin(work: Callable[[], object]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        threads.append(thread)

    def keep_asking() -> None:
        while clock() < end and not (ended is not None and ended.is_set()):
            if asking.ask().problem:
                sleep(_REFUSED_S)

    if load.clients is not None:
        for _ in range(load.clients):
            begin(keep_asking)
        if ended is None:
            sleep(max(0.0, end - clock()))
        else:
            ended.wait(max(0.0, end - clock()))
    else:
        pauses = random.Random(load.seed)  # noqa: S311 (a load, no secret)
        due = began
        while (due := due + pauses.expovariate(load.rate or 1.0)) < end:
            sleep(max(0.0, due - clock()))
            begin(asking.ask)
        sleep(max(0.0, end - clock()))
    deadline = clock() + _DRAIN_S
    for thread in threads:
        thread.join(max(0.0, deadline - clock()))
    return _result(url, load, asking.records, start, end)


def _result(
    url: str, load: Load, records: Sequence[_Record], start: float, end: float
) -> LoadResult:
    counted = [record for record in records if start <= record.sent_s < end]
    failed = [record for record in counted if record.problem]
    done = [r for r in counted if not r.problem and r.ended_s is not None and r.ended_s < end]
    asked = tuple(map(_asked, done))
    bounds = [start + (end - start) * part / SLICES for part in range(SLICES + 1)]
    came = [
        (at, count, record.prompt if not place else 0)
        for record in list(records)
        for place, (at, count) in enumerate(list(record.tokens))
        if start <= at < end
    ]
    seconds = end - start

    def middle(values: Sequence[float]) -> float | None:
        return median(values) if values else None

    return LoadResult(
        schema=SCHEMA,
        url=url,
        load=load,
        seconds=seconds,
        requests=asked,
        failed=len(failed),
        problem=failed[0].problem if failed else "",
        unfinished=len(counted) - len(failed) - len(done),
        requests_per_s=sum(r.ended_s is not None and start <= r.ended_s < end for r in records)
        / seconds,
        tokens_in_per_s=sum(prompt for _, _, prompt in came) / seconds,
        tokens_out_per_s=sum(count for _, count, _ in came) / seconds,
        out_per_s=tuple(
            sum(count for at, count, _ in came if low <= at < high) * SLICES / seconds
            for low, high in itertools.pairwise(bounds)
        ),
        ttft_s=middle([one.ttft_s for one in asked]),
        tpot_s=middle([one.tpot_s for one in asked if one.tpot_s is not None]),
        latency_s=middle([one.latency_s for one in asked]),
    )


def _asked(record: _Record) -> Request:
    first, last = record.tokens[0][0], record.tokens[-1][0]
    output = sum(count for _, count in record.tokens)
    return Request(
        prompt=record.prompt,
        output=output,
        ttft_s=first - record.sent_s,
        tpot_s=(last - first) / (output - 1) if output > 1 else None,
        latency_s=last - record.sent_s,
    )


def main(words: Sequence[str]) -> int:
    """Drive a server as the words say, and print what came of it as JSON."""
    if not words:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    result = drive(words[0], read_load(words[1:]))
    sys.stdout.write(json.dumps(result.as_data()) + "\n")
    return 0 if result.requests else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UsageError, CaptureError) as error:
        sys.exit(f"error: {error}\nhint: {error.hint}")
