"""A package that has the name of a verb in → one that can be called as the verb.

`debubble.links` is both: the room that judges hops and, called, what `debubble links` answers.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class VerbPackage(ModuleType):
    """Calling it is calling the function of its name in `debubble.api`."""

    def __call__(self, *given: Any, **asked: Any) -> Any:
        """Answer as the verb does; see `debubble.api`."""
        verb = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module("debubble.api"), verb)(*given, **asked)


def let_be_called(package: str) -> None:
    """Let a package be called as the verb of its name."""
    sys.modules[package].__class__ = VerbPackage
