"""A run in → what could be changed, one file a lever.

A module here that has `LEVER` is one.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from debubble.plan.lever import Lever

__all__ = ["LEVERS"]

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
LEVERS: tuple[Lever, ...] = tuple(
    sorted(
        (module.LEVER for module in _MODULES if hasattr(module, "LEVER")),
        key=lambda lever: lever.position,
    )
)
