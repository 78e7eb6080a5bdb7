"""TensorRT-LLM: fields of the LLM API's YAML for the split and for what a batch holds."""

from __future__ import annotations

from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import aim_of_serving, cannot, comment
from debubble.plan.serving import ServingSetting

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


def serve(setting: ServingSetting) -> str:
    """Write the options of the LLM API for a whole setting; as many batches as ranks in flight."""
    if setting.in_flight not in {None, setting.stages}:
        raise cannot(
            _NAME,
            f"to keep {setting.in_flight} batches in flight on {setting.stages} ranks",
            f"it keeps {setting.stages}",
        )
    if setting.dynamic_chunks is not None:
        raise cannot(_NAME, "to shrink chunks by itself", "set the chunk")
    tokens, chunk = setting.tokens_a_batch, setting.chunk
    if chunk is not None and tokens is None:
        tokens = chunk + (setting.requests_a_batch or setting.answers_a_batch or 0)
    options: dict[str, object] = {"pipeline_parallel_size": setting.stages}
    if setting.layers is not None:
        options["pp_partition"] = list(setting.layers)
    if setting.requests_a_batch is not None:
        options["max_batch_size"] = setting.requests_a_batch
    if tokens is not None:
        options["max_num_tokens"] = tokens
    if chunk is not None:
        options["enable_chunked_prefill"] = "true"
    notes = ["TensorRT-LLM: merge into the YAML of the LLM API options, or pass to LLM(...)."]
    if chunk is not None:
        notes.append("Chunks of prompts fill what answers leave of max_num_tokens.")
    return comment(*notes) + "".join(f"{name}: {value}\n" for name, value in options.items())


EMITTERS = {"tensorrt-llm": emit}
