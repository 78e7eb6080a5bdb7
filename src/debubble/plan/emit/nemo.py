"""NeMo: Megatron-Bridge's Python configuration. Automodel, the other half of it, is beside."""

from __future__ import annotations

from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import (
    aim_of,
    batch_factors,
    comment,
    divides_note,
    explain_names,
    python_product,
    python_shrunk,
)
from debubble.plan.emit.megatron import check_schedule, group_size, write_layout


def emit(change: Change, setting: Setting) -> str:
    """Write the assignments to a recipe's `cfg`."""
    aim = aim_of(change, setting)
    check_schedule("Megatron-Bridge", change, aim)
    lines = [f"cfg.model.pipeline_model_parallel_size = {aim.ranks}"]
    notes = [
        "Megatron-Bridge: assignments to the `cfg` of your recipe.",
        "NeMo 2 has the same names on its strategy instead of cfg.model.",
    ]
    if aim.split is not None:
        virtual = aim.chunks if aim.chunks > 1 else None
        lines += [
            f"cfg.model.virtual_pipeline_model_parallel_size = {virtual}",
            f'cfg.model.pipeline_model_parallel_layout = "{write_layout(aim.split)}"',
            "cfg.model.num_layers_in_first_pipeline_stage = None",
            "cfg.model.num_layers_in_last_pipeline_stage = None",
            "cfg.model.account_for_embedding_in_pipeline_split = False",
            "cfg.model.account_for_loss_in_pipeline_split = False",
        ]
        notes.append("Assumes a decoder without multi-token prediction.")
    if change.microbatches is not None:
        if change.hold == "batch":
            now = "cfg.train.micro_batch_size"
            lines.append(f"{now} = {python_shrunk(change, setting, now)}")
            notes += divides_note(change, setting)
        else:
            batch = python_product(change.microbatches, batch_factors(setting))
            lines.append(f"cfg.train.global_batch_size = {batch}")
    group = group_size(aim)
    if group is not None:
        lines.append(f"cfg.model.microbatch_group_size_per_vp_stage = {group}")
    if change.overlap is not None:
        lines += [
            f"cfg.comm_overlap.overlap_p2p_comm = {change.overlap}",
            f"cfg.comm_overlap.batch_p2p_comm = {not change.overlap}",
        ]
        notes.append("Assumes that cfg.comm_overlap is set.")
    text = "\n".join(lines) + "\n"
    return comment(*notes, *explain_names(text)) + text


EMITTERS = {"nemo": emit}
