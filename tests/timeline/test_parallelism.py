"""What process groups tell: roles, sizes, frameworks. Names are as recorded."""

from __future__ import annotations

import pytest

from debubble.timeline.model import Parallelism, Role, divide, read_shapes, role_of
from debubble.trace.columns import Group


@pytest.mark.parametrize(
    ("description", "role"),
    [
        ("PIPELINE_MODEL_PARALLEL_GROUP", Role.PIPELINE),
        ("TENSOR_MODEL_PARALLEL_GROUP", Role.INNER),
        ("CONTEXT_PARALLEL_GROUP", Role.INNER),
        ("EXPERT_MODEL_PARALLEL_GROUP", Role.INNER),
        ("DATA_PARALLEL_GROUP_WITH_CP", Role.DATA),
        ("TENSOR_AND_DATA_PARALLEL_GROUP", Role.DATA),
        ("EXPERT_DATA_PARALLEL_GROUP", Role.DATA),
        ("MODEL_PARALLEL_GROUP", Role.MODEL),
        ("EMBEDDING_GROUP", Role.MODEL),
        ("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", Role.MODEL),
        ("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", Role.MODEL),
        ("mesh_pp", Role.PIPELINE),
        ("mesh_tp", Role.INNER),
        ("mesh_cp", Role.INNER),
        ("mesh_fsdp", Role.DATA),
        ("mesh_dp_replicate", Role.DATA),
        ("mesh_batch", Role.DATA),
        ("default_pg", Role.UNKNOWN),
        ("undefined", Role.UNKNOWN),
    ],
)
def test_a_group_is_for_what_its_framework_calls_it(description, role):
    assert role_of(Group(name="31", description=description)) is role


def groups(**sizes):
    return [
        Group(name=str(number), description=description, ranks=tuple(range(size)))
        for number, (description, size) in enumerate(sizes.items())
    ]


def test_torchtitans_meshes_tell_it_and_other_meshes_do_not():
    meshes = groups(mesh_pp=2, mesh_batch=2, mesh_fsdp=2, mesh_tp=1)
    assert divide(meshes).framework is None
    found = divide([*meshes, *groups(mesh_loss_mesh=2)])
    assert found == Parallelism(framework="torchtitan", tensor=1, data=2, sharded=2)


@pytest.mark.parametrize(
    ("framework", "shape", "sizes"),
    [
        ("megatron", "1024x2x4096", (2, 1024)),
        (None, "2x1024x4096", (None, None)),
        ("megatron", "4096", (None, None)),
        ("megatron", "", (None, None)),
    ],
)
def test_messages_tell_samples_and_tokens_in_the_frameworks_own_order(framework, shape, sizes):
    found = read_shapes(Parallelism(framework=framework), {shape: 3, "9": 8} if shape else {})
    assert (found.microbatch_size, found.sequence) == sizes
