"""A workload in → the demo's model: timed layers, in stages that write down their passes.

A layer is two operators, `tanh(x)` and a weight, multiplied. The first costs the forward pass and
the input gradient, the second the weight gradient. They are apart because schedules that split
the backward pass run a custom operator's whole backward twice, once for I and once for W. What the
pipeline itself saw is written beside each trace: the yardstick for the analysis.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from debubble.annexes.demo.workload import SCHEDULES, Workload
from debubble.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from debubble.annexes.demo.workload import Workload


Kind = Literal["F", "B", "I", "W"]
Part = Literal["forward", "input", "weight", "reduce"]
Phase = Literal["unprofiled", "profiler-warm-up", "profiled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueCall:
    """One timed call: a layer's forward, input or weight gradient, or a reduction after it."""

    kind: Kind
    part: Part
    stage: int
    microbatch: int
    layer: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TruePass:
    """One pass of one microbatch through one stage, from call to return."""

    kind: Kind
    stage: int
    microbatch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueStep:
    """One batch through the pipeline, optimizer and closing barrier included."""

    step: int
    phase: Phase
    start_ns: int
    end_ns: int
    loss: float | None
    passes: tuple[TruePass, ...]
    calls: tuple[TrueCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """All steps of one rank; times are nanoseconds since the epoch, as in `time.time_ns`."""

    rank: int
    stages: tuple[int, ...]
    workload: Workload
    steps: tuple[TrueStep, ...]

    @property
    def profiled(self) -> tuple[TrueStep, ...]:
        """The steps that are in the trace."""
        return tuple(step for step in self.steps if step.phase == "profiled")


def read_truth(file: Path) -> Truth:
    """Read what a rank wrote beside its trace."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Truth)
    except msgspec.MsgspecError as error:
        raise DemoError(
            f"this is no truth file: {error}", file=str(file), hint="run the demo again"
        ) from error


class Recorder:
    """Collects passes and calls as they happen, and hands them out step by step."""

    def __init__(self) -> None:
        self._passes: list[TruePass] = []
        self._calls: list[TrueCall] = []
        self._running: tuple[Kind, int, int] | None = None

    @contextmanager
    def record_pass(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        """Record one pass; the calls within are its own."""
        start_ns = time.time_ns()
        self._running = (kind, stage, microbatch)
        try:
            yield
        finally:
            self._running = None
        self._passes.append(
            TruePass(
                kind=kind,
                stage=stage,
                microbatch=microbatch,
                start_ns=start_ns,
                end_ns=time.time_ns(),
            )
        )

    def record_call(self, part: Part, layer: int, start_ns: int, end_ns: int) -> None:
        """Record one operator. Outside a pass, torch is inferring shapes: that is no work."""
        if self._running is None:
            return
        kind, stage, microbatch = self._running
        self._calls.append(
            TrueCall(
                kind=kind,
                part=part,
                stage=stage,
                microbatch=microbatch,
                layer=layer,
                start_ns=start_ns,
                end_ns=end_ns,
            )
        )

    def end_step(
        self, *, step: int, phase: Phase, start_ns: int, end_ns: int, loss: float | None
    ) -> TrueStep:
        """Return what was recorded since the last step, and forget it."""
        passes, self._passes = tuple(self._passes), []
        calls, self._calls = tuple(self._calls), []
        return TrueStep(
            step=step,
            phase=phase,
            start_ns=start_ns,
            end_ns=end_ns,
            loss=loss,
            passes=passes,
            calls=calls,
        )


# A sleep of 4 ms ends 60 to 90 us late on an idle 2-core machine (median 84 of 200); sleeping
# this much less leaves at most some 50 us to spin.
SLEEP_LATENESS_NS = 80_000

# Weights near one and inputs near zero: neither the signal nor its gradient dies in 16 layers.
WEIGHT_SPREAD = 0.1

_ELEMENT_BYTES = 4

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
        self.forward_ns = workload.forward_ns(layer)
        self.input_ns = workload.backward_ns(layer) // 2
        self.weight_ns = workload.backward_ns(layer) - self.input_ns
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


class RecordedStage(PipelineStage):
    """A stage that writes down when each of its passes began and ended."""

    def __init__(self, workload: Workload, stage: int, recorder: Recorder, groups: Groups) -> None:
        model = build_stage(workload, stage)
        if workload.reduce_kib:
            layer = workload.layers_of(stage)[-1]
            model.append(Reduction(workload, layer, groups.data, recorder.record_call))
        super().__init__(model, stage, workload.stages, torch.device("cpu"), group=groups.pipeline)
        self.recorder = recorder

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run F."""
        with self.recorder.record_pass("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """Run B, or I where the schedule splits the backward pass."""
        kind: Kind = "B" if full_backward else "I"
        with self.recorder.record_pass(kind, self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        """Run W."""
        with self.recorder.record_pass("W", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


def build_schedule(workload: Workload, stages: list[RecordedStage]) -> Any:
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
        stages[0] if known.layout == "single" else stages, workload.microbatches, loss_fn=loss
    )
    if workload.schedule not in SCHEDULES:
        built._load_csv(workload.schedule)  # noqa: SLF001 (torch has no other way to be told one)
    return built
