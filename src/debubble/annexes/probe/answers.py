"""What `debubble probe` answers."""

from __future__ import annotations

from debubble.report.answers.base import Answer, AnswerWarning, Part


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
    output_bytes: float
    """What goes to the next stage."""
    weight_bytes: float


class PipelinePart(Part, frozen=True, kw_only=True):
    """One pipeline, as simulated."""

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
    memory_limit_bytes: float | None
    pipelines: list[PipelinePart]
    """By throughput."""
    assumptions: list[str]
    written: list[str]
    """Files."""
    warnings: list[AnswerWarning]
