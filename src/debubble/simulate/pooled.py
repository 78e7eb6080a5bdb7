"""Two measured runs of one model in → one `Source`, and where the two contradict each other.

With as many tokens a microbatch they are put together. With more or fewer they tell how passes and
messages grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from debubble.costs.pass_model import PassModel
from debubble.costs.tokens import Kind, grow_by_one_run, grow_by_two_runs
from debubble.costs.wire_pools import join_pools
from debubble.errors import Code, Gap, UsageError
from debubble.simulate.source import Source
from debubble.timeline.model import PassKind

# Closer than this, two runs have the same number of tokens.
_SAME = 0.01
# Two runs tell how passes grow; the tails of their messages stay a sample of few.
_TWO_RUNS_SPREAD = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """What two runs tell together."""

    source: Source
    token_ratio: float
    """Tokens of the second run over those of the first."""
    gaps: tuple[Gap, ...]

    @property
    def same_tokens(self) -> bool:
        """Whether both runs had microbatches of one size."""
        return same_tokens(self.token_ratio)


def same_tokens(ratio: float) -> bool:
    """Tell whether this is no difference."""
    return abs(ratio - 1) < _SAME


def pool_sources(one: Source, other: Source, stated_ratio: float | None = None) -> Pooled:
    """Add what another run tells; its tokens against the first one's may be stated."""
    _refuse_strangers(one, other)
    ratio = _token_ratio(one, other, stated_ratio)
    first, second = _with_one_slope(one.passes, other.passes)
    if same_tokens(ratio):
        joined = replace(one, passes=_join(first, second), wires=join_pools(one.wires, other.wires))
        return Pooled(source=joined, token_ratio=1.0, gaps=tuple(_contradictions(first, second)))
    grown = replace(
        one,
        passes=replace(
            first,
            growth=grow_by_two_runs(first.base, second.base, ratio),
            growth_spread=_TWO_RUNS_SPREAD,
        ),
        wires=replace(one.wires, other=(ratio, other.wires)),
    )
    return Pooled(source=grown, token_ratio=ratio, gaps=())


def _refuse_strangers(one: Source, other: Source) -> None:
    hint = "--also takes another run of the same model on as many ranks"
    if len(one.ranks) != len(other.ranks):
        raise UsageError(
            f"the runs have {len(one.ranks)} and {len(other.ranks)} ranks in a pipeline", hint=hint
        )
    layers = [None if run.split is None else sum(run.split) for run in (one, other)]
    if layers[0] != layers[1]:
        said = ["unknown" if count is None else str(count) for count in layers]
        raise UsageError(f"layers of the two runs: {said[0]} and {said[1]}", hint=hint)
    if one.split is None and len(one.passes.layers) != len(other.passes.layers):
        raise UsageError(
            "the runs have different stages, and layers could not be told",
            hint="say them with --layers, such as 4,4,4,4",
        )


def _token_ratio(one: Source, other: Source, stated: float | None) -> float:
    """Return how many times as many tokens the other run has: messages are proportional to them."""
    sizes = one.wires.message_bytes, other.wires.message_bytes
    if min(sizes) <= 0:
        if stated is None:
            raise UsageError(
                "messages do not tell how many tokens the runs had",
                hint="say it with --tokens-measured and --also-tokens",
            )
        return stated
    seen = sizes[1] / sizes[0]
    if stated is not None and not same_tokens(stated / seen):
        raise UsageError(
            f"the other run is said to have {stated:.3g} times as many tokens, "
            f"but its messages are {seen:.3g} times as large",
            hint="leave --also-tokens out: messages tell it",
        )
    return seen


def _with_one_slope(one: PassModel, other: PassModel) -> tuple[PassModel, PassModel]:
    """Let ranks slow each other alike in both runs, as in that which shows it more."""
    steeper = one if one.slope >= other.slope else other
    first, second = (
        replace(run.with_slope(steeper.slope), slope_spread=steeper.slope_spread)
        for run in (one, other)
    )
    return first, second


def _join(one: PassModel, other: PassModel) -> PassModel:
    base = {**other.base, **one.base}
    base |= {
        both: (one.base[both] + other.base[both]) / 2 for both in set(one.base) & set(other.base)
    }
    return replace(
        one,
        base=base,
        residuals=np.concatenate((one.residuals, other.residuals)),
        activity={**other.activity, **one.activity},
        growth=grow_by_one_run(base),
    )


def _contradictions(one: PassModel, other: PassModel) -> Iterator[Gap]:
    """Name the kinds of pass whose times differ by more than passes of one run do."""
    apart: dict[Kind, list[float]] = {}
    for kind, first, place in set(one.base) & set(other.base):
        by = other.base[kind, first, place] - one.base[kind, first, place]
        apart.setdefault((kind, first), []).append(by)
    spread = float(np.hypot(one.residuals.std(), other.residuals.std()))
    for (kind, first), logs in sorted(apart.items()):
        factor = float(np.exp(np.mean(logs)))
        if abs(np.mean(logs)) > spread:
            yield Gap(
                code=Code.COSTS_DIFFER,
                message=f"{_name(kind, first=first)} takes {factor:.2f} times as long a layer in "
                f"the other run; within a run passes differ by {spread:.0%}. The mean is used",
                hint="leave --also out, or give a run of the same model, devices and size",
            )


def _name(kind: int, *, first: bool) -> str:
    name = PassKind(kind).name if kind in set(PassKind) else "W of the first stage"
    return f"{name} of the first microbatch" if first else name
