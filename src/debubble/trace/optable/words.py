"""The words of op tables: how shops spell columns, units and operations, and what we call them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from debubble.units import NS_PER_S, NS_PER_US

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Op(IntEnum):
    """What a row of an op table did."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    INPUT_GRAD = 3
    WEIGHT_GRAD = 4
    FORWARD_SEND = 5
    FORWARD_RECEIVE = 6
    BACKWARD_SEND = 7
    BACKWARD_RECEIVE = 8
    COLLECTIVE = 9
    OPTIMIZER = 10


NS_PER: Final[Mapping[str, int]] = {"s": NS_PER_S, "ms": 1_000_000, "us": NS_PER_US, "ns": 1}
# ByteDance's published tables, whose `start_ts` and `duration` name no unit, are in seconds.
DEFAULT_UNIT: Final = "s"

# Each field of ours, and the columns it may be called by; where a table has several, the first.
ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "step": ("step", "step_id", "global_step", "train_step", "iteration", "iter"),
    "pipeline": ("pipeline", "pipeline_id", "dp_rank", "data_parallel_rank", "replica"),
    "stage": ("stage", "stage_id", "pp_stage", "pp_rank", "pipeline_stage", "pipeline_rank"),
    "microbatch": ("microbatch", "micro_batch", "microbatch_id", "micro_batch_id", "mb_id", "mb"),
    "op": ("op", "optype", "op_type", "operation", "op_name", "type", "name"),
    "rank": ("rank", "global_rank", "world_rank"),
    "bytes": ("bytes", "message_bytes", "size_bytes", "nbytes"),
    "peer": ("peer", "peer_rank"),
    "layer": ("layer", "layer_id", "layer_index"),
}
# The same for times, without the unit that follows: `start_us`, `dur_ms`.
TIME_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "start": ("start", "start_ts", "start_time", "begin", "begin_ts", "ts", "timestamp"),
    "duration": ("duration", "dur", "elapsed"),
    "end": ("end", "end_ts", "end_time", "stop"),
}

_SPLIT: Final = re.compile(r"[^a-z0-9]+")
_COLLECTIVE: Final = re.compile(r"all-?reduce|reduce-?scatter|all-?gather|all-?to-?all|broadcast")
_OPTIMIZER: Final = re.compile(r"optimi[sz]er|optim(?:-|$)")
_FORWARD, _BACKWARD = r"(?:f|fw|fwd|forward)", r"(?:b|bw|bwd|backward)"
_SEND, _RECEIVE = r"i?send", r"i?(?:recv|receive)"
_RULES: Final = tuple(
    (re.compile(f"(?:{pattern})"), op)
    for pattern, op in (
        (f"{_FORWARD}(?:-(?:compute|pass|step))?", Op.FORWARD),
        (f"(?:full-)?{_BACKWARD}(?:-(?:compute|pass|step))?", Op.BACKWARD),
        (rf"i|input-grad(?:ient)?s?|dgrad|{_BACKWARD}-(?:input|dgrad)", Op.INPUT_GRAD),
        (rf"w|weight-grad(?:ient)?s?|wgrad|{_BACKWARD}-(?:weight|wgrad)", Op.WEIGHT_GRAD),
        (f"{_FORWARD}-{_SEND}|{_SEND}-{_FORWARD}", Op.FORWARD_SEND),
        (f"{_FORWARD}-{_RECEIVE}|{_RECEIVE}-{_FORWARD}", Op.FORWARD_RECEIVE),
        (f"{_BACKWARD}-{_SEND}|{_SEND}-{_BACKWARD}", Op.BACKWARD_SEND),
        (f"{_BACKWARD}-{_RECEIVE}|{_RECEIVE}-{_BACKWARD}", Op.BACKWARD_RECEIVE),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which column holds which field; times with the unit that their name tells, or none."""

    fields: Mapping[str, str]
    units: Mapping[str, str]
    repeated: tuple[str, ...]
    """Columns that we would use but that the table has twice."""


def classify_op(name: str) -> Op:
    """Say what an operation's name means; OTHER where it means nothing to us."""
    spelled = _SPLIT.sub("-", name.strip().lower()).strip("-")
    for rule, op in _RULES:
        if rule.fullmatch(spelled):
            return op
    if _OPTIMIZER.match(spelled):
        return Op.OPTIMIZER
    return Op.COLLECTIVE if _COLLECTIVE.search(spelled) else Op.OTHER


def find_columns(names: Iterable[str]) -> Layout:
    """Recognise a table's columns by their names."""
    spelled: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for name in names:
        plain = _SPLIT.sub("_", name.strip().lower()).strip("_")
        spelled.setdefault(plain, name)
        counts[plain] += 1
    fields: dict[str, str] = {}
    units: dict[str, str] = {}
    for field, aliases in ALIASES.items():
        found = next((alias for alias in aliases if alias in spelled), None)
        if found is not None:
            fields[field] = found
    for field, aliases in TIME_ALIASES.items():
        wanted = [(f"{a}_{unit}", unit) for a in aliases for unit in NS_PER]
        wanted += [(alias, "") for alias in aliases]
        time = next((pair for pair in wanted if pair[0] in spelled), None)
        if time is not None:
            fields[field], units[field] = time
    return Layout(
        fields={field: spelled[plain] for field, plain in fields.items()},
        units=units,
        repeated=tuple(spelled[plain] for plain in fields.values() if counts[plain] > 1),
    )


def spellings(field: str) -> str:
    """List the names that a field is looked for under, for error messages."""
    if field in ALIASES:
        return ", ".join(ALIASES[field])
    return ", ".join((f"{TIME_ALIASES[field][0]}_us (or _s, _ms, _ns)", *TIME_ALIASES[field]))
