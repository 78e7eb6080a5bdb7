"""What a probe timed, and a wire, in → pipelines of the model, simulated: time, bubble, memory.

Nothing of a pipeline was measured. A stage takes the start of a pass and what its layers take, the
first the embedding besides, the last the head; a message takes what the wire was measured or said
to. All else is assumed, and each `Pipelines` says what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from typing import Any

import numpy as np

from debubble.errors import NoSplitFits, TraceError, UsageError
from debubble.links.hop_times import fit_line
from debubble.links.live import HopTestResult, read_measured
from debubble.plan.baseline import Baseline, even_split, stages_of
from debubble.plan.change import Change
from debubble.plan.split import best_split
from debubble.simulate.communication import usual_communication
from debubble.simulate.costs.passes import PassModel
from debubble.simulate.costs.wire_pools import STALLS_FROM, WirePools
from debubble.simulate.events import OrderCycle
from debubble.simulate.predict import mean_lengths
from debubble.simulate.program import Program, Times
from debubble.simulate.shared_device import BESIDE
from debubble.simulate.source import Source
from debubble.timeline.job import Basis
from debubble.timeline.model import PassKind
from debubble.timeline.schedules import SCHEDULES, Order, hold, order_of
from debubble.units import NS_PER_S, NS_PER_US, show_percent, show_rate

SCHEMA = "debubble.probe.measured/1"
_PARTS = ("embedding", "layer", "head")
# A weight gradient takes no less of a backward pass; the rest of what is timed is noise.
_LEAST_WEIGHT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What messages of some bytes take, in nanoseconds."""

    latency_ns: float
    bytes_per_s: float
    both_ways: float
    """How many times as long messages take that cross each other."""
    told_by: str
    body: float = 1.0
    """What a message takes on the mean, against the middle one, stalls left out."""
    tail_ns: float = 0.0
    """And what stalls add to it on the mean."""

    def one_way_ns(self, size: float) -> float:
        """Return what one message takes."""
        return self.latency_ns + size / self.bytes_per_s * NS_PER_S


def wire_of(measured: HopTestResult, told_by: str) -> Wire:
    """Return the middle of all hops that were measured."""
    sizes = sorted({rung.size_bytes for rung in measured.rungs})

    def middle(size: int, *, both: bool) -> float:
        found = [
            (rung.both_ways if both and rung.both_ways else rung.one_way).median_s
            for rung in measured.rungs
            if rung.size_bytes == size
        ]
        return float(np.median(found)) * NS_PER_S

    took = [middle(size, both=False) for size in sizes]
    fit = fit_line(sizes, took)
    largest = sizes[-1]
    return Wire(
        latency_ns=fit.latency_ns if fit else 0.0,
        bytes_per_s=fit.bytes_per_s if fit else largest / took[-1] * NS_PER_S,
        both_ways=max(1.0, middle(largest, both=True) / took[-1]),
        told_by=told_by,
    )


def wire_of_messages(messages: Sequence[dict[str, Any]], told_by: str) -> Wire:
    """Return what messages between copies took, the other copies at work: middle ones and stalls.

    Of two that went both ways at once, and of the one before and after, each is held against its
    own middle; one that takes twice that was held up, and what it takes more is a stall, as in
    recorded runs.
    """
    sizes = [int(row["bytes"]) for row in messages]
    took = [np.array(row["one_way_s"], dtype=float) * NS_PER_S for row in messages]
    both = [np.array(row["both_ways_s"], dtype=float) * NS_PER_S for row in messages]
    middles = [float(np.median(found)) for found in took]
    fit = fit_line(sizes, middles)
    # What pipelines hand on; the short ones tell the latency alone.
    large = [at for at, size in enumerate(sizes) if size > min(sizes)] or [0]
    typical = [(found, float(np.median(found))) for at in large for found in (took[at], both[at])]
    held_up = [found >= STALLS_FROM * middle for found, middle in typical]
    bodies = [
        np.where(late, 1.0, found / middle)
        for late, (found, middle) in zip(held_up, typical, strict=True)
    ]
    stalls = [
        np.where(late, found - middle, 0.0)
        for late, (found, middle) in zip(held_up, typical, strict=True)
    ]
    return Wire(
        latency_ns=fit.latency_ns if fit else 0.0,
        bytes_per_s=fit.bytes_per_s if fit else sizes[-1] / middles[-1] * NS_PER_S,
        both_ways=max(1.0, float(np.median([np.median(both[at]) / middles[at] for at in large]))),
        told_by=told_by,
        body=float(np.concatenate(bodies).mean()),
        tail_ns=float(np.concatenate(stalls).mean()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What parts of the model take with some tokens a microbatch: nanoseconds and bytes."""

    tokens: int
    passes: dict[str, dict[str, float]]
    """By part, then by kind of pass: F, B, I and W."""
    start: dict[str, float]
    """Of a pass, however few its layers."""
    saved: dict[str, float]
    """Bytes kept from forward to backward, of each part."""
    weights: dict[str, float]
    message_bytes: float

    @property
    def start_layers(self) -> float:
        """What the start of a pass takes, in layers, on the mean of a forward and a backward."""
        layer = self.passes["layer"]
        return (self.start["F"] + self.start["B"]) / (layer["F"] + layer["B"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One file that `debubble probe` wrote."""

    file: str
    model: str
    device: str
    device_bytes: int | None
    multiprocessors: int | None
    """Of the device or the part of it that a process was given; None of a CPU."""
    copies: int
    trains: bool
    layers: int
    rows: tuple[dict[str, Any], ...]
    """What each kind took alone, at each size."""
    slope: float
    """What each further rank at work on the device adds, of the logarithm."""
    links: HopTestResult | None = None
    messages: tuple[dict[str, Any], ...] = ()
    """What messages between two copies took while the others worked."""

    def beside_each(self, stages: int) -> float:
        """Return how many of a pipeline's other ranks share a device and a host with each."""
        return min(1.0, (self.copies - 1) / max(stages - 1, 1))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of a microbatch that were timed."""
        return tuple(sorted({int(row["tokens"]) for row in self.rows}))

    def at(self, tokens: int) -> Costs:
        """Return what parts take with some tokens: on a line between the sizes that were timed."""
        kinds = {"F": "forward_s", "B": "backward_s", "I": "input_grad_s"}
        passes = {
            part: {kind: self._of(part, name, tokens) * NS_PER_S for kind, name in kinds.items()}
            for part in _PARTS
        }
        for took in passes.values():
            # No stage waits for the input gradient of what has no input gradient.
            took["W"] = max(took["B"] - took["I"], _LEAST_WEIGHT * took["B"])
            took["I"] = took["B"] - took["W"]
        starts = {
            kind: self._start(name.removesuffix("_s"), tokens) for kind, name in kinds.items()
        }
        return Costs(
            tokens=tokens,
            passes=passes,
            # The host of a GPU runs ahead of it: what a launch takes is hidden.
            start=dict.fromkeys("FBIW", 0.0)
            if self.device_bytes
            else {**starts, "W": max(starts["B"] - starts["I"], 0.0)},
            saved={part: self._of(part, "saved_bytes", tokens) for part in _PARTS},
            weights={part: self._of(part, "weight_bytes", tokens) for part in _PARTS},
            message_bytes=self._of("layer", "output_bytes", tokens),
        )

    def _of(self, part: str, name: str, tokens: int) -> float:
        """Return one figure of a part: of a layer that of one, of both ends that of all modules."""
        found = []
        for size in self.sizes:
            rows = [row for row in self.rows if row["part"] == part and row["tokens"] == size]
            total = sum(float(row[name]) * int(row["count"]) for row in rows)
            count = sum(int(row["count"]) for row in rows)
            found.append(total / count if part == "layer" and count else total)
        return _on_line(self.sizes, found, tokens)

    def _start(self, name: str, tokens: int) -> float:
        found = []
        for size in self.sizes:
            rows = [r for r in self.rows if r["part"] == "layer" and r["tokens"] == size]
            found.append(max((float(row["start_s"].get(name, 0.0)) for row in rows), default=0.0))
        return max(_on_line(self.sizes, found, tokens), 0.0) * NS_PER_S


def _on_line(sizes: Sequence[int], values: Sequence[float], tokens: int) -> float:
    """Return a value between two sizes; beyond the last, on along the line through the last two."""
    if len(sizes) < 2:
        return values[0] * tokens / sizes[0]
    after = min(max(int(np.searchsorted(sizes, tokens)), 1), len(sizes) - 1)
    low, high = sizes[after - 1], sizes[after]
    share = (tokens - low) / (high - low)
    return max(values[after - 1] * (1 - share) + values[after] * share, 0.0)


def read_probe(data: Any, file: str) -> Probe:
    """Read what the device wrote, and what was measured of links besides."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise TraceError("this is no probe", file=file, hint="write one with debubble probe MODEL")
    try:
        rows = tuple(data["alone"])
        return Probe(
            file=file,
            model=str(data["model"]),
            device=str(data["device"]),
            device_bytes=data["device_bytes"],
            multiprocessors=data.get("multiprocessors"),
            copies=int(data["copies"]),
            trains=bool(data["trains"]),
            layers=int(data["layers"]),
            rows=rows,
            slope=_slope(rows, tuple(data.get("beside", ())), int(data["copies"])),
            links=read_measured(data["links"], file) if "links" in data else None,
            messages=tuple(data.get("messages", ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"a probe without {error}", file=file, hint="write it anew with debubble probe MODEL"
        ) from error


def _slope(alone: Sequence[dict[str, Any]], beside: Sequence[dict[str, Any]], copies: int) -> float:
    """Return what each further copy adds to a layer, of the logarithm."""
    if copies < 2 or not beside:
        return 0.0
    logs = [
        log(float(busy[name]) / float(row[name]))
        for row, busy in zip(alone, beside, strict=True)
        for name in ("forward_s", "backward_s")
        if row["part"] == "layer" and row[name] > 0 and busy[name] > 0
    ]
    return max(float(np.median(logs)) / (copies - 1), 0.0) if logs else 0.0


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
class SimulatedPipeline:
    """What a pipeline would take."""

    setting: Setting
    split: tuple[int, ...]
    window_ns: float
    bubble_fraction: float
    peak_bytes: tuple[float, ...]
    """Of each rank."""
    program: Program = field(repr=False)
    times: Times = field(repr=False)
    message_bytes: float

    @property
    def tokens_per_s(self) -> float:
        """Of a whole batch."""
        return self.setting.tokens * self.setting.microbatches / self.window_ns * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelines:
    """Pipelines of one model on one kind of device and wire."""

    probe: Probe
    wire: Wire
    optimizer_bytes: float = 0.0
    """For each byte of weights."""

    def simulate(self, setting: Setting) -> SimulatedPipeline:
        """Simulate one pipeline; without a split, with the best one that is found."""
        order = order_of(setting.schedule, setting.stages, setting.microbatches)
        stages = stages_of(order)
        costs = self.probe.at(setting.tokens)
        given = setting.split or even_split(self.probe.layers, stages)
        if len(given) != stages or sum(given) != self.probe.layers:
            raise UsageError(
                f"{','.join(map(str, given))} does not split {self.probe.layers} layers into"
                f" {stages} stages",
                hint="give the layers of each stage, first stage first",
            )
        baseline, change = self._baseline(costs, order, given, setting), Change(order=order)
        split = setting.split or best_split(baseline, change).split
        engine = baseline.engine(change)
        what_if = replace(
            baseline.what_if(change),
            layers=tuple(layers + costs.start_layers for layers in split),
        )
        times = engine.run(mean_lengths(engine, baseline.source, what_if))
        window = float(times.window_ns)
        busy = float((times.pass_end - times.pass_start).sum())
        return SimulatedPipeline(
            setting=setting,
            split=split,
            window_ns=window,
            bubble_fraction=1 - busy / (setting.stages * window),
            peak_bytes=tuple(self._peaks(order, costs, split)),
            program=engine.program,
            times=times,
            message_bytes=costs.message_bytes,
        )

    def steady(self, like: SimulatedPipeline) -> Pipelines:
        """Return the same with every pass as long as it is on the mean of a run.

        Of one step that is read as a table nobody can tell how ranks slow each other.
        """
        at_work = like.setting.stages * (1 - like.bubble_fraction)
        slope = self.probe.slope * self.probe.beside_each(like.setting.stages)
        times = exp(slope * max(at_work - 1, 0.0))
        timed = ("forward_s", "backward_s", "input_grad_s")
        rows = tuple(
            {**row, **{name: times * row[name] for name in timed}} for row in self.probe.rows
        )
        return replace(self, probe=replace(self.probe, rows=rows, slope=0.0))

    def compare(
        self, stages: Sequence[int], counts: Sequence[int], batch: int
    ) -> list[SimulatedPipeline]:
        """Simulate all schedules, with batches of so many tokens cut into these microbatches."""
        found = []
        for ranks in stages:
            for count in counts:
                for name in SCHEDULES:
                    if (name == "forward-only") == self.probe.trains or batch % count:
                        continue
                    setting = Setting(
                        stages=ranks, microbatches=count, tokens=batch // count, schedule=name
                    )
                    try:
                        found.append(self.simulate(setting))
                    except (UsageError, NoSplitFits, OrderCycle):
                        continue  # not with so many stages or microbatches
        return sorted(found, key=lambda one: -one.tokens_per_s)

    def assumptions(self) -> Iterator[str]:
        """Say what was not measured."""
        probe = self.probe
        yield "every rank has a device like the one probed, and nothing else runs on it"
        if probe.slope:
            grows = show_percent(probe.slope)
            yield (
                f"up to {probe.copies} ranks share a device: each active rank slows the others by"
                f" {grows}, as measured"
            )
        stalls = self.wire.tail_ns / NS_PER_US
        yield (
            f"a message crosses at {show_rate(self.wire.bytes_per_s)} after"
            f" {self.wire.latency_ns / NS_PER_US:.0f} us"
            + (f" and {stalls:.0f} us of stalls (mean)" if stalls >= 1 else "")
            + f", {self.wire.told_by}"
        )
        yield "messages do not slow each other"
        if probe.copies > 1:
            slowed = show_percent(exp(BESIDE) - 1)
            yield f"overlap makes compute take {slowed} longer, as measured on other devices"
        yield "messages are posted as in torch's schedules, and no host is late"
        if probe.trains:
            yield "a weight gradient takes the backward pass minus the input gradient"
            if not self.optimizer_bytes:
                yield "memory: weights, gradients and activations; --optimizer adds optimizer state"
        yield "data loading, the optimizer and reductions between replicas are not included"

    def _baseline(
        self, costs: Costs, order: Order, split: tuple[int, ...], setting: Setting
    ) -> Baseline:
        """Write what was probed as a measured run would tell it."""
        layer, probe, wire = costs.passes["layer"], self.probe, self.wire
        took = {kind: layer[kind.name] for kind in PassKind if layer[kind.name] > 0}
        one_way = wire.one_way_ns(costs.message_bytes)
        slope = probe.slope * probe.beside_each(setting.stages)
        passes = PassModel(
            base={
                (int(kind), False, place): log(ns) - slope
                for kind, ns in took.items()
                for place in range(setting.stages)
            },
            residuals=np.zeros(1),
            slope=slope,
            layers=tuple(map(float, split)),
            extras={
                int(kind): (
                    costs.passes["embedding"][kind.name] / ns,
                    costs.passes["head"][kind.name] / ns,
                )
                for kind, ns in took.items()
            },
            beside=BESIDE if probe.copies > 1 else 0.0,
            tells_beside=False,
            stays={},
        )
        wires = WirePools(
            both_ways=one_way * wire.both_ways,
            one_way=one_way,
            drain=one_way,
            sending=one_way,
            body=np.array([wire.body]),
            tail_ns=np.array([wire.tail_ns]),
            step=np.zeros(1, dtype=np.int64),
            message_bytes=round(costs.message_bytes),
            buffers=True,
            assumed=(),
            slow={},
        )
        source = Source(
            ranks=(),
            passes=passes,
            wires=wires,
            split=split,
            steps=(0,),
            microbatches=setting.microbatches,
            schedule=setting.schedule,
            chunks=len(split) // setting.stages,
            data_ns={},
            data_occupies=0.0,
            pass_gap_ns=0,
            batch_gap_ns=0,
            outside_ns=0,
            window_ns=1,
            window_spread=0.0,
            bubble_fraction=0.0,
            busy_share=1.0,
        )
        return Baseline(
            source=source,
            schedule=setting.schedule,
            order=order,
            memory=None,
            limits=(),
            window_ns=1.0,
            basis=Basis.UNPROFILED,
            outside_ns=0,
            correction=1.0,
            misfit=0.0,
            communication=usual_communication(setting.schedule),
        )

    def _peaks(self, order: Order, costs: Costs, split: Sequence[int]) -> Iterator[float]:
        """Yield what each rank holds at most: weights, gradients, activations, one layer's work."""
        last = len(split) - 1
        for actions in order:
            held = hold(actions)
            static, activations = 0.0, np.zeros(len(held.in_flight))
            for column, stage in enumerate(held.stages):
                parts = {"layer": split[stage], "embedding": stage == 0, "head": stage == last}
                weights = sum(costs.weights[part] * count for part, count in parts.items())
                saved = sum(costs.saved[part] * count for part, count in parts.items())
                copies = 2 + self.optimizer_bytes if self.probe.trains else 1
                static += weights * copies
                in_flight = held.in_flight[:, column] if self.probe.trains else 0
                activations = activations + in_flight * (saved + costs.message_bytes)
            yield static + float(activations.max()) + costs.saved["layer"]
