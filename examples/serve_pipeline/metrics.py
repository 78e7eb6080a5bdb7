"""Counts of what was served, in Prometheus' text format and under vLLM's names."""

from __future__ import annotations

import threading

# vLLM's own buckets for tokens: 1, 2, 5, 10, …
_BUCKETS = tuple(digit * 10**power for power in range(5) for digit in (1, 2, 5))
_PROMPT = "vllm:request_prompt_tokens"
_LABELS = 'model_name="serve_pipeline",engine="0"'


class Metrics:
    """A histogram of the prompts' lengths, and the number of requests that ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts = [0] * (len(_BUCKETS) + 1)
        self.total = 0
        self.waiting = 0
        """Requests that were taken and are not answered yet."""

    def begin(self) -> None:
        """Count a request that came."""
        with self.lock:
            self.waiting += 1

    def add(self, tokens: int) -> None:
        """Count a request that was served."""
        place = sum(tokens > bound for bound in _BUCKETS)
        with self.lock:
            self.counts[place] += 1
            self.total += tokens
            self.waiting -= 1

    def text(self) -> str:
        """Write them as Prometheus reads them."""
        with self.lock:
            counts, total, waiting = list(self.counts), self.total, self.waiting
        lines = [
            f"# HELP {_PROMPT} Number of prefill tokens processed.",
            f"# TYPE {_PROMPT} histogram",
        ]
        below = 0
        for bound, count in zip((*map(float, _BUCKETS), "+Inf"), counts, strict=True):
            below += count
            lines.append(f'{_PROMPT}_bucket{{{_LABELS},le="{bound}"}} {below}')
        lines += [
            f"{_PROMPT}_sum{{{_LABELS}}} {float(total)}",
            f"{_PROMPT}_count{{{_LABELS}}} {below}",
            "# HELP vllm:request_success_total Count of successfully processed requests.",
            "# TYPE vllm:request_success_total counter",
            f'vllm:request_success_total{{{_LABELS},finished_reason="stop"}} {below}',
        ]
        lines += [
            "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.",
            "# TYPE vllm:num_requests_waiting gauge",
            f"vllm:num_requests_waiting{{{_LABELS}}} {float(waiting)}",
        ]
        return "\n".join(lines) + "\n"
