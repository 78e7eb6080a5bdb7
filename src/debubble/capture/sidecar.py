"""What the profiler cannot see, written beside each trace: `rankN.debubble.json`."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from debubble import __version__
from debubble.capture.environment import describe_environment, describe_memory
from debubble.capture.files import CaptureFiles
from debubble.capture.pipeline import Pipeline
from debubble.capture.settings import Settings

SCHEMA = "debubble.sidecar/1"


@dataclass(slots=True, kw_only=True)
class Latencies:
    """How long each step took, without the profiler and under it, in seconds."""

    before: list[float] = field(default_factory=list)
    profiled: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """Return them with their medians, and by how much the profiler slowed the job."""
        unprofiled = _median(self.before + self.after)
        profiled = _median(self.profiled)
        return {
            "before_s": self.before,
            "profiled_s": self.profiled,
            "after_s": self.after,
            "unprofiled_median_s": unprofiled,
            "profiled_median_s": profiled,
            "overhead_fraction": profiled / unprofiled - 1 if profiled and unprofiled else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that goes into a sidecar."""

    files: CaptureFiles
    world_size: int
    first_step: int
    labels: str | None
    pipeline: Pipeline
    settings: Settings
    latencies: Latencies


def write_sidecar(facts: Facts) -> None:
    """Write or rewrite the sidecar; nobody ever sees half of it."""
    text = json.dumps(_as_data(facts), indent=2)
    with facts.files.replacing(facts.files.sidecar) as partial:
        partial.write_text(text + "\n", "utf-8")


def _as_data(facts: Facts) -> dict[str, Any]:
    settings, pipeline = facts.settings, facts.pipeline
    return {
        "schema": SCHEMA,
        "debubble": __version__,
        "capture": facts.files.name,
        "trace": facts.files.trace.name,
        "rank": facts.files.rank,
        "world_size": facts.world_size,
        "first_step": facts.first_step,
        "written_unix_s": time.time(),
        "pipeline": {
            "schedule": pipeline.schedule_name,
            "schedule_class": pipeline.schedule_class,
            "microbatches": pipeline.microbatches,
            "stages": pipeline.all_stages,
            "held_stages": pipeline.held_stages,
            "split": _as_list(settings.split),
            "labels": facts.labels,
        },
        "workload": {
            "tokens": settings.tokens,
            "context_lengths": _as_list(settings.context_lengths),
        },
        "steps": facts.latencies.as_data(),
        "memory": describe_memory(),
        "environment": describe_environment(),
        "tags": dict(settings.tags),
    }


def _as_list(numbers: tuple[int, ...] | None) -> list[int] | None:
    return None if numbers is None else list(numbers)


def _median(times: list[float]) -> float | None:
    return median(times) if times else None
