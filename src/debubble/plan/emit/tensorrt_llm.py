"""TensorRT-LLM: a field of the LLM API's YAML for the split. All else is its own."""

from __future__ import annotations

from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import aim_of_serving, cannot, comment

_NAME = "TensorRT-LLM"


def emit(change: Change, setting: Setting) -> str:
    """Write the options of the LLM API that set the split."""
    aim = aim_of_serving(
        _NAME,
        change,
        setting,
        one_stage="change the split: a rank holds one stage there",
        overlap="change the split",
    )
    if change.microbatches is not None:
        raise cannot(_NAME, "a number of microbatches", "change the split")
    entries = ", ".join(map(str, aim.split or ()))
    return (
        comment(
            "TensorRT-LLM: merge into the YAML of the LLM API options, or pass to LLM(...).",
            "The embedding stays on the first rank, norm and head on the last.",
        )
        + f"pipeline_parallel_size: {aim.ranks}\n"
        + f"pp_partition: [{entries}]\n"
    )


POSITION = 30
EMITTERS = {"tensorrt-llm": emit}
