"""Two measurements in → what is not the same about them, and whether they can be compared."""

from __future__ import annotations

from debubble.measure.comparison import Difference
from debubble.measure.measurement import Measurement

_ROUNDING = 0.01


def why_not(
    before: Measurement,
    after: Measurement,
    sizes: tuple[float, float] | None,
    target_batch: float | None,
) -> tuple[str, ...]:
    """Say why a difference between the two would mean nothing; empty where it does."""
    reasons = []
    for name, one in (("before", before), ("after", after)):
        if not one.samples:
            reasons.append(f"{name} has no step that could be measured")
        elif one.partial:
            reasons.append(f"{name} is a part of a run: a rank or the whole of a step is missing")
    if before.kind != after.kind:
        reasons.append(f"{before.kind} before, {after.kind} after")
    if len(before.ranks) != len(after.ranks):
        reasons.append(f"{len(before.ranks)} ranks before, {len(after.ranks)} after")
    devices = (before.environment.devices, after.environment.devices)
    if all(devices) and devices[0] != devices[1]:
        reasons.append(f"{_listed(devices[0])} before, {_listed(devices[1])} after")
    if before.split and after.split and sum(before.split) != sum(after.split):
        reasons.append(f"{sum(before.split)} layers before, {sum(after.split)} after")
    contexts = (before.contexts, after.contexts)
    if all(contexts) and not contexts[0] & contexts[1]:
        reasons.append(
            f"context lengths up to {_numbers(contexts[0])} before, {_numbers(contexts[1])} after"
        )
    return (*reasons, *_off_target(sizes, target_batch))


def batches_of(before: Measurement, after: Measurement) -> tuple[float, float] | None:
    """Return the batches in microbatches of the size they have before; None where not known."""
    if before.microbatches is None or after.microbatches is None:
        return None
    scale = 1.0
    if before.tokens and after.tokens:
        scale = after.tokens / before.tokens
    elif before.message_bytes and after.message_bytes:
        scale = after.message_bytes / before.message_bytes
    return float(before.microbatches), after.microbatches * scale


def setting_changes(before: Measurement, after: Measurement) -> tuple[Difference, ...]:
    """List what was changed of the pipeline itself."""
    pairs: dict[str, tuple[object, object]] = {
        "schedule": (before.schedule, after.schedule),
        "split": (_split(before), _split(after)),
        "microbatches": (before.microbatches, after.microbatches),
        "stages": (before.stages, after.stages),
        "message bytes": (before.message_bytes, after.message_bytes),
        "tokens a microbatch": (before.tokens, after.tokens),
        "context lengths up to": (_numbers(before.contexts), _numbers(after.contexts)),
    }
    return _changed(pairs)


def environment_changes(before: Measurement, after: Measurement) -> tuple[Difference, ...]:
    """List what changed beside it, and may be the true cause."""
    first, second = before.environment, after.environment
    pairs: dict[str, tuple[object, object]] = {
        "devices": (_listed(first.devices), _listed(second.devices)),
        "ranks of the job": (first.world_size, second.world_size),
        "record_shapes": (first.record_shapes, second.record_shapes),
        "profile_memory": (first.profile_memory, second.profile_memory),
        "with_stack": (first.with_stack, second.with_stack),
    }
    names = sorted({name for name, _ in (*first.versions, *second.versions)})
    for name in names:
        pairs[name] = (_version(before, name), _version(after, name))
    return _changed(pairs)


def _version(one: Measurement, name: str) -> str:
    return _listed(tuple(v for known, v in one.environment.versions if known == name))


def _off_target(sizes: tuple[float, float] | None, target_batch: float | None) -> tuple[str, ...]:
    if target_batch is None:
        return ()
    if sizes is None:
        return ("the batch is not known, and was to be stated",)
    return tuple(
        f"the batch {name} is {size:g} microbatches, not {target_batch:g}"
        for name, size in zip(("before", "after"), sizes, strict=True)
        if abs(size / target_batch - 1) > _ROUNDING
    )


def _changed(pairs: dict[str, tuple[object, object]]) -> tuple[Difference, ...]:
    return tuple(
        Difference(what=what, before=_shown(first), after=_shown(second))
        for what, (first, second) in pairs.items()
        if first != second
    )


def _shown(value: object) -> str:
    return "not known" if value is None or not str(value) else str(value)


def _split(one: Measurement) -> str | None:
    return ",".join(map(str, one.split)) if one.split else None


def _numbers(values: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(values)))


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)
