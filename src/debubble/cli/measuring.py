"""What the user calls a run in → its measurement, for the verbs that hold runs against others."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from debubble.errors import MissingExtra, RunNotFound
from debubble.measure.measurement import Measurement
from debubble.measure.store import Store, default_url


def with_tokens(measurement: Measurement, tokens: int | None) -> Measurement:
    """Add the tokens of a microbatch, where the user knows them."""
    return measurement if tokens is None else replace(measurement, tokens=tokens)


def store_url(stated: str | None) -> str:
    """Return the store that was stated, or the user's own, whose folder is made."""
    if stated is not None:
        return stated
    url = default_url(os.environ, Path.home())
    Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    return url


def recall(name: str, stated: str | None) -> list[Measurement]:
    """Return what the history holds under a name; nothing where there is no history at all."""
    if os.path.lexists(name) or "://" in name:
        return []
    own = default_url(os.environ, Path.home()).removeprefix("sqlite:///")
    if stated is None and not Path(own).exists():
        return []
    try:
        store = Store(store_url(stated), read_only=True)
    except MissingExtra:
        if stated is None:
            return []
        raise
    try:
        return [record.measurement for record in store.named(name)]
    except RunNotFound:
        return []
    finally:
        store.close()
