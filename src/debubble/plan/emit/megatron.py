"""A change in → Megatron's flags.

E is the embedding, t a layer, L head and loss, `|` ends a stage; `x*n` and `(...)*n` repeat. Stages
stand in the order in which the model runs through them, with virtual stages as well: stage i is
virtual stage i // ranks of rank i % ranks.
"""

from __future__ import annotations

from itertools import groupby

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import (
    Aim,
    aim_of,
    batch_factors,
    cannot,
    comment,
    divides_note,
    explain_names,
    flags,
    microbatches_of,
    shell_product,
    shell_shrunk,
)
from debubble.timeline.schedules.named import count_rounds, round_size

# Without overlap Megatron's interleaved schedule exchanges in pairs, which needs a third rank.
_LEAST_RANKS_WITHOUT_OVERLAP = 3
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
        notes.append("The global batch is microbatches * micro batch * data parallel.")
        if change.hold == "batch":
            words.append(f"--micro-batch-size {shell_shrunk(change, setting)}")
            notes += divides_note(change, setting)
        else:
            batch = shell_product(change.microbatches, batch_factors(setting))
            words.append(f"--global-batch-size {batch}")
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


def recompute(on: bool) -> str:
    """Write what lets backward passes recompute, or keep, activations."""
    if not on:
        return comment(
            "Take --recompute-granularity, --recompute-method and --recompute-num-layers out."
        )
    return flags(
        ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    )


def write_layout(split: tuple[int, ...]) -> str:
    """Write a split as a layout, equal neighbours folded."""
    if len(split) == 1:
        return f"E{_layers(split[0])}L"
    first, *middle, last = split
    parts = [f"E{_layers(first)}|"]
    for layers, group in groupby(middle):
        count = len(list(group))
        stage = f"{_layers(layers)}|"
        parts.append(stage if count == 1 else f"({stage})*{count},")
    return "".join([*parts, f"{_layers(last)}L"])


def _layers(count: int) -> str:
    return "t" * count if count < 2 else f"t*{count}"


def check_schedule(framework: str, change: Change, aim: Aim) -> None:
    """Refuse a schedule that Megatron does not have, or sizes that its own cannot have."""
    if change.schedule is not None and change.schedule not in {"1f1b", "interleaved-1f1b"}:
        raise cannot(
            framework,
            f"to run {change.schedule}",
            "it has 1f1b, and interleaved-1f1b where --chunks is 2 or more",
        )
    if aim.chunks > 1:
        microbatches = microbatches_of(aim)
        if aim.ranks == 1:
            raise UsageError(
                f"{framework} has no virtual stages on one rank", hint="use --chunks 1"
            )
        if microbatches < aim.ranks or microbatches % count_rounds(aim.ranks, microbatches):
            raise UsageError(
                f"{framework} cannot cut {microbatches} microbatches into equal groups of "
                f"{aim.ranks} or more",
                hint=f"give a multiple of {aim.ranks} microbatches",
            )
    if change.overlap is not None and aim.chunks == 1:
        raise cannot(
            framework,
            "to overlap transfers without virtual stages",
            "give --schedule interleaved-1f1b --chunks 2 as well",
        )
    if change.overlap is False and aim.ranks < _LEAST_RANKS_WITHOUT_OVERLAP:
        raise UsageError(
            f"{framework} needs 3 ranks or more for virtual stages without overlap",
            hint="leave the overlap on",
        )


def group_size(aim: Aim) -> int | None:
    """Return how many microbatches a virtual stage takes at a time, where it is not its default."""
    if aim.chunks == 1 or aim.microbatches is None:
        return None
    size = round_size(aim.ranks, aim.microbatches)
    return None if size == aim.ranks else size


EMITTERS = {"megatron": emit}
