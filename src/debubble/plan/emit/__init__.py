"""A change in → the text to paste into a framework's configuration, one file a framework.

What a framework cannot be told is refused with the reason; nothing is left out in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit import (
    deepspeed,
    megatron,
    nemo,
    nemo_automodel,
    order_file,
    sglang,
    tensorrt_llm,
    torch,
    torchtitan,
    vllm,
)
from debubble.plan.emit.aim import cannot, emit_recompute

__all__ = ["EMITTERS", "can_emit", "emit"]

EMITTERS: dict[str, Callable[[Change, Setting], str]] = {
    "vllm": vllm.emit,
    "sglang": sglang.emit,
    "tensorrt-llm": tensorrt_llm.emit,
    "megatron": megatron.emit,
    "torchtitan": torchtitan.emit,
    "torchtitan@0.2.2": partial(torchtitan.emit, dialect=torchtitan.V0_2_2),
    "torchtitan@main": partial(torchtitan.emit, dialect=torchtitan.MAIN),
    "torch": torch.emit,
    "deepspeed": deepspeed.emit,
    "nemo": nemo.emit,
    "nemo@automodel": nemo_automodel.emit,
    "csv": order_file.emit,
}


def can_emit(framework: str, change: Change, setting: Setting) -> bool:
    """Tell whether a framework can be told a change."""
    try:
        emit(framework, change, setting)
    except UsageError:
        return False
    return True


def emit(framework: str, change: Change, setting: Setting) -> str:
    """Return the text that brings a change about in a framework, or refuse with the reason."""
    if framework not in EMITTERS:
        raise UsageError(
            f"no framework is called {framework!r}", hint=f"one of {', '.join(EMITTERS)}"
        )
    if change.repaired:
        raise cannot(framework, "to repair a link", "repair it, then plan again")
    if change.recompute is None:
        return EMITTERS[framework](change, setting)
    rest = replace(change, recompute=None)
    told = emit_recompute(framework, on=change.recompute)
    if rest == Change(hold=change.hold):
        return told
    written = EMITTERS[framework](rest, setting)
    if told.startswith("--"):
        return f"{written.rstrip()} \\\n{told}"
    return f"{written}\n{told}"
