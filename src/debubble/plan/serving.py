"""What a serving engine can be told of its pipeline: one setting, for plans, texts and trials."""

from __future__ import annotations

from dataclasses import dataclass, fields

from debubble.errors import UsageError
from debubble.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSetting:
    """How a model is cut and how batches go through it; None is what is left as it is."""

    stages: int
    layers: tuple[int, ...] | None = None
    """Of each stage."""
    in_flight: int | None = None
    """Batches that are under way at once."""
    tokens_a_batch: int | None = None
    """Most tokens in a batch, of prompts and of answers."""
    requests_a_batch: int | None = None
    """Most requests in a batch."""
    chunk: int | None = None
    """Most tokens of prompts in a batch."""
    answers_a_batch: int | None = None
    """Requests that a chunk shares its batch with, a token each; for engines that count both."""
    dynamic_chunks: float | None = None
    """How far chunks shrink as a prompt gets on, from 0, not at all, to 1, as costs grow."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise UsageError(
                    f"{field.name} is {value}", hint="a setting of a server is 1 or more"
                )
        if self.layers is not None and (len(self.layers) != self.stages or min(self.layers) < 1):
            raise UsageError(
                f"{','.join(map(str, self.layers))} are no layers of "
                f"{counted(self.stages, 'stage')}",
                hint="give each stage one layer or more",
            )
        if self.dynamic_chunks is not None and not 0 <= self.dynamic_chunks <= 1:
            raise UsageError(
                f"dynamic_chunks is {self.dynamic_chunks:g}", hint="give 0 to 1, such as 0.75"
            )

    def __str__(self) -> str:
        return ", ".join(
            [
                *([] if self.layers is None else [f"layers {','.join(map(str, self.layers))}"]),
                *([] if self.in_flight is None else [f"{self.in_flight} in flight"]),
                *([] if self.chunk is None else [f"chunks of {self.chunk}"]),
                *_counted(self.tokens_a_batch, "token"),
                *_counted(self.requests_a_batch, "request"),
                *([] if self.dynamic_chunks is None else [f"dynamic {self.dynamic_chunks:g}"]),
            ]
        )


def _counted(count: int | None, what: str) -> list[str]:
    return [] if count is None else [f"{counted(count, what)} a batch"]
