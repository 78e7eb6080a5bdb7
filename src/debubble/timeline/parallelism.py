"""Process groups in → what each is for, how a job is divided, and whose framework runs it.

Frameworks name their groups, and so tell themselves and what a collective is for (recorded):

    PIPELINE_MODEL_PARALLEL_GROUP  [0, 2]   Megatron-core 0.19
    TENSOR_MODEL_PARALLEL_GROUP    [0, 1]     its all-reduces are work of passes
    DATA_PARALLEL_GROUP_WITH_CP    [0, 1]     its gathers and reductions run beside passes
    mesh_pp  mesh_tp  mesh_fsdp  mesh_batch   torchtitan 0.2; other torch meshes are called alike
    undefined                                 DeepSpeed 0.19, which names none
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from debubble.trace.columns import Group


class Role(StrEnum):
    """What the members of a group share."""

    PIPELINE = "pipeline"
    INNER = "inner"
    """A stage: tensor, context, sequence and expert parallelism. Part of passes."""
    DATA = "data"
    """Gradients and sharded parameters. Beside passes, whenever it runs."""
    MODEL = "model"
    """All stages of a model: norms, tied embeddings. Outside passes."""
    UNKNOWN = "unknown"


def _words(*words: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|[^a-z])(?:{'|'.join(words)})(?:[^a-z]|$)", re.IGNORECASE)


# In this order: Megatron's `TENSOR_AND_DATA_PARALLEL_GROUP` is for data, its
# `EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP` for the norm of all gradients of a model.
_ROLES = (
    (
        Role.MODEL,
        re.compile(
            r"MODEL_PIPELINE|^\S* ?MODEL_PARALLEL_GROUP|EMBEDDING_GROUP|OPTIMIZER_INSTANCE_GROUP"
        ),
    ),
    (
        Role.DATA,
        _words(
            "dp", "ddp", "fsdp", "efsdp", "hsdp", "edp", "data", "replicate", "shard", "batch",
            "loss",
        ),
    ),
    (Role.PIPELINE, _words("pp", "pipe", "pipeline")),
    (Role.INNER, _words("tp", "cp", "ep", "sp", "etp", "tensor", "context", "expert", "sequence")),
)  # fmt: skip


def role_of(group: Group) -> Role:
    """Say what a group is for, by its name and description; unknown where they tell nothing."""
    text = f"{group.name} {group.description}"
    return next((role for role, pattern in _ROLES if pattern.search(text)), Role.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How a job is divided over its ranks; None where the groups do not tell."""

    framework: str | None = None
    """`megatron`, `torchtitan`, `deepspeed`; None where nothing tells."""
    tensor: int | None = None
    context: int | None = None
    expert: int | None = None
    data: int | None = None
    """Replicas: samples of a batch are divided over so many."""
    sharded: int | None = None
    """Ranks that share one copy of the parameters, where they are fully sharded."""
    microbatch_size: int | None = None
    """Samples of a microbatch."""
    sequence: int | None = None
    """Tokens of a sample, as messages hold them: with sequence parallelism, of one rank's share."""

    @property
    def microbatch_tokens(self) -> int | None:
        """Tokens of one microbatch, where both sizes are known."""
        if self.microbatch_size is None or self.sequence is None:
            return None
        return self.microbatch_size * self.sequence


_DIMENSIONS = 3
_MEGATRON = "PIPELINE_MODEL_PARALLEL_GROUP"
# A torch mesh may be anybody's; this one is torchtitan's own.
_TORCHTITAN = "mesh_loss_mesh"
_SIZES = {
    "tensor": ("TENSOR_MODEL_PARALLEL_GROUP", "mesh_tp"),
    "context": ("CONTEXT_PARALLEL_GROUP", "mesh_cp"),
    "expert": ("EXPERT_MODEL_PARALLEL_GROUP", "mesh_ep"),
    "data": ("DATA_PARALLEL_GROUP", "mesh_batch"),
    "sharded": ("mesh_fsdp",),
}


def divide(groups: Iterable[Group]) -> Parallelism:
    """Read a rank's groups: it is a member of each, so that their sizes are the job's."""
    size = {group.description: len(group.ranks) for group in groups if group.ranks}
    framework = None
    if _MEGATRON in size:
        framework = "megatron"
    elif _TORCHTITAN in size:
        framework = "torchtitan"
    found = {
        what: next((size[name] for name in names if name in size), None)
        for what, names in _SIZES.items()
    }
    return Parallelism(framework=framework, **found)


def read_shape(parallelism: Parallelism, shape: str) -> Parallelism:
    """Tell samples and tokens by a message: Megatron writes [tokens, samples, width], others not.

    Where nobody's framework is known, neither is which of the two comes first.
    """
    sizes = [int(size) for size in shape.split("x")] if shape else []
    if len(sizes) != _DIMENSIONS or parallelism.framework is None:
        return parallelism
    first, second, _ = sizes
    if parallelism.framework == "megatron":
        return replace(parallelism, microbatch_size=second, sequence=first)
    return replace(parallelism, microbatch_size=first, sequence=second)
