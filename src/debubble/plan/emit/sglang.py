"""SGLang: an environment variable for the split, flags for batches in flight and their size."""

from __future__ import annotations

from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import (
    aim_of_serving,
    cannot,
    comment,
    divides_note,
    explain_names,
    flags,
    shell_shrunk,
)
from debubble.plan.serving import ServingSetting

_NAME = "SGLang"


def emit(change: Change, setting: Setting) -> str:
    """Write the split as an environment variable and the microbatches as flags."""
    aim = aim_of_serving(
        _NAME,
        change,
        setting,
        one_stage="change the split: a rank holds one stage in SGLang",
        overlap="--pp-async-batch-depth puts more microbatches in flight",
    )
    parts: list[str] = []
    if aim.split is not None:
        if aim.ranks == 1:
            raise cannot(_NAME, "a split of one stage", "there is nothing to split on one rank")
        entries = ",".join(map(str, aim.split))
        parts += [
            comment(
                "SGLang: set this the same on every node, before the server starts.",
                "The embedding stays on the first rank, norm and head on the last.",
            ),
            f'export SGLANG_PP_LAYER_PARTITION="{entries}"\n',
        ]
    if change.microbatches is None:
        return "".join([*parts, comment(f"It goes with: --pp-size {aim.ranks}")])
    # In flight are one microbatch a rank, and `depth` more.
    depth = change.microbatches - aim.ranks
    if depth < 0:
        raise cannot(
            _NAME,
            f"to keep {change.microbatches} microbatches in flight on {aim.ranks} ranks",
            f"give {aim.ranks} or more",
        )
    words = [f"--pp-size {aim.ranks}", f"--pp-async-batch-depth {depth}"]
    notes = ["SGLang: flags of the launch line."]
    if change.hold == "batch":
        notes += divides_note(change, setting)
        words.append(f"--pp-max-micro-batch-size {shell_shrunk(change, setting)}")
    text = flags(words)
    return "".join([*parts, comment(*notes, *explain_names(text)), text])


def serve(setting: ServingSetting) -> str:
    """Write the variables and the flags of a whole setting."""
    stages = setting.stages
    exports = {}
    if setting.layers is not None and stages > 1:  # of one rank it is not read
        exports["SGLANG_PP_LAYER_PARTITION"] = f'"{",".join(map(str, setting.layers))}"'
    words = [f"--pp-size {stages}"]
    if setting.in_flight is not None:
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
    chunk = setting.chunk or setting.tokens_a_batch
    if chunk is not None:
        words.append(f"--chunked-prefill-size {chunk}")
    if setting.chunk is not None and setting.tokens_a_batch is not None:
        words.append(f"--max-prefill-tokens {setting.tokens_a_batch}")
    if setting.dynamic_chunks is not None:
        words.append("--enable-dynamic-chunking")
        exports["SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR"] = f"{setting.dynamic_chunks:g}"
    split = ""
    if exports:
        split = comment("SGLang: set this the same on every node, before the server starts.")
        split += "".join(f"export {name}={value}\n" for name, value in exports.items())
    return split + comment("SGLang: flags of the launch line.") + flags(words)


EMITTERS = {"sglang": emit}
