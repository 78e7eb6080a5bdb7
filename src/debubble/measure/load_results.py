"""What a load generator wrote in → what users of a server saw.

The JSON of `vllm bench serve --save-result` (and of the load of the example server), guidellm and
aiperf. With its requests one by one in it (`--save-detailed`, guidellm), each request is a sample;
a summary is one sample of each figure, and it takes several runs to tell a change from noise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from debubble.errors import UsageError
from debubble.measure.measurement import Measurement, ServerSamples
from debubble.timeline.job import Basis
from debubble.units import counted

# Enough of a file to see whose it is: settings come first, lists of requests last.
_HEAD_BYTES = 4096


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a load generator measured of a server."""

    clients: int | None
    """Requests kept under way; None where their number was not limited."""
    rate: float | None
    """Requests sent a second, whatever the server did; None where clients wait for answers."""
    seconds: float
    failed: int
    problem: str
    """What the first request that failed met."""
    prompt_tokens: tuple[float, ...]
    """Of each request that was answered; of a summary the mean alone, and so below."""
    output_tokens: tuple[float, ...]
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    out_per_s: float
    """Tokens of all answers, and below of all prompts, over the whole time."""
    in_per_s: float

    @property
    def load(self) -> str:
        """Which load it was, in words."""
        clients = None if self.clients is None else counted(self.clients, "client")
        if self.rate is None:
            return clients or "all requests at once"
        rate = f"{self.rate:g} requests a second"
        return rate if clients is None else f"{rate}, {clients} at most"

    @property
    def throughputs(self) -> tuple[float, ...]:
        """Samples of tokens of answers a second.

        Requests of a closed loop fall into step, and tokens come in waves. What each request got,
        times the clients, tells more of the server, and leaves out how a load begins and ends.
        """
        if self.clients is None or self.rate is not None or len(self.latency_s) < 2:
            return (self.out_per_s,)
        return tuple(
            self.clients * tokens / latency_s
            for tokens, latency_s in zip(self.output_tokens, self.latency_s, strict=True)
            if latency_s > 0
        )


class _Vllm(msgspec.Struct, frozen=True, kw_only=True):
    """`vllm bench serve`; the lists are there with `--save-detailed`."""

    duration: float
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    output_throughput: float
    failed: int | None = None
    num_prompts: int | None = None
    request_rate: float | str = "inf"
    max_concurrency: int | None = None
    median_ttft_ms: float | None = None
    median_tpot_ms: float | None = None
    median_e2el_ms: float | None = None
    input_lens: list[int] = []
    output_lens: list[int] = []
    ttfts: list[float] = []
    itls: list[list[float]] = []
    errors: list[str] = []

    def result(self) -> LoadResult:
        """Return it as every load is; requests with an error are left out."""
        rate = float(self.request_rate)
        lists = (self.input_lens, self.output_lens, self.ttfts, self.itls)
        errors = self.errors or [""] * len(self.ttfts)
        rows = [
            (prompt, output, ttft, ttft + sum(later))
            for prompt, output, ttft, later, error in zip(*lists, errors, strict=True)
            if not error and output
        ]
        prompts, outputs, ttfts, latencies = (
            [list(column) for column in zip(*rows, strict=True)] if rows else ([], [], [], [])
        )
        tpots = [(end - ttft) / (output - 1) for _, output, ttft, end in rows if output > 1]
        if not rows and self.completed:
            output = self.total_output_tokens / self.completed
            prompts, outputs = [self.total_input_tokens / self.completed], [output]
            ttfts, tpots = _in_s(self.median_ttft_ms), _in_s(self.median_tpot_ms)
            latencies = _in_s(self.median_e2el_ms) or _latency_of(ttfts, tpots, output)
        failed = (self.num_prompts or 0) - self.completed if self.failed is None else self.failed
        return LoadResult(
            clients=self.max_concurrency,
            rate=None if rate == float("inf") else rate,
            seconds=self.duration,
            failed=max(0, failed),
            problem=next(filter(None, self.errors), ""),
            prompt_tokens=tuple(prompts),
            output_tokens=tuple(outputs),
            ttft_s=tuple(ttfts),
            tpot_s=tuple(tpots),
            latency_s=tuple(latencies),
            out_per_s=self.output_throughput,
            in_per_s=self.total_input_tokens / self.duration if self.duration else 0.0,
        )


class _GuideRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    request_latency: float | None = None
    time_to_first_token_ms: float | None = None
    inter_token_latency_ms: float | None = None


class _GuideRequests(msgspec.Struct, frozen=True, kw_only=True):
    successful: list[_GuideRequest] = []
    errored: list[Any] = []


class _GuideStrategy(msgspec.Struct, frozen=True, kw_only=True):
    type_: str = ""
    streams: int | None = None
    max_concurrency: int | None = None
    rate: float | None = None


class _GuideConfig(msgspec.Struct, frozen=True, kw_only=True):
    strategy: _GuideStrategy


class _GuideBenchmark(msgspec.Struct, frozen=True, kw_only=True):
    config: _GuideConfig
    requests: _GuideRequests
    duration: float


class _Guidellm(msgspec.Struct, frozen=True, kw_only=True):
    """guidellm's `benchmarks.json`: one benchmark, for a sweep has as many loads."""

    benchmarks: list[_GuideBenchmark]

    def result(self) -> LoadResult:
        """Return it as every load is."""
        if len(self.benchmarks) != 1:
            raise UsageError(
                f"a report of {counted(len(self.benchmarks), 'benchmark')}",
                hint="give guidellm one load: --profile concurrent --rate 16",
            )
        (benchmark,) = self.benchmarks
        strategy, requests = benchmark.config.strategy, benchmark.requests
        rows = [row for row in requests.successful if row.output_tokens and row.request_latency]
        outputs = [row.output_tokens or 0.0 for row in rows]
        prompts = [row.prompt_tokens or 0.0 for row in rows]
        alone = 1 if strategy.type_ == "synchronous" else None
        seconds = benchmark.duration or 1.0
        return LoadResult(
            clients=strategy.streams or strategy.max_concurrency or alone,
            rate=strategy.rate,
            seconds=benchmark.duration,
            failed=len(requests.errored),
            problem="",
            prompt_tokens=tuple(prompts),
            output_tokens=tuple(outputs),
            ttft_s=tuple(value for row in rows for value in _in_s(row.time_to_first_token_ms)),
            tpot_s=tuple(value for row in rows for value in _in_s(row.inter_token_latency_ms)),
            latency_s=tuple(row.request_latency or 0.0 for row in rows),
            out_per_s=sum(outputs) / seconds,
            in_per_s=sum(prompts) / seconds,
        )


class _Figure(msgspec.Struct, frozen=True, kw_only=True):
    avg: float | None = None
    p50: float | None = None


class _Phase(msgspec.Struct, frozen=True, kw_only=True):
    kind: str = "profiling"
    concurrency: int | None = None
    rate: float | None = None


class _AiperfConfig(msgspec.Struct, frozen=True, kw_only=True):
    phases: list[_Phase] = []


class _Aiperf(msgspec.Struct, frozen=True, kw_only=True):
    """aiperf's `profile_export_aiperf.json`: a summary, times in milliseconds."""

    request_count: _Figure
    output_token_throughput: _Figure
    benchmark_duration: _Figure
    input_sequence_length: _Figure = _Figure()
    output_sequence_length: _Figure = _Figure()
    time_to_first_token: _Figure = _Figure()
    inter_token_latency: _Figure = _Figure()
    request_latency: _Figure = _Figure()
    error_request_count: _Figure = _Figure()
    input_config: _AiperfConfig = msgspec.field(default_factory=_AiperfConfig)

    def result(self) -> LoadResult:
        """Return it as every load is."""
        phases = [phase for phase in self.input_config.phases if phase.kind != "warmup"]
        phase = phases[-1] if phases else _Phase()
        seconds, count = self.benchmark_duration.avg or 0.0, self.request_count.avg or 0.0
        prompts, outputs = (
            () if figure.avg is None or not count else (figure.avg,)
            for figure in (self.input_sequence_length, self.output_sequence_length)
        )
        return LoadResult(
            clients=phase.concurrency,
            rate=phase.rate,
            seconds=seconds,
            failed=round(self.error_request_count.avg or 0.0),
            problem="",
            prompt_tokens=prompts,
            output_tokens=outputs,
            ttft_s=tuple(_in_s(self.time_to_first_token.p50)),
            tpot_s=tuple(_in_s(self.inter_token_latency.p50)),
            latency_s=tuple(_in_s(self.request_latency.p50)),
            out_per_s=self.output_token_throughput.avg or 0.0,
            in_per_s=sum(prompts) * count / seconds if seconds else 0.0,
        )


_FORMATS: tuple[tuple[bytes, type[_Vllm | _Guidellm | _Aiperf]], ...] = (
    (b'"total_input_tokens"', _Vllm),
    (b'"guidellm_version"', _Guidellm),
    (b'"aiperf_version"', _Aiperf),
)
"""What stands in the first lines of a file of each generator, and in no trace."""


def _in_s(ms: float | None) -> list[float]:
    return [] if ms is None else [ms / 1e3]


def _latency_of(ttfts: Sequence[float], tpots: Sequence[float], output: float) -> list[float]:
    """Put a request's latency together, which vLLM's summary has with --percentile-metrics e2el."""
    return [ttft + tpot * (output - 1) for ttft, tpot in zip(ttfts, tpots, strict=False)]


def parse_load_result(text: bytes) -> LoadResult | None:
    """Read what a load generator wrote; None where none of those that are known did."""
    kind = next((kind for sign, kind in _FORMATS if sign in text[:_HEAD_BYTES]), None)
    if kind is None:
        return None
    # Python's own JSON has these two words, and all three generators are written in it.
    numbers = {"Infinity": "inf"}
    try:
        data = json.loads(text, parse_constant=numbers.get)
        return msgspec.convert(data, kind, strict=False).result()
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot be read: {error}", hint="have the load generator write it again"
        ) from error


def read_load_result(file: str | Path) -> LoadResult | None:
    """Return what a load generator wrote into a file; None where it is no such file."""
    try:
        with Path(file).open("rb") as source:
            head = source.read(_HEAD_BYTES)
            if not any(sign in head for sign, _ in _FORMATS):
                return None
            return parse_load_result(head + source.read())
    except (OSError, ValueError):  # no file, and no name of one
        return None
    except UsageError as error:
        error.file = str(file)
        raise


def measure_load(result: LoadResult) -> Measurement:
    """Return what came of a load, as it is compared and kept."""
    if not result.latency_s and not result.ttft_s:
        raise UsageError(
            f"no request was answered in {result.seconds:g} s"
            + (f": {result.problem}" if result.problem else ""),
            hint="give the load more time, or look into the server's output",
        )
    return Measurement(
        kind="serving",
        traced=Basis.UNPROFILED,
        served=ServerSamples(
            load=result.load,
            open_loop=result.rate is not None,
            out_per_s=result.throughputs,
            in_per_s=(result.in_per_s,),
            ttft_s=result.ttft_s,
            tpot_s=result.tpot_s,
            latency_s=result.latency_s,
            failed=result.failed,
            prompt_tokens=fmean(result.prompt_tokens) if result.prompt_tokens else None,
            output_tokens=fmean(result.output_tokens) if result.output_tokens else None,
        ),
    )
