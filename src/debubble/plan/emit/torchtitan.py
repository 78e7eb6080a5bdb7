"""A change in → torchtitan's flags."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import (
    MICROBATCH_SIZE,
    Aim,
    aim_of,
    comment,
    divides_note,
    explain_names,
    flags,
    only_splits,
    shell_product,
    shell_shrunk,
)
from debubble.plan.emit.order_file import say_order
from debubble.plan.emit.torch import split_backward_notes, torch_schedule
from debubble.timeline.schedules import Shape, place_stages

_NAME = "torchtitan"
_TOKENS = "TOKENS_PER_MICROBATCH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a kind of model calls its parts."""

    before: tuple[str, ...]
    """On the first stage, ahead of the layers."""
    layer: str
    """Each layer's name up to its number."""
    after: tuple[str, ...]
    """On the last stage, behind the layers."""
    everywhere: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What a version calls things."""

    version: str
    head: str
    split: str
    counts_microbatches: bool
    """It takes their number; else their size, and the number follows from the batch."""


V0_2_2 = Dialect(
    version="0.2.2", head="output", split="module_fqns_per_model_part", counts_microbatches=False
)
V0_3_0 = Dialect(
    version="0.3.0", head="lm_head", split="module_fqns_per_model_part", counts_microbatches=False
)
MAIN = Dialect(
    version="main",
    head="lm_head",
    split="pipeline_parallel_module_fqns_per_model_part",
    counts_microbatches=True,
)


def emit(change: Change, setting: Setting, dialect: Dialect = V0_3_0) -> str:
    """Write the flags that bring the change about."""
    aim = aim_of(change, setting)
    words = [f"--parallelism.pipeline_parallel_degree {aim.ranks}"]
    notes = [f"torchtitan {dialect.version}: flags of the launch line."]
    if aim.split is not None:
        names = Names(before=("tok_embeddings",), layer="layers.", after=("norm", dialect.head))
        stages = modules_of_stages(aim.split, names)
        words.append(f"--parallelism.{dialect.split} {' '.join(map(','.join, stages))}")
        notes += [
            describe(names, sum(aim.split)),
            "Leave pipeline_parallel_layers_per_stage unset.",
        ]
        if dialect is MAIN:
            notes.append(
                "Earlier states of main called it --parallelism.module_fqns_per_model_part."
            )
    if change.microbatches is not None:
        words += _sizes(change, setting, change.microbatches, dialect)
        notes += _batch_notes(change, setting, dialect)
    if not only_splits(change):
        words += _schedule(change, aim, shlex.quote(setting.order_file))
        if words[-1].endswith(f"_csv {shlex.quote(setting.order_file)}"):
            notes.append(say_order(setting))
        notes += split_backward_notes(aim)
    text = flags(words)
    if _TOKENS in text:
        notes.append(f"Set {_TOKENS} first: num_tokens_per_microbatch_per_dp_rank as it is now.")
    return comment(*notes, *explain_names(text)) + text


def recompute(on: bool) -> str:
    """Write what lets backward passes recompute, or keep, activations."""
    if on:
        return flags(["--activation_checkpoint.mode full"])
    return comment("Set --activation_checkpoint.mode none.")


def modules_of_stages(split: tuple[int, ...], names: Names) -> list[list[str]]:
    """Return the modules of each stage, in order."""
    stages = [
        [f"{names.layer}{number}" for number in range(first, end)]
        for first, end in pairwise(accumulate(split, initial=0))
    ]
    stages[0] = [*names.before, *stages[0]]
    stages[-1] = [*stages[-1], *names.after]
    return [[*stage, *names.everywhere] for stage in stages]


def describe(names: Names, layers: int) -> str:
    """Return what is assumed of the model, for a comment."""
    numbered = f"{names.layer}0 to {names.layer}{layers - 1}" if layers > 1 else f"{names.layer}0"
    parts = [*names.before, numbered, *names.after, *names.everywhere]
    return f"Assumes modules called {', '.join(parts)}: put in the names of your model."


def _sizes(change: Change, setting: Setting, microbatches: int, dialect: Dialect) -> list[str]:
    if dialect.counts_microbatches:
        words = [f"--parallelism.num_pp_microbatches {microbatches}"]
        if change.hold == "batch":
            # Tokens are not known from samples.
            unknown = Setting(ranks=setting.ranks, microbatches=setting.microbatches)
            size = shell_shrunk(change, unknown, _TOKENS)
            words.append(f"--training.num_tokens_per_microbatch_per_dp_rank {size}")
        return words
    if change.hold == "batch":
        size = shell_shrunk(change, setting)
        return [f"--parallelism.pipeline_parallel_microbatch_size {size}"]
    batch = shell_product(microbatches, {MICROBATCH_SIZE: setting.microbatch_size})
    return [f"--training.local_batch_size {batch}"]


def _batch_notes(change: Change, setting: Setting, dialect: Dialect) -> list[str]:
    if change.hold == "batch":
        return divides_note(change, setting)
    whole = "num_tokens_per_train_step" if dialect.counts_microbatches else "global_batch_size"
    return [f"The batch grows: let training.{whole} grow with it, where it is set."]


def _schedule(change: Change, aim: Aim, order_file: str) -> list[str]:
    known = torch_schedule(_NAME, change, aim)
    if known is not None:
        return [f"--parallelism.pipeline_parallel_schedule {known.name}"]
    file = order_file if aim.in_a_new_file else shlex.quote(aim.schedule or "")
    return [
        f"--parallelism.pipeline_parallel_schedule {_placing_name(aim)}",
        f"--parallelism.pipeline_parallel_schedule_csv {file}",
    ]


def _placing_name(aim: Aim) -> str:
    """Return the schedule that places stages as the order does: beside a file, it does no more."""
    if aim.placement == place_stages(Shape.LOOP, aim.ranks, aim.chunks):
        return "PipelineScheduleSingle" if aim.chunks == 1 else "PipelineScheduleMulti"
    if aim.placement == place_stages(Shape.V, aim.ranks, aim.chunks) and aim.chunks == 2:
        return "ZBVZeroBubble"
    raise UsageError(
        "torchtitan places stages in a loop or in a V, this order does neither",
        hint="give an order whose stages run around the ranks",
    )


EMITTERS = {
    "torchtitan": emit,
    "torchtitan@0.2.2": partial(emit, dialect=V0_2_2),
    "torchtitan@main": partial(emit, dialect=MAIN),
}
