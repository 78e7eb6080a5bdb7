"""A workload in → the demo's model: timed layers, in stages.

A layer is two operators, `tanh(x)` and a weight, multiplied. The first costs the forward pass and
the input gradient, the second the weight gradient. They are apart because schedules that split
the backward pass run a custom operator's whole backward twice, once for I and once for W.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from debubble.annexes.demo.workload import SCHEDULES, Workload
from debubble.errors import DemoError
from debubble.units import NS_PER_MS

Part = Literal["forward", "input", "weight", "reduce"]

# A sleep of 4 ms ends 60 to 90 us late on an idle 2-core machine (median 84 of 200); sleeping
# this much less leaves at most some 50 us to spin.
SLEEP_LATENESS_NS = 80_000

# Weights near one and inputs near zero: neither the signal nor its gradient dies in 16 layers.
WEIGHT_SPREAD = 0.1

# An operator takes tensors and numbers only, so who wants to hear of its calls is kept here.
_listeners: list[Callable[[Part, int, int, int], None]] = []


@contextmanager
def listening(listener: Callable[[Part, int, int, int], None]) -> Iterator[None]:
    """Tell the listener of every timed call: its part, layer, start and end."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def wait_until(deadline_ns: int) -> None:
    """Sleep until `time.perf_counter_ns` reaches the deadline; spin for the last microseconds."""
    left_ns = deadline_ns - time.perf_counter_ns() - SLEEP_LATENESS_NS
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
    while time.perf_counter_ns() < deadline_ns:
        pass


@contextmanager
def _lasting(part: Part, layer: int, duration_ns: int) -> Iterator[None]:
    start_ns = time.time_ns()
    deadline_ns = time.perf_counter_ns() + duration_ns
    yield
    wait_until(deadline_ns)
    for listener in _listeners:
        listener(part, layer, start_ns, time.time_ns())


def _forward(x: Tensor, layer: int, forward_ns: int, _input_ns: int) -> Tensor:
    with _lasting("forward", layer, forward_ns):
        return torch.tanh(x)


def _input_gradient(gradient: Tensor, output: Tensor, layer: int, input_ns: int) -> Tensor:
    with _lasting("input", layer, input_ns):
        return gradient * (1 - output * output)


def _weight(weight: Tensor, _layer: int, _weight_ns: int) -> Tensor:
    return weight.clone()


def _weight_gradient(gradient: Tensor, layer: int, weight_ns: int) -> Tensor:
    with _lasting("weight", layer, weight_ns):
        return gradient.clone()


def _keep_output(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.layer, _, ctx.input_ns = inputs
    ctx.save_for_backward(output)


def _backward_input(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    (output,) = ctx.saved_tensors
    return _OPERATORS.layer_backward(gradient, output, ctx.layer, ctx.input_ns), None, None, None


def _keep_time(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    _, ctx.layer, ctx.weight_ns = inputs


def _backward_weight(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _OPERATORS.weight_backward(gradient, ctx.layer, ctx.weight_ns), None, None


# Made known by hand: `custom_op` would import 1.7 s of torch._dynamo. The operators live as long as
# the library object does.
_REGISTRY: Any = torch.library  # which torch leaves untyped
_LIBRARY = _REGISTRY.Library("debubble_demo", "DEF")
for _signature, _run in (
    ("layer(Tensor x, int layer, int forward_ns, int input_ns) -> Tensor", _forward),
    ("layer_backward(Tensor g, Tensor y, int layer, int input_ns) -> Tensor", _input_gradient),
    ("weight(Tensor w, int layer, int weight_ns) -> Tensor", _weight),
    ("weight_backward(Tensor g, int layer, int weight_ns) -> Tensor", _weight_gradient),
):
    _LIBRARY.define(_signature)
    _LIBRARY.impl(_signature.partition("(")[0], _run, "CPU")
_REGISTRY.register_autograd(
    "debubble_demo::layer", _backward_input, setup_context=_keep_output, lib=_LIBRARY
)
_REGISTRY.register_autograd(
    "debubble_demo::weight", _backward_weight, setup_context=_keep_time, lib=_LIBRARY
)
_OPERATORS: Any = torch.ops.debubble_demo


class TimedLayer(nn.Module):
    """One layer of the model: it takes the time it was given, and it learns."""

    def __init__(self, workload: Workload, layer: int) -> None:
        super().__init__()
        self.layer = layer
        backward_ns = round(workload.backward_ms * NS_PER_MS)
        self.forward_ns = round(workload.forward_ms * NS_PER_MS)
        self.input_ns = backward_ns // 2
        self.weight_ns = backward_ns - self.input_ns
        # Seeded by layer, so that every cut of the model holds the same weights.
        random = torch.Generator().manual_seed(layer)
        self.weight = nn.Parameter(
            1 + WEIGHT_SPREAD * torch.randn(workload.width, generator=random)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the activation by the weight."""
        # In this order autograd runs the input gradient before the weight gradient.
        weight: Tensor = _OPERATORS.weight(self.weight, self.layer, self.weight_ns)
        output: Tensor = _OPERATORS.layer(x, self.layer, self.forward_ns, self.input_ns)
        return output * weight


class Position(nn.Module):
    """What the first stage adds to its input, so that its first layer has an input gradient too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Add the position."""
        return x + self.position


def build_stage(workload: Workload, stage: int) -> nn.Sequential:
    """Return one stage of the model."""
    layers = [TimedLayer(workload, layer) for layer in workload.layers_of(stage)]
    return nn.Sequential(*([Position(workload.width)] if stage == 0 else []), *layers)


def make_batch(workload: Workload, step: int) -> tuple[Tensor, Tensor]:
    """Return the input and the target of a step: one row a microbatch, alike on every rank."""
    random = torch.Generator().manual_seed(step)
    shape = (workload.microbatches, workload.tokens, workload.width)
    return torch.randn(shape, generator=random), torch.randn(shape, generator=random)


def build_schedule(workload: Workload, stages: Sequence[PipelineStage]) -> Any:
    """Return torch's schedule object over this rank's stages."""
    known = workload.torch_schedule
    schedule_class = None if known is None else getattr(schedules, known.torch_class, None)
    if known is None or schedule_class is None:
        raise DemoError(
            f"torch {torch.__version__} has no {known.torch_class if known else workload.schedule}",
            hint="take another schedule, or a newer torch",
        )
    loss = torch.nn.functional.mse_loss if workload.trains else None
    built = schedule_class(
        stages[0] if known.layout == "single" else list(stages), workload.microbatches, loss_fn=loss
    )
    if workload.schedule not in SCHEDULES:
        built._load_csv(workload.schedule)  # noqa: SLF001 (torch has no other way to be told one)
    return built
