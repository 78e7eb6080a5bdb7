"""Pipelines side by side: the process groups they need, and what they reduce between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from debubble.demo.truth import Part
    from debubble.demo.workload import Workload

_ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups of one process; None is the world."""

    pipeline: Any = None
    data: Any = None


def build_groups(workload: Workload, process: int) -> Groups:
    """Make the groups of all pipelines and all replicas, as every process must, in one order."""
    if workload.replicas == 1:
        return Groups()
    pipelines = sorted({workload.pipeline_of(other) for other in range(workload.world)})
    copies = sorted({workload.replicas_of(other) for other in range(workload.world)})
    made = {
        ranks: dist.new_group(list(ranks), group_desc=name)
        for name, groups in (("mesh_pp", pipelines), ("mesh_dp", copies))
        for ranks in groups
    }
    return Groups(
        pipeline=made[workload.pipeline_of(process)], data=made[workload.replicas_of(process)]
    )


def average_gradients(weights: Iterable[nn.Parameter], groups: Groups, replicas: int) -> None:
    """Give all replicas the same gradient."""
    for weight in weights:
        if weight.grad is not None:
            dist.all_reduce(weight.grad, group=groups.data)
            weight.grad /= replicas


class Reduction(nn.Module):
    """An all-reduce between replicas at the end of a stage; it changes no value."""

    def __init__(
        self,
        workload: Workload,
        layer: int,
        group: Any,
        listener: Callable[[Part, int, int, int], None],
    ) -> None:
        super().__init__()
        self.layer = layer
        self.group = group
        self.listener = listener
        self.payload = torch.zeros(workload.reduce_kib * 1024 // _ELEMENT_BYTES)

    def forward(self, x: Tensor) -> Tensor:
        """Reduce, and pass the input on."""
        start_ns = time.time_ns()
        dist.all_reduce(self.payload, group=self.group)
        self.listener("reduce", self.layer, start_ns, time.time_ns())
        return x
