"""A probe and pipelines of it in → what `debubble probe` answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from debubble.annexes.probe.pipeline import Pipelines, SimulatedPipeline
from debubble.report.answers.base import Answer, AnswerWarning, Part
from debubble.units import NS_PER_S


class TimedPart(Part, frozen=True, kw_only=True):
    """What one part of the model takes with some tokens a microbatch."""

    part: str
    """`embedding`, `layer` or `head`; of a layer, one of them."""
    tokens: int
    forward_s: float
    backward_s: float
    input_grad_s: float
    saved_bytes: float
    """Kept from forward to backward, for each microbatch in flight."""
    weight_bytes: float


class WirePart(Part, frozen=True, kw_only=True):
    """What a message takes."""

    latency_s: float
    bytes_per_s: float
    both_ways: float
    """How many times as long messages take that cross each other."""
    told_by: str


class PipelinePart(Part, frozen=True, kw_only=True):
    """One pipeline, as simulated."""

    paths: ClassVar = {
        "stages": "setting.stages",
        "schedule": "setting.schedule",
        "microbatches": "setting.microbatches",
        "tokens": "setting.tokens",
        "batch_latency_s": "window_ns",
        "peak_memory_bytes": "peak_bytes",
    }

    stages: int
    """Ranks of it."""
    schedule: str
    microbatches: int
    tokens: int
    """Of a microbatch."""
    split: list[int]
    batch_latency_s: float
    bubble_fraction: float
    tokens_per_s: float
    peak_memory_bytes: list[float]
    """Of each rank."""
    fits_memory: bool | None
    """Null where the device's memory is not known."""


class ProbeAnswer(Answer, frozen=True, kw_only=True):
    """What `debubble probe` says."""

    schema: str = "debubble.probe/1"
    model: str
    device: str
    layers: int
    trains: bool
    parts: list[TimedPart]
    slowed_by_each: float
    """What each further rank at work on the same device adds to a pass, as a share."""
    wire: WirePart
    memory_limit_bytes: float | None
    pipelines: list[PipelinePart]
    """By throughput."""
    assumptions: list[str]
    written: list[str]
    """Files."""
    warnings: list[AnswerWarning]


def answer_probe(
    pipelines: Pipelines,
    found: Sequence[SimulatedPipeline],
    *,
    limit_bytes: float | None,
    written: Sequence[str],
) -> ProbeAnswer:
    """Put what was timed and what was simulated into one answer."""
    probe = pipelines.probe
    limit = limit_bytes if limit_bytes is not None else probe.device_bytes
    return ProbeAnswer.of(
        probe,
        parts=[
            TimedPart(
                part=part,
                tokens=tokens,
                forward_s=costs.passes[part]["F"] / NS_PER_S,
                backward_s=costs.passes[part]["B"] / NS_PER_S,
                input_grad_s=costs.passes[part]["I"] / NS_PER_S,
                saved_bytes=costs.saved[part],
                weight_bytes=costs.weights[part],
            )
            for tokens in probe.sizes
            for costs in [probe.at(tokens)]
            for part in costs.passes
            if costs.passes[part]["F"] > 0
        ],
        slowed_by_each=probe.slope,
        wire=WirePart.of(pipelines.wire),
        memory_limit_bytes=limit,
        pipelines=[
            PipelinePart.of(
                pipeline,
                fits_memory=None if limit is None else max(pipeline.peak_bytes) <= limit,
            )
            for pipeline in found
        ],
        assumptions=list(pipelines.assumptions()),
        written=list(written),
        warnings=[],
    )
