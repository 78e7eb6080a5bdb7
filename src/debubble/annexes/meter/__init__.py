"""A running job in → its bubble, all the time, without the profiler.

The package is itself the function: `debubble.meter()`. It needs torch and the standard library.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from debubble.annexes.meter.session import meter

if TYPE_CHECKING:
    from debubble.annexes.meter.running import Meter

__all__ = ["meter"]


class _CallablePackage(ModuleType):
    """`debubble.meter` is this package: calling it must work too."""

    def __call__(self, **settings: Any) -> Meter:
        """Begin to meter; see `debubble.annexes.meter.session.meter`."""
        return meter(**settings)


sys.modules[__name__].__class__ = _CallablePackage
