"""Annotations in → which pass each piece of work belongs to, where the schedule says so itself.

Labels name passes, they never time them: `Forward 3` includes the wait for its input.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import I32, I64, UNKNOWN, PassKind
from debubble.timeline.work import Work
from debubble.trace.columns import RankTrace

_SIMPLE = re.compile(r"^(Forward|Backward) (\d{1,6})$")
_ACTION = re.compile(r"^(\d{1,5})([FBIW])(\d{1,6})$")
_OVERLAP = re.compile(r"^PP:\((.+);(.+)\)OVERLAP_F_B$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One or two passes: torch may run a forward and a backward pass under one name."""

    forward: tuple[PassKind, int, int] | None = None
    """Kind, stage (-1 where the name tells none) and microbatch."""
    backward: tuple[PassKind, int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The pass of each piece of work; -1 where it belongs to none."""

    kind: I32
    stage: I32
    microbatch: I32


def parse_label(name: str) -> Label | None:
    """Read `Forward 3`, `PP:1F0`, `PP:(1F6;6B2)OVERLAP_F_B`; None for any other name."""
    simple = _SIMPLE.match(name)
    if simple:
        number = int(simple[2])
        if simple[1] == "Forward":
            return Label(forward=(PassKind.F, UNKNOWN, number))
        return Label(backward=(PassKind.B, UNKNOWN, number))
    both = _OVERLAP.match(name)
    parts = both.groups() if both else (name.removeprefix("PP:"),) if name.startswith("PP:") else ()
    actions = [_parse_action(part) for part in parts]
    if not actions or None in actions:
        return None
    forward = next((action for action in actions if action and action[0] is PassKind.F), None)
    backward = next((action for action in actions if action and action[0] is not PassKind.F), None)
    return Label(forward=forward, backward=backward)


def _parse_action(text: str) -> tuple[PassKind, int, int] | None:
    found = _ACTION.match(text)
    return (PassKind[found[2]], int(found[1]), int(found[3])) if found else None


def has_labels(trace: RankTrace) -> bool:
    """Tell whether the schedule names any pass."""
    return any(parse_label(name) for name in trace.names)


def assign_by_labels(trace: RankTrace, work: Work) -> Assignment | None:
    """Give work to the label whose window holds its launch; None where there are no labels.

    Work of all threads counts: a backward pass is launched by autograd's thread while the label
    stands on the schedule's own.
    """
    labels = [parse_label(name) for name in trace.names]
    named = np.array([label is not None for label in labels] or [False])
    annotations = trace.annotations
    rows = np.flatnonzero(named[annotations.name] & (annotations.stream < 0))
    if not len(rows):
        return None
    table = _tabulate(labels)[annotations.name[rows]]
    starts = annotations.start_ns[rows]
    row = np.searchsorted(starts, work.issued_ns, side="right") - 1
    inside = (row >= 0) & (work.issued_ns < (starts + annotations.duration_ns[rows])[row])
    passes = table[np.maximum(row, 0)]
    has_forward, has_backward = passes[:, 0] >= 0, passes[:, 3] >= 0
    backward = np.where(has_forward & has_backward, work.backward, has_backward)
    chosen = np.where(backward[:, None], passes[:, 3:], passes[:, :3])
    chosen = np.where(inside[:, None], chosen, UNKNOWN).astype(np.int32)
    return Assignment(kind=chosen[:, 0], stage=chosen[:, 1], microbatch=chosen[:, 2])


def _tabulate(labels: list[Label | None]) -> I64:
    """Return six numbers a name: the forward pass and the backward pass, -1 where there is none."""
    nothing = (UNKNOWN, UNKNOWN, UNKNOWN)
    return np.array(
        [
            (*(label.forward or nothing), *(label.backward or nothing)) if label else nothing * 2
            for label in labels
        ],
        dtype=np.int64,
    )
