"""A running job in → trace files out. Needs torch and the standard library alone.

The package is itself the function: `with debubble.capture(schedule): …`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from debubble.capture.session import capture, step

if TYPE_CHECKING:
    from debubble.capture.recording import Session

__all__ = ["capture", "step"]


class _CallablePackage(ModuleType):
    """`debubble.capture` names the package as soon as it is imported: calling it must work too."""

    def __call__(self, *arguments: Any, **settings: Any) -> Session:
        """Begin a capture; see `debubble.capture.session.capture`."""
        return capture(*arguments, **settings)


sys.modules[__name__].__class__ = _CallablePackage
