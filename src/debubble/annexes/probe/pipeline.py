"""What a probe timed, and a wire, in → pipelines of the model, simulated: time, bubble, memory.

Nothing of a pipeline was measured. A stage takes what its layers take, the first the embedding
besides, the last the head; a message takes what the wire was measured or stated to take. All else
is assumed, and each `Pipelines` says what.

Ranks that share a device slow each other: a pass takes longer by what each further rank at work was
measured to add, times the ranks at work on average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp
from pathlib import Path

import msgspec
import numpy as np

from debubble.annexes.probe.answers import PipelinePart, ProbeAnswer, TimedPart
from debubble.annexes.probe.measured import PARTS, Probe, on_line
from debubble.errors import NoSplitFits, TraceError, UsageError
from debubble.plan.baseline import even_split, stages_of
from debubble.plan.split import AS_GOOD, find_partition
from debubble.plan.split_problem import Work, split_problem
from debubble.simulate.communication import usual_communication
from debubble.simulate.engine import Engine
from debubble.simulate.events import OrderCycle
from debubble.simulate.hand_set import GivenCosts, give_lengths
from debubble.simulate.planned import plan_program
from debubble.simulate.program import Lengths, Program, Times
from debubble.timeline.model import F64, I64, PassKind
from debubble.timeline.schedules import SCHEDULES, Order, hold, order_of
from debubble.units import NS_PER_S, show_bytes, show_percent, show_seconds

# How much ranks slow each other follows from how long their passes take: the third round moves
# windows by less than a thousandth, on the recorded runs.
_ROUNDS = 2


def read_probe(file: str) -> Probe:
    """Read the file of a probe."""
    try:
        return msgspec.json.decode(Path(file).read_bytes(), type=Probe)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise TraceError(
            f"this is no probe: {error}", file=file, hint="write one with debubble probe MODEL"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What messages take, as stated."""

    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A pipeline that is asked about."""

    stages: int
    """Ranks of it: p."""
    microbatches: int
    tokens: int
    """Of a microbatch."""
    schedule: str = "1f1b"
    split: tuple[int, ...] | None = None
    """Layers of each stage; None: the best that is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A simulated step, and what it says of its pipeline."""

    part: PipelinePart
    program: Program
    times: Times
    message_bytes: float


@dataclass(frozen=True, kw_only=True)
class Pipelines:
    """Pipelines of one model on one kind of device and wire."""

    probe: Probe
    wire: Wire | None = None
    """None: as messages between copies took, and without copies no time."""
    optimizer_bytes: float = 0.0
    """For each byte of weights."""
    limit_bytes: float | None = None

    def simulate(self, setting: Setting) -> Simulated:
        """Simulate one pipeline; without a split, with the best one that is found."""
        order = order_of(setting.schedule, setting.stages, setting.microbatches)
        step = _Step(self, setting, order)
        split = setting.split or step.best_split()
        if len(split) != step.stages or sum(split) != self.probe.layers:
            raise UsageError(
                f"{','.join(map(str, split))} does not split {self.probe.layers} layers into"
                f" {step.stages} stages",
                hint="give the layers of each stage, first stage first",
            )
        alone = step.lengths(np.array([split]))
        alone = replace(alone, passes=alone.passes[:, 0])
        times = step.engine.run(alone)
        for _ in range(_ROUNDS):
            at_work = float((times.pass_end - times.pass_start).sum()) / float(times.window_ns)
            slowed = alone.passes * exp(self._slope(setting.stages) * max(at_work - 1, 0.0))
            times = step.engine.run(replace(alone, passes=np.rint(slowed).astype(np.int64)))
        window_s = float(times.window_ns) / NS_PER_S
        busy_s = float((times.pass_end - times.pass_start).sum()) / NS_PER_S
        peaks = list(step.peaks(split))
        limit = self.limit_bytes
        return Simulated(
            part=PipelinePart(
                stages=setting.stages,
                schedule=setting.schedule,
                microbatches=setting.microbatches,
                tokens=setting.tokens,
                split=list(split),
                batch_latency_s=window_s,
                bubble_fraction=1 - busy_s / (setting.stages * window_s),
                tokens_per_s=setting.tokens * setting.microbatches / window_s,
                peak_memory_bytes=peaks,
                fits_memory=None if limit is None else max(peaks) <= limit,
            ),
            program=step.engine.program,
            times=times,
            message_bytes=step.costs["layer"].output_bytes,
        )

    def answer(
        self, stages: Sequence[int], counts: Sequence[int], written: Sequence[str]
    ) -> ProbeAnswer:
        """Say what was timed, and what pipelines of these sizes would do with it."""
        probe = self.probe
        return ProbeAnswer(
            model=probe.model,
            device=probe.device,
            layers=probe.layers,
            trains=probe.trains,
            parts=[
                timed
                for size in probe.sizes
                for timed in self.time_parts(size).values()
                if timed.forward_s > 0
            ],
            memory_limit_bytes=self.limit_bytes,
            pipelines=self._compare(stages, counts, probe.sizes[-1] * counts[0]),
            assumptions=list(self._assumptions()),
            written=list(written),
            warnings=[],
        )

    def _compare(
        self, stages: Sequence[int], counts: Sequence[int], batch: int
    ) -> list[PipelinePart]:
        """Simulate all schedules, with batches of so many tokens cut into these microbatches."""
        parts = []
        for ranks in stages:
            for count in counts:
                for name in SCHEDULES:
                    if (name == "forward-only") == self.probe.trains or batch % count:
                        continue
                    setting = Setting(
                        stages=ranks, microbatches=count, tokens=batch // count, schedule=name
                    )
                    try:
                        parts.append(self.simulate(setting).part)
                    except (UsageError, NoSplitFits, OrderCycle):
                        continue  # not with so many stages or microbatches
        return sorted(parts, key=lambda part: -part.tokens_per_s)

    def _assumptions(self) -> Iterator[str]:
        """Say what was not measured."""
        probe = self.probe
        yield "every rank has a device like the one probed, and nothing else runs on it"
        if probe.slope:
            yield (
                f"up to {probe.copies} ranks share a device: each active rank slows the others by"
                f" {show_percent(probe.slope)}, as measured"
            )
        size = self.time_parts(probe.sizes[-1])["layer"].output_bytes
        one_way_s, both_ways_s = self.message_s(size)
        if self.wire is None and not probe.messages:
            yield "messages take no time; --bandwidth states a link, --copies measures one"
        else:
            source = "as between two copies" if self.wire is None else "as stated"
            yield (
                f"a message of {show_bytes(size)} takes {show_seconds(one_way_s)},"
                f" {show_seconds(both_ways_s)} while another crosses it, {source}"
            )
        yield "messages do not slow each other"
        yield "messages are posted as in torch's schedules, and no host is late"
        if probe.trains:
            yield "a weight gradient takes the backward pass minus the input gradient"
            if not self.optimizer_bytes:
                yield "memory: weights, gradients and activations; --optimizer adds optimizer state"
        yield "data loading, the optimizer and reductions between replicas are not included"

    def time_parts(self, tokens: int) -> dict[str, TimedPart]:
        """Return what each part takes with some tokens a microbatch."""
        return {part: _time_part(self.probe, part, tokens) for part in PARTS}

    def message_s(self, size: float) -> tuple[float, float]:
        """Return what a message takes, one way and while another crosses it."""
        if self.wire is not None:
            stated_s = self.wire.latency_s + size / self.wire.bytes_per_s
            return stated_s, stated_s
        return self.probe.message_s(size) if self.probe.messages else (0.0, 0.0)

    def _slope(self, stages: int) -> float:
        """Return what a further rank at work adds: ranks beyond the copies are elsewhere."""
        return self.probe.slope * min(1.0, (self.probe.copies - 1) / max(stages - 1, 1))


class _Step:
    """A step of one pipeline, for any split of its layers."""

    def __init__(self, pipelines: Pipelines, setting: Setting, order: Order) -> None:
        self.pipelines, self.setting, self.order = pipelines, setting, order
        self.stages = stages_of(order)
        self.engine = Engine(plan_program(order, usual_communication(setting.schedule)))
        self.costs = pipelines.time_parts(setting.tokens)

    @cached_property
    def _without_layers(self) -> dict[PassKind, F64]:
        """Return what each stage takes besides its layers, in seconds."""
        found = {}
        for kind in PassKind:
            besides = np.zeros(self.stages)
            besides[0] += _pass_s(self.costs["embedding"], kind)
            besides[-1] += _pass_s(self.costs["head"], kind)
            found[kind] = besides
        return found

    def lengths(self, splits: I64) -> Lengths:
        """Return what everything takes with each of some splits, while nobody slows anybody."""
        layer, program = self.costs["layer"], self.engine.program
        seconds = {
            kind: splits.T * _pass_s(layer, kind) + besides[:, None]
            for kind, besides in self._without_layers.items()
        }
        one_way, both_ways = self.pipelines.message_s(layer.output_bytes)
        found = give_lengths(
            program,
            GivenCosts(
                passes={
                    kind: np.rint(took * NS_PER_S).astype(np.int64)
                    for kind, took in seconds.items()
                }
            ),
        )
        took_s = np.where(self.engine.exchanged, both_ways, one_way)
        wire = np.rint(took_s * NS_PER_S).astype(np.int64)
        # A message that came before it was asked for is still to be copied out of its buffer.
        return replace(found, wire=wire, sending=wire, drain=wire)

    def best_split(self) -> tuple[int, ...]:
        """Return the best split; an even one where that is as good."""
        layers, stages = self.pipelines.probe.layers, self.stages
        even = even_split(layers, stages)
        splits_backward = any(action.kind == "W" for actions in self.order for action in actions)
        kinds = (
            (PassKind.F, PassKind.I, PassKind.W) if splits_backward else (PassKind.F, PassKind.B)
        )
        per_layer = [np.full(layers, _pass_s(self.costs["layer"], kind)) for kind in kinds]
        besides = [self._without_layers[kind] for kind in kinds]
        none = np.zeros(stages)
        home = {action.stage: rank for rank, acts in enumerate(self.order) for action in acts}
        problem = split_problem(
            *per_layer,
            rank=np.array([home[stage] for stage in range(stages)]),
            microbatches=self.setting.microbatches,
            stages=Work(
                forward=besides[0],
                backward=besides[1],
                weight=besides[2] if splits_backward else none,
            ),
        )

        def latencies(splits: I64) -> F64:
            found: F64 = self.engine.windows(self.lengths(splits)) / NS_PER_S
            return found

        found = find_partition(problem, latencies, given=even)
        even_s = found.given_latency_s
        return (
            even
            if even_s is not None and even_s <= found.latency_s * (1 + AS_GOOD)
            else found.split
        )

    def peaks(self, split: Sequence[int]) -> Iterator[float]:
        """Yield what each rank holds at most: weights, gradients, activations, one layer's work."""
        trains, last = self.pipelines.probe.trains, len(split) - 1
        for actions in self.order:
            held = hold(actions)
            static, activations = 0.0, np.zeros(len(held.in_flight))
            for column, stage in enumerate(held.stages):
                counts = {"layer": split[stage], "embedding": stage == 0, "head": stage == last}
                weights = sum(self.costs[part].weight_bytes * n for part, n in counts.items())
                saved = sum(self.costs[part].saved_bytes * n for part, n in counts.items())
                static += weights * (2 + self.pipelines.optimizer_bytes if trains else 1)
                if trains:
                    kept = saved + self.costs["layer"].output_bytes
                    activations = activations + held.in_flight[:, column] * kept
            yield static + float(activations.max()) + self.costs["layer"].saved_bytes


def _time_part(probe: Probe, part: str, tokens: int) -> TimedPart:
    """Return what a part takes, of a layer one: on a line between the sizes that were timed."""

    def value(name: str) -> float:
        values = []
        for size in probe.sizes:
            rows = [row for row in probe.alone if row.part == part and row.tokens == size]
            total = sum(getattr(row, name) * row.count for row in rows)
            count = sum(row.count for row in rows)
            values.append(total / count if part == "layer" and count else total)
        return on_line(probe.sizes, values, tokens)

    backward = value("backward_s")
    return TimedPart(
        part=part,
        tokens=tokens,
        forward_s=value("forward_s"),
        backward_s=backward,
        # No stage waits for the input gradient of what has none.
        input_grad_s=min(value("input_grad_s"), backward),
        saved_bytes=value("saved_bytes"),
        output_bytes=value("output_bytes"),
        weight_bytes=value("weight_bytes"),
    )


def _pass_s(costs: TimedPart, kind: PassKind) -> float:
    """Return what a part takes of one kind of pass."""
    return {
        PassKind.F: costs.forward_s,
        PassKind.B: costs.backward_s,
        PassKind.I: costs.input_grad_s,
        PassKind.W: costs.backward_s - costs.input_grad_s,
    }[kind]
