"""What an option should gain, with its interval → whether to do it, in jobs and in servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

Advice = Literal["yes", "try", "maybe", "noise", "no"]
"""Sure to gain; should, and the run cannot show it; should, and its interval begins in the noise;
within the noise of a run; loses."""

# What buys less is not worth doing, whatever its interval.
WORTH = 0.01
# What should buy this much may be worth a try where its interval is wide: repeated runs differ by
# less (`predict.py` has the measurement).
WORTH_A_TRY = 0.03

_Option = TypeVar("_Option")


def advise(gain: float, low: float, high: float, *, unseen: bool) -> Advice:
    """Return whether to do what gains so much; `unseen`: the run cannot show what it does."""
    if low > WORTH and not unseen:
        return "yes"
    if gain >= WORTH_A_TRY:
        return "try" if unseen else "maybe"
    loses = gain <= 0 if unseen else high < 0
    return "no" if loses else "noise"


def first_of(
    options: Iterable[_Option],
    advice: Callable[[_Option], str],
    remedy: _Option | None = None,
) -> _Option | None:
    """Return what to begin with: what is sure to gain, else a remedy, else what is worth a try.

    Options come in the order of their gains.
    """
    by_advice: dict[str, _Option] = {}
    for option in options:
        text = advice(option)
        by_advice.setdefault("try" if text == "maybe" else text, option)
    return by_advice.get("yes") or remedy or by_advice.get("try")
