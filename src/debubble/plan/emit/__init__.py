"""A change in → the text to paste into a framework's configuration, one file a framework.

What a framework cannot be told is refused with the reason; nothing is left out in silence.

A module here that has `EMITTERS` is a framework: its names, each with what writes a change. Where
it has `recompute`, that writes what lets backward passes recompute, or keep, activations. An engine
that serves has `serve`, which writes a whole setting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from debubble.errors import UsageError
from debubble.plan.change import Change, ServingSetting, Setting
from debubble.plan.emit.aim import cannot

__all__ = ["EMITTERS", "SERVERS", "emit", "emit_serving", "refusal_of"]

# In lists: what serves first, then what trains, those of your own, files last.
_LISTED = (
    *("vllm", "sglang", "tensorrt_llm", "megatron", "torchtitan", "torch", "deepspeed", "nemo"),
    "nemo_automodel",
)
_FILES = "order_file"


def _modules() -> dict[str, ModuleType]:
    """Return the module of each framework, by its names."""
    names = {module.name for module in iter_modules(__path__)}
    own = sorted(names.difference(_LISTED, [_FILES]))
    modules = [import_module(f"{__name__}.{name}") for name in (*_LISTED, *own, _FILES)]
    return {name: module for module in modules for name in getattr(module, "EMITTERS", ())}


_MODULE_OF = _modules()
EMITTERS: dict[str, Callable[[Change, Setting], str]] = {
    name: module.EMITTERS[name] for name, module in _MODULE_OF.items()
}
SERVERS: dict[str, Callable[[ServingSetting], str]] = {
    name: module.serve for name, module in _MODULE_OF.items() if hasattr(module, "serve")
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
    recompute: Callable[[bool], str] | None = getattr(_MODULE_OF[framework], "recompute", None)
    if recompute is None:
        raise cannot(framework, "to recompute activations", "wrap layers in torch's checkpoint()")
    rest = replace(change, recompute=None)
    told = recompute(change.recompute)
    if rest == Change(hold=change.hold):
        return told
    written = EMITTERS[framework](rest, setting)
    if told.startswith("--"):
        return f"{written.rstrip()} \\\n{told}"
    return f"{written}\n{told}"
