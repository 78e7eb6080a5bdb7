"""vLLM: an environment variable for the split, flags for what a batch holds."""

from __future__ import annotations

from debubble.plan.change import Change, ServingSetting, Setting
from debubble.plan.emit.aim import cannot, comment, flags, partition_variable, serving_setting

_NAME = "vLLM"


def emit(change: Change, setting: Setting) -> str:
    """Write a change of a run."""
    return serve(serving_setting(_NAME, change, setting))


def serve(setting: ServingSetting) -> str:
    """Write the variable and the flags of a setting.

    In flight are as many batches as ranks, or one more. Requests are counted over all of them, and
    tokens of prompts and answers together: what is said of one batch is written so.
    """
    stages, in_flight = setting.stages, setting.in_flight
    if in_flight not in {None, stages, stages + 1}:
        raise cannot(
            _NAME,
            f"to keep {in_flight} batches in flight on {stages} ranks",
            f"it keeps {stages}, or {stages + 1} with --async-scheduling",
        )
    words = [f"--pipeline-parallel-size {stages}"]
    notes = ["vLLM: flags of `vllm serve`."]
    requests = setting.requests_a_batch
    if setting.chunk is not None:
        tokens = setting.chunk + (requests or setting.answers_a_batch or 0)
        words.append(f"--max-num-batched-tokens {tokens}")
        notes.append("Tokens of a batch are a chunk of prompts, and one for each answer beside it.")
    if requests is not None:
        words.append(f"--max-num-seqs {requests * (in_flight or stages)}")
        notes.append("--max-num-seqs counts the requests of all batches in flight together.")
    if in_flight is not None:
        words.append("--async-scheduling" if in_flight > stages else "--no-async-scheduling")
    split = ""
    if setting.layers is not None:
        split = partition_variable(_NAME, "VLLM_PP_LAYER_PARTITION", setting.layers)
    return split + comment(*notes) + flags(words)


EMITTERS = {"vllm": emit}
