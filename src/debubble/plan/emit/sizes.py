"""How large batch and microbatch become when the number of microbatches changes.

Traces seldom tell how many samples a microbatch has. Where it is not known, sizes are written as
arithmetic over a name that the user sets, and that fails loudly where it is not set.
"""

from __future__ import annotations

from math import gcd, prod

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting

MICROBATCH_SIZE = "MICROBATCH_SIZE"
DATA_PARALLEL = "DATA_PARALLEL"
_MEANING = {
    MICROBATCH_SIZE: "the samples of one microbatch as the run is now",
    DATA_PARALLEL: "the replicas of the model, each with a share of the batch",
}


def shrunk_size(change: Change, setting: Setting) -> tuple[int, int] | int:
    """Return the size of a microbatch if the batch is held; where unknown, the ratio to now."""
    now, then = setting.microbatches, change.microbatches
    if now is None or then is None:
        raise UsageError(
            "how many microbatches the run has is not known",
            hint="hold the microbatch instead of the batch",
        )
    if setting.microbatch_size is None:
        common = gcd(now, then)
        return now // common, then // common
    batch = now * setting.microbatch_size
    if batch % then:
        raise UsageError(
            f"a batch of {batch} samples does not cut into {then} equal microbatches",
            hint="hold the microbatch instead, or take a number that divides the batch",
        )
    return batch // then


def shell_shrunk(change: Change, setting: Setting, name: str = MICROBATCH_SIZE) -> str:
    """Write the size of a microbatch, if the batch is held, for a shell."""
    size = shrunk_size(change, setting)
    if isinstance(size, int):
        return str(size)
    return f"$(({_scaled(f'${{{name}:?}}', size, '/')}))"


def python_shrunk(change: Change, setting: Setting, now: str) -> str:
    """Write the size of a microbatch, if the batch is held, for Python; `now` is what it is."""
    size = shrunk_size(change, setting)
    return str(size) if isinstance(size, int) else _scaled(now, size, "//")


def divides_note(change: Change, setting: Setting) -> list[str]:
    """Return what an unknown size must divide by, as a line, if the batch is held."""
    size = shrunk_size(change, setting)
    if isinstance(size, int) or size[1] == 1:
        return []
    return [f"The size of a microbatch as it is now must divide by {size[1]}."]


def shell_product(microbatches: int, factors: dict[str, int | None]) -> str:
    """Write microbatches times further factors, each known or a name, for a shell."""
    known, names = _parts(microbatches, factors)
    if not names:
        return str(known)
    return f"$(({' * '.join([str(known), *(f'${{{name}:?}}' for name in names)])}))"


def python_product(microbatches: int, factors: dict[str, int | None]) -> str:
    """Write microbatches times further factors, each known or a name, for Python."""
    known, names = _parts(microbatches, factors)
    return " * ".join([str(known), *names])


def explain_names(text: str) -> list[str]:
    """Return a line for each name in a text that the user has to set."""
    return [f"Set {name} first: {meaning}." for name, meaning in _MEANING.items() if name in text]


def _scaled(now: str, ratio: tuple[int, int], divided_by: str) -> str:
    times = "" if ratio[0] == 1 else f" * {ratio[0]}"
    return f"{now}{times}" + ("" if ratio[1] == 1 else f" {divided_by} {ratio[1]}")


def _parts(microbatches: int, factors: dict[str, int | None]) -> tuple[int, list[str]]:
    known = prod((size for size in factors.values() if size is not None), start=microbatches)
    return known, [name for name, size in factors.items() if size is None]
