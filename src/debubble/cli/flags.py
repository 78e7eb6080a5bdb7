"""Flags that belong together in → one argument of the verb out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def gathered(name: str, made_by: Callable[..., object], *options: Decorator) -> Decorator:
    """Add options, in the order of `--help`; the verb is handed them as one argument.

    `made_by`, a dataclass or a function, takes them by their names; an option that it does not
    name goes to the verb as it is. Among the options may be groups of their own.
    """
    taken = inspect.signature(made_by).parameters.keys()

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_group(**flags: object) -> object:
            made = made_by(**{flag: flags.pop(flag) for flag in taken})
            return command(**{name: made}, **flags)

        decorated: Callable[..., Any] = with_group
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate
