"""Counts of what was served, in Prometheus' text format and under vLLM's names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

# vLLM's own buckets for tokens: 1, 2, 5, 10, …; and some for times.
_TOKENS = tuple(float(digit * 10**power) for power in range(5) for digit in (1, 2, 5))
_TIMES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_LABELS = 'model_name="serve_pipeline",engine="0"'


@dataclass(slots=True)
class Histogram:
    """How many values lie below each bound."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count one more."""
        self.counts[sum(value > bound for bound in self.bounds)] += 1
        self.total += value

    def lines(self, name: str) -> Iterator[str]:
        """Write it as Prometheus reads it."""
        below = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{{_LABELS},le="{bound}"}} {below}'
        yield f"{name}_sum{{{_LABELS}}} {self.total}"
        yield f"{name}_count{{{_LABELS}}} {below}"


class Metrics:
    """What the engine tells of itself; its own thread counts, any thread may ask."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.gauges = {"vllm:num_requests_running": 0, "vllm:num_requests_waiting": 0}
        self.counters = {
            "vllm:prompt_tokens_total": 0,
            "vllm:generation_tokens_total": 0,
            "vllm:request_success_total": 0,
        }
        self.histograms = {
            "vllm:request_prompt_tokens": Histogram(_TOKENS),
            "vllm:request_generation_tokens": Histogram(_TOKENS),
            "vllm:time_to_first_token_seconds": Histogram(_TIMES),
            "vllm:inter_token_latency_seconds": Histogram(_TIMES),
            "vllm:e2e_request_latency_seconds": Histogram(_TIMES),
        }

    def queues(self, *, running: int, waiting: int) -> None:
        """Say how many requests are in batches, and how many are in none yet."""
        with self.lock:
            self.gauges["vllm:num_requests_running"] = running
            self.gauges["vllm:num_requests_waiting"] = waiting

    def first_token(self, *, prompt: int, after_s: float) -> None:
        """Count a prompt that was computed, and the first token of its answer."""
        with self.lock:
            self.counters["vllm:prompt_tokens_total"] += prompt
            self.counters["vllm:generation_tokens_total"] += 1
            self.histograms["vllm:time_to_first_token_seconds"].add(after_s)

    def next_token(self, *, after_s: float) -> None:
        """Count another token of an answer."""
        with self.lock:
            self.counters["vllm:generation_tokens_total"] += 1
            self.histograms["vllm:inter_token_latency_seconds"].add(after_s)

    def served(self, *, prompt: int, answer: int, after_s: float) -> None:
        """Count a request that ended."""
        with self.lock:
            self.counters["vllm:request_success_total"] += 1
            self.histograms["vllm:request_prompt_tokens"].add(prompt)
            self.histograms["vllm:request_generation_tokens"].add(answer)
            self.histograms["vllm:e2e_request_latency_seconds"].add(after_s)

    def text(self) -> str:
        """Write them as Prometheus reads them."""
        lines = []
        with self.lock:
            for kind, numbers in (("gauge", self.gauges), ("counter", self.counters)):
                for name, value in numbers.items():
                    lines += [f"# TYPE {name} {kind}", f"{name}{{{_LABELS}}} {float(value)}"]
            for name, histogram in self.histograms.items():
                lines += [f"# TYPE {name} histogram", *histogram.lines(name)]
        return "\n".join(lines) + "\n"
