"""What the front tells the ranks: how the model is cut, which batch comes next, when to profile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the model is cut, what a batch may hold, and where the ranks meet."""

    layers: tuple[int, ...]
    """Of each stage."""
    slots: int
    """Batches in flight; each has a part of the KV cache."""
    seats: int
    """Requests of a batch."""
    longest: int
    """Tokens of a request, its answer with it."""
    width: int
    layer_us: int
    token_us: int
    """What a layer takes at least: by itself, and for each token; else what it computes."""
    labels: bool
    store: str

    @property
    def ranks(self) -> int:
        """One a stage."""
        return len(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What goes through all stages at once: a chunk of one prompt, and a token of each answer."""

    number: int
    slot: int
    seat: int
    """Whose prompt it is."""
    at: int
    """Tokens of that prompt that were computed before."""
    chunk: int
    rows: tuple[int, ...]
    """Seats whose answers go on by a token."""
    lengths: tuple[int, ...]
    """Tokens in the cache of each of them."""
    words: tuple[int, ...] = ()
    """The tokens themselves, for the first rank."""

    @property
    def tokens(self) -> int:
        """All that it computes."""
        return self.chunk + len(self.rows)

    @property
    def label(self) -> str:
        """Its name, as vLLM's workers give it."""
        count = len(self.rows)
        return f"execute_context_{int(self.chunk > 0)}({self.chunk})_generation_{count}({count})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Profile from the next batch on, so many of them or until told to stop."""

    folder: str
    batches: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Write what was profiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """No more will come."""


Order = Batch | Start | Stop | End
