"""debubble finds where a pipeline-parallel PyTorch job waits, and what to do about it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# Stable: see docs/reference/python.md.
__all__ = [
    "Analysis",
    "analyse",
    "capture",
    "compare",
    "find",
    "links",
    "meter",
    "picture",
    "plan",
    "simulate",
    "step",
]
_INSIDE_A_JOB = {"capture", "step"}
_VERBS_WITH_A_ROOM = {"links", "plan", "simulate"}


def __getattr__(name: str) -> Any:
    """Give what the API lists, loaded when it is first used: a job needs torch alone."""
    if name == "meter":
        return importlib.import_module("debubble.annexes.meter.session").meter
    if name in _INSIDE_A_JOB:
        package = importlib.import_module("debubble.capture")
        globals()["step"] = package.step  # asked for each step: the next time without coming here
        return package if name == "capture" else package.step
    if name in _VERBS_WITH_A_ROOM:  # the room is the verb: it can be called
        return importlib.import_module(f"debubble.{name}")
    if name in __all__:
        globals()[name] = found = getattr(importlib.import_module("debubble.api"), name)
        return found
    raise AttributeError(f"module 'debubble' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class VerbPackage(ModuleType):
    """A package that has the name of a verb, and is both: `debubble.links` judges hops.

    Calling it is calling the function of its name in `debubble.api`.
    """

    def __call__(self, *given: Any, **asked: Any) -> Any:
        """Answer as the verb does; see `debubble.api`."""
        verb = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module("debubble.api"), verb)(*given, **asked)


def let_be_called(package: str) -> None:
    """Let a package be called as the verb of its name."""
    sys.modules[package].__class__ = VerbPackage
