"""vLLM: an environment variable for the split, flags for what a batch holds."""

from __future__ import annotations

from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import aim_of_serving, cannot, comment, flags
from debubble.plan.serving import ServingSetting

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


def serve(setting: ServingSetting) -> str:
    """Write the variable and the flags of a whole setting.

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
    if setting.dynamic_chunks is not None:
        raise cannot(_NAME, "to shrink chunks by itself", "set the chunk")
    words = [f"--pipeline-parallel-size {stages}"]
    notes = ["vLLM: flags of `vllm serve`."]
    tokens, chunk, requests = setting.tokens_a_batch, setting.chunk, setting.requests_a_batch
    if tokens is None and chunk is not None:
        tokens, chunk = chunk + (requests or setting.answers_a_batch or 0), None
        notes.append("Tokens of a batch are a chunk of prompts, and one for each answer beside it.")
    if tokens is not None:
        words.append(f"--max-num-batched-tokens {tokens}")
    if chunk is not None:
        words.append(f"--long-prefill-token-threshold {chunk}")
    if requests is not None:
        words.append(f"--max-num-seqs {requests * (in_flight or stages)}")
        notes.append("--max-num-seqs counts the requests of all batches in flight together.")
    if in_flight is not None:
        words.append("--async-scheduling" if in_flight > stages else "--no-async-scheduling")
    split = ""
    if setting.layers is not None:
        split = comment("vLLM: set this the same on every node, before the server starts.")
        split += f'export VLLM_PP_LAYER_PARTITION="{",".join(map(str, setting.layers))}"\n'
    return split + comment(*notes) + flags(words)


EMITTERS = {"vllm": emit}
