"""vLLM: an environment variable for the split. Batches in flight and schedule are its own."""

from __future__ import annotations

from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import aim_of_serving, cannot, comment

_NAME = "vLLM"


def emit(change: Change, setting: Setting) -> str:
    """Write the environment variable that sets the split."""
    aim = aim_of_serving(
        _NAME,
        change,
        setting,
        one_stage="change the split: a rank holds one stage in vLLM",
        overlap="--async-scheduling puts one more batch in flight",
    )
    if change.microbatches is not None:
        raise cannot(
            _NAME,
            "a number of microbatches: as many batches are in flight as there are ranks",
            "--max-num-seqs and --max-num-batched-tokens set the size of each",
        )
    entries = ",".join(map(str, aim.split or ()))
    return (
        comment(
            "vLLM: set this the same on every node, before the server starts.",
            "The embedding stays on the first rank, norm and head on the last.",
        )
        + f'export VLLM_PP_LAYER_PARTITION="{entries}"\n'
        + comment(f"It goes with: vllm serve ... --pipeline-parallel-size {aim.ranks}")
    )


POSITION = 10
EMITTERS = {"vllm": emit}
