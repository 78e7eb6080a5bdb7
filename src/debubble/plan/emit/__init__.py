"""A change in → the text to paste into a framework's configuration, one file a framework.

What a framework cannot be told is refused with the reason; nothing is left out in silence.

A module here that has `EMITTERS` is a framework: its names, each with what writes a change. Its
`POSITION` says where it stands in lists: what serves first, then what trains, files last. Where it
has `recompute`, that writes what lets backward passes recompute, or keep, activations. An engine
that serves has `serve`, which writes a whole setting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import cannot
from debubble.plan.serving import ServingSetting

__all__ = ["EMITTERS", "SERVERS", "emit", "emit_serving", "refusal_of"]

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
_FRAMEWORKS = sorted(
    (module for module in _MODULES if hasattr(module, "EMITTERS")),
    key=lambda module: int(module.POSITION),
)
EMITTERS: dict[str, Callable[[Change, Setting], str]] = {
    name: write for module in _FRAMEWORKS for name, write in module.EMITTERS.items()
}
_RECOMPUTE: dict[str, Callable[[bool], str]] = {
    name: module.recompute
    for module in _FRAMEWORKS
    for name in module.EMITTERS
    if hasattr(module, "recompute")
}
SERVERS: dict[str, Callable[[ServingSetting], str]] = {
    name: module.serve
    for module in _FRAMEWORKS
    for name in module.EMITTERS
    if hasattr(module, "serve")
}


def refusal_of(framework: str, change: Change, setting: Setting) -> UsageError | None:
    """Return why a framework cannot be told a change; None where it can."""
    try:
        emit(framework, change, setting)
    except UsageError as error:
        return error
    return None


def emit_serving(engine: str, setting: ServingSetting) -> str:
    """Return the text that starts an engine with a setting, or refuse with the reason."""
    if engine not in SERVERS:
        raise UsageError(f"no engine is called {engine!r}", hint=f"one of {', '.join(SERVERS)}")
    return SERVERS[engine](setting)


def emit(framework: str, change: Change, setting: Setting) -> str:
    """Return the text that brings a change about in a framework, or refuse with the reason."""
    if framework not in EMITTERS:
        raise UsageError(
            f"no framework is called {framework!r}", hint=f"one of {', '.join(EMITTERS)}"
        )
    if change.repaired:
        raise cannot(framework, "to repair a link", "repair it, then plan again")
    if change.by_hand:
        raise cannot(framework, f"this: {change.by_hand}", "do it, then plan again")
    if change.recompute is None:
        return EMITTERS[framework](change, setting)
    if framework not in _RECOMPUTE:
        raise cannot(framework, "to recompute activations", "wrap layers in torch's checkpoint()")
    rest = replace(change, recompute=None)
    told = _RECOMPUTE[framework](change.recompute)
    if rest == Change(hold=change.hold):
        return told
    written = EMITTERS[framework](rest, setting)
    if told.startswith("--"):
        return f"{written.rstrip()} \\\n{told}"
    return f"{written}\n{told}"
