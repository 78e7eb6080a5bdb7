"""Python's collector of circles, put off while objects are made by the hundred thousand."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collect_later() -> Iterator[None]:
    """Let the collector rest: programs hold no circles, and it would go through them all each time.

    A tenth of the time of a large plan.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
