"""Megatron-LM: flags of the launch line; the split as a layout."""

from __future__ import annotations

from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import aim_of
from debubble.plan.emit.layer_layout import write_layout
from debubble.plan.emit.megatron_rules import check_schedule, group_size
from debubble.plan.emit.sizes import (
    DATA_PARALLEL,
    MICROBATCH_SIZE,
    divides_note,
    explain_names,
    shell_product,
    shell_shrunk,
)
from debubble.plan.emit.text import comment, flags

_LAYOUT_REPLACES = (
    "The layout replaces --num-layers-per-virtual-pipeline-stage,",
    "--num-virtual-stages-per-pipeline-rank, --decoder-first-pipeline-num-layers,",
    "--decoder-last-pipeline-num-layers and --account-for-...: take those out.",
    "Assumes a decoder without multi-token prediction (m) and no --hybrid-layer-pattern.",
)


def emit(change: Change, setting: Setting) -> str:
    """Write the flags of pretrain_gpt.py that bring the change about."""
    aim = aim_of(change, setting)
    check_schedule("Megatron", change, aim)
    words = [f"--pipeline-model-parallel-size {aim.ranks}"]
    notes = ["Megatron-LM: flags of the launch line."]
    if aim.split is not None:
        words.append(f"--pipeline-model-parallel-layout '{write_layout(aim.split)}'")
        notes += _LAYOUT_REPLACES
    elif aim.chunks == 1 and change.schedule is not None:
        notes.append("Without virtual stages Megatron runs 1F1B: nothing else is needed.")
    if change.microbatches is not None:
        words.append(_sizes(change, setting, change.microbatches))
        notes.append("The global batch is microbatches * micro batch * data parallel.")
        notes += divides_note(change, setting) if change.hold == "batch" else []
    group = group_size(aim)
    if group is not None:
        words.append(f"--microbatch-group-size-per-virtual-pipeline-stage {group}")
    if change.overlap:
        words.append("--overlap-p2p-communication-warmup-flush")
        notes.append("Take --no-overlap-p2p-communication out.")
    elif change.overlap is False:
        words.append("--no-overlap-p2p-communication")
    text = flags(words)
    return comment(*notes, *explain_names(text)) + text


def _sizes(change: Change, setting: Setting, microbatches: int) -> str:
    if change.hold == "batch":
        return f"--micro-batch-size {shell_shrunk(change, setting)}"
    factors = {MICROBATCH_SIZE: setting.microbatch_size, DATA_PARALLEL: setting.data_parallel}
    return f"--global-batch-size {shell_product(microbatches, factors)}"
