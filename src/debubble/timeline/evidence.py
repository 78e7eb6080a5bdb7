"""One rank in → what its trace tells of its steps: set-up in them, or an end that was not captured.

Set-up is what only a job's first steps do. A step that is slow, and nothing else, shows none.
"""

from __future__ import annotations

import re

import numpy as np

from debubble.timeline.model import Flags
from debubble.timeline.prepared import Prepared
from debubble.timeline.steps import Steps
from debubble.trace.columns import MemoryDevice

# NCCL's own ranges, torch's calls, RCCL's: a communicator is made at its first use.
_COMMUNICATORS = re.compile(
    r"(?:n|r)cclComm(?:Init|Split)|initNCCLComm|init_process_group|new_group|eager_connect"
)
# torch's pipelines send shapes along at the first step; `_shape_inference` needs `with_stack`.
_SHAPES = re.compile(r"_shape_inference|_prepare_forward_infra")
_QUEUES = re.compile(r"Launch|Memcpy.*Async|Memset.*Async")
# A cache that grows by less has found its size; allocations are rounded to 2 MiB.
_GROWTH = 0.02
# Shapes are some hundred bytes, activations megabytes.
_SMALL = 0.01

COMMUNICATORS, SHAPES = "communicators were made", "shapes were sent along"
ALLOCATOR, MESSAGES = "the allocator took its memory", "small messages went ahead"


def find_set_up(one: Prepared, steps: Steps) -> tuple[tuple[int, str], ...]:
    """Return the steps in which a rank was still setting up, each with what was seen."""
    if not len(steps.number):
        return ()
    seen = [
        *((step, COMMUNICATORS) for step in _steps_with(one, steps, _COMMUNICATORS)),
        *((step, SHAPES) for step in _steps_with(one, steps, _SHAPES)),
        *((step, MESSAGES) for step in _leading(steps, _talkative(one, steps))),
        *((step, ALLOCATOR) for step in _leading(steps, _growing(one, steps))),
    ]
    first: dict[int, str] = {}
    for step, what in seen:
        first.setdefault(step, what)
    return tuple(sorted(first.items()))


def find_unfinished(one: Prepared, steps: Steps) -> tuple[int, ...]:
    """Return the last step, where kernels of it were launched and not recorded, unlike before."""
    trace = one.trace
    if not len(trace.kernels) or not len(trace.launches) or not len(steps.number):
        return ()
    queues = _names_like(trace.names, _QUEUES)[trace.launches.name]
    queues[trace.kernels.launch[trace.kernels.launch >= 0]] = False
    lost = steps.at(trace.launches.start_ns[queues])
    last = int(steps.at(trace.launches.start_ns)[-1])
    return (last,) if last >= 0 and set(lost.tolist()) == {last} else ()


def _steps_with(one: Prepared, steps: Steps, pattern: re.Pattern[str]) -> list[int]:
    named = _names_like(one.trace.names, pattern)
    if not named.any():
        return []
    moments = [
        table.start_ns[named[table.name]]
        for table in (one.trace.annotations, one.trace.operators, one.trace.cpu_operators)
    ]
    found = steps.at(np.concatenate(moments))
    return sorted(set(found[found >= 0].tolist()))


def _talkative(one: Prepared, steps: Steps) -> Flags:
    """Tell which steps hold more small messages than most: shapes travel ahead of activations."""
    size, at = one.messages.message_bytes, one.message_step
    small = (size >= 0) & (size < _SMALL * size.max(initial=0))
    counts = np.array([int(small[at == step].sum()) for step in steps.number.tolist()])
    more: Flags = counts > np.median(counts)
    return more


def _growing(one: Prepared, steps: Steps) -> Flags:
    """Tell in which steps the allocator asked the device for more memory."""
    memory = one.trace.memory
    on_device = memory.device_type == MemoryDevice.DEVICE
    reserved, at = memory.reserved_bytes[on_device], steps.at(memory.start_ns[on_device])
    grown = np.zeros(len(steps.number), dtype=bool)
    for place, step in enumerate(steps.number.tolist()):
        mine = reserved[at == step]
        if len(mine):
            grown[place] = mine.max() > mine[0] * (1 + _GROWTH)
    return grown


def _leading(steps: Steps, flags: Flags) -> list[int]:
    """Return the steps flagged from the first one on: what comes later is no set-up."""
    count = len(flags) if flags.all() else int(flags.argmin())
    return [] if count == len(flags) else steps.number[:count].tolist()


def _names_like(names: tuple[str, ...], pattern: re.Pattern[str]) -> Flags:
    return np.array([bool(pattern.search(name)) for name in names] or [False], dtype=bool)
