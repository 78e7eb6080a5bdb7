"""Which chunk a rank turns to next: its chunks take turns, each with a round of microbatches."""

from __future__ import annotations

from debubble.schedules.model import Action, Kind


def count_rounds(ranks: int, microbatches: int) -> int:
    """Return how many rounds there are: as many as leave each at least a microbatch per rank.

    Megatron wants rounds of exactly `ranks` microbatches, torch only equal ones; where the
    microbatches are a multiple of the ranks, both are the same.
    """
    return max(1, microbatches // ranks)


def round_size(ranks: int, microbatches: int) -> int:
    """Return the microbatches of one round."""
    return microbatches // count_rounds(ranks, microbatches)


def take_turns(
    kind: Kind, rank: int, *, ranks: int, microbatches: int, chunks: int
) -> list[Action]:
    """Return a rank's passes of one kind: F from its first chunk on, all others from its last."""
    size = round_size(ranks, microbatches)
    turns = range(chunks) if kind == "F" else range(chunks - 1, -1, -1)
    return [
        Action(chunk * ranks + rank, kind, microbatch)
        for first in range(0, microbatches, size)
        for chunk in turns
        for microbatch in range(first, first + size)
    ]
