"""Recomputed activations: the setting of each framework that has one."""

from __future__ import annotations

from debubble.plan.emit.refuse import cannot
from debubble.plan.emit.text import comment, flags

_FLAGS = {
    "megatron": (
        ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"],
        "Take --recompute-granularity, --recompute-method and --recompute-num-layers out.",
    ),
    "torchtitan": (
        ["--activation_checkpoint.mode full"],
        "Set --activation_checkpoint.mode none.",
    ),
}
_DEEPSPEED = "module = PipelineModule(..., activation_checkpoint_interval={interval})\n"


def emit(framework: str, *, on: bool) -> str:
    """Write what lets backward passes recompute, or keep, activations."""
    name = framework.partition("@")[0]
    if name == "deepspeed":
        return comment("DeepSpeed: layers between checkpoints; 0 keeps everything.") + (
            _DEEPSPEED.format(interval=int(on))
        )
    if name not in _FLAGS:
        raise cannot(framework, "to recompute activations", "wrap layers in torch's checkpoint()")
    words, off = _FLAGS[name]
    return flags(words) if on else comment(off)
