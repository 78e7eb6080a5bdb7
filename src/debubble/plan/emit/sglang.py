"""SGLang: an environment variable for the split, flags for batches in flight and their size."""

from __future__ import annotations

from debubble.plan.change import Change, ServingSetting, Setting
from debubble.plan.emit.aim import cannot, comment, flags, partition_variable, serving_setting

_NAME = "SGLang"


def emit(change: Change, setting: Setting) -> str:
    """Write a change of a run."""
    return serve(serving_setting(_NAME, change, setting))


def serve(setting: ServingSetting) -> str:
    """Write the variable and the flags of a setting."""
    stages, split = setting.stages, ""
    if setting.layers is not None:
        if stages == 1:
            raise cannot(_NAME, "a split of one stage", "there is nothing to split on one rank")
        split = partition_variable(_NAME, "SGLANG_PP_LAYER_PARTITION", setting.layers)
    words = [f"--pp-size {stages}"]
    if setting.in_flight is not None:
        # In flight are one batch a rank, and `depth` more.
        depth = setting.in_flight - stages
        if depth < 0:
            raise cannot(
                _NAME,
                f"to keep {setting.in_flight} batches in flight on {stages} ranks",
                f"give {stages} or more",
            )
        words.append(f"--pp-async-batch-depth {depth}")
    if setting.requests_a_batch is not None:
        words.append(f"--pp-max-micro-batch-size {setting.requests_a_batch}")
    if setting.chunk is not None:
        words.append(f"--chunked-prefill-size {setting.chunk}")
    return split + comment("SGLang: flags of the launch line.") + flags(words)


EMITTERS = {"sglang": emit}
