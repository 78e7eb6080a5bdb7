"""TensorRT-LLM: fields of the LLM API's YAML for the split and for what a batch holds."""

from __future__ import annotations

from debubble.plan.change import Change, ServingSetting, Setting
from debubble.plan.emit.aim import cannot, comment, serving_setting

_NAME = "TensorRT-LLM"


def emit(change: Change, setting: Setting) -> str:
    """Write a change of a run."""
    return serve(serving_setting(_NAME, change, setting))


def serve(setting: ServingSetting) -> str:
    """Write the options of the LLM API for a setting; as many batches as ranks in flight."""
    if setting.in_flight not in {None, setting.stages}:
        raise cannot(
            _NAME,
            f"to keep {setting.in_flight} batches in flight on {setting.stages} ranks",
            f"it keeps {setting.stages}",
        )
    notes = ["TensorRT-LLM: merge into the YAML of the LLM API options, or pass to LLM(...)."]
    options: dict[str, object] = {"pipeline_parallel_size": setting.stages}
    if setting.layers is not None:
        notes.append("The embedding stays on the first rank, norm and head on the last.")
        options["pp_partition"] = list(setting.layers)
    requests = setting.requests_a_batch
    if requests is not None:
        options["max_batch_size"] = requests
    if setting.chunk is not None:
        notes.append("Chunks of prompts fill what answers leave of max_num_tokens.")
        options["max_num_tokens"] = setting.chunk + (requests or setting.answers_a_batch or 0)
        options["enable_chunked_prefill"] = "true"
    return comment(*notes) + "".join(f"{name}: {value}\n" for name, value in options.items())


EMITTERS = {"tensorrt-llm": emit}
