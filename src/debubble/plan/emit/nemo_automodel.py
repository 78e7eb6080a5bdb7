"""NeMo Automodel: YAML of a recipe, over torch's schedules and Hugging Face's names."""

from __future__ import annotations

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import (
    Aim,
    aim_of,
    cannot,
    comment,
    microbatches_of,
    only_splits,
    refuse_overlap,
    shrunk_size,
)
from debubble.plan.emit.torch import split_backward_notes, torch_schedule
from debubble.plan.emit.torchtitan import Names, describe, modules_of_stages

_NAME = "NeMo Automodel"
_NAMES = Names(
    before=("model.embed_tokens",),
    layer="model.layers.",
    after=("model.norm", "lm_head"),
    everywhere=("model.rotary_emb",),
)


def emit(change: Change, setting: Setting) -> str:
    """Write the keys of a recipe that bring the change about."""
    aim = aim_of(change, setting)
    refuse_overlap(_NAME, change, "its multi-stage schedules overlap by themselves")
    notes = ["NeMo Automodel: merge into the YAML of your recipe."]
    lines = ["distributed:", f"  pp_size: {aim.ranks}", "  pipeline:"]
    if not only_splits(change):
        lines.append(f"    pp_schedule: {_schedule(change, aim)}")
        notes += split_backward_notes(aim)
    if change.microbatches is not None:
        size = _microbatch_size(change, setting)
        lines.append(f"    pp_microbatch_size: {size}")
    if aim.split is not None:
        lines += ["    layers_per_stage: null", "    module_fqns_per_model_part:"]
        lines += [f"      - [{', '.join(s)}]" for s in modules_of_stages(aim.split, _NAMES)]
        notes.append(describe(_NAMES, sum(aim.split)))
    if change.microbatches is not None:
        lines += ["step_scheduler:", f"  local_batch_size: {change.microbatches * size}"]
    return comment(*notes) + "\n".join(lines) + "\n"


def _schedule(change: Change, aim: Aim) -> str:
    known = torch_schedule(_NAME, change, aim)
    if known is None:
        raise cannot(_NAME, f"to run {aim.schedule}", "it runs torch's own schedules")
    if microbatches_of(aim) < aim.ranks:
        raise UsageError(
            f"{_NAME} needs a microbatch for each of {aim.ranks} ranks, not {aim.microbatches}",
            hint=f"give {aim.ranks} microbatches or more",
        )
    return known.name


def _microbatch_size(change: Change, setting: Setting) -> int:
    """Return the samples of a microbatch after the change: YAML cannot calculate."""
    if setting.microbatch_size is None:
        raise UsageError("the samples of a microbatch are unknown", hint="give --microbatch-size")
    if change.hold == "microbatch":
        return setting.microbatch_size
    size = shrunk_size(change, setting)
    return size if isinstance(size, int) else setting.microbatch_size


EMITTERS = {"nemo@automodel": emit}
