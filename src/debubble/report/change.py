"""A `Change` in → its words and its JSON out, for verbs whose answers are not typed yet."""

from __future__ import annotations

from typing import Any

import msgspec

from debubble.answers.change import change_part, describe
from debubble.plan.change import Change

__all__ = ["change_json", "describe"]


def change_json(change: Change) -> dict[str, Any]:
    """Return what changes; what stays is left out."""
    found: dict[str, Any] = msgspec.to_builtins(change_part(change))
    return found
