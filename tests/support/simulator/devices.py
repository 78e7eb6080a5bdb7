"""Pipelines that never ran: what the devices would have done, as ground truth for the analysis.

A host program per rank is played on a compute stream and on streams for messages, the way NCCL does
it: a message's kernel spins until its counterpart is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from support.simulator.context_rings import is_ring, put_in_lane
from support.simulator.host_programs import TOKEN_NS, US, Block, Kernel, Message, Programs, Setup
from support.simulator.megatron_programs import MegatronPrograms
from support.spans import bubble_of


@dataclass(frozen=True, kw_only=True)
class TruePass:
    """What a pass really was: from its first kernel's start to its last one's end."""

    rank: int
    step: int
    stage: int
    kind: str
    microbatch: int
    start_ns: int
    end_ns: int


@dataclass
class RankStep:
    blocks: list[Block]
    start_ns: int = 0
    end_ns: int = 0

    @property
    def kernels(self) -> list[Kernel]:
        return [kernel for block in self.blocks for verb, kernel in block.items if verb == "run"]


class Device:
    """One rank's streams while its program is played."""

    def __init__(self) -> None:
        self.host_ns = 0
        self.free_ns = 0
        """When its compute stream is."""
        self.last: dict[int, Kernel] = {}
        self.todo: list[tuple[str, Kernel]] = []
        self.done = 0


class Play:
    """Plays the programs of all ranks; times are true times of one clock."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.programs = (MegatronPrograms if setup.megatron else Programs)(setup)
        self.devices = [Device() for _ in range(setup.ranks * setup.context)]
        self.steps: list[list[RankStep]] = []
        for _ in range(setup.steps):
            self.steps.append(self.play_step())
            self.finish(self.steps[-1])

    def play_step(self) -> list[RankStep]:
        """Play a step up to its reductions, which may need others."""
        self.ends: dict[tuple[Message, str], Kernel] = {}
        steps = [RankStep(blocks) for blocks in self._programs()]
        for rank, (step, device) in enumerate(zip(steps, self.devices, strict=True)):
            late = self.setup.late_host
            _issue(step, device, late[1:] if late and late[0] == rank else (0, 1))
        for rank, step in enumerate(steps):
            for kernel in step.kernels:
                for message in kernel.messages:
                    side = "out" if message.source == rank else "in"
                    self.ends[message, side] = kernel
        while any(device.done < len(device.todo) for device in self.devices):
            assert any(self._advance(device) for device in self.devices), "deadlock"
        return steps

    def _programs(self) -> list[list[Block]]:
        lanes = self.setup.context
        if lanes == 1:
            return self.programs.step()
        alike = [self.programs.step() for _ in range(lanes)]
        return [
            put_in_lane(alike[lane][rank], rank, lane, lanes)
            for rank in range(self.setup.ranks)
            for lane in range(lanes)
        ]

    def _advance(self, device: Device) -> bool:
        """Go on until the device would wait for something that is not known yet."""
        before = device.done
        while device.done < len(device.todo):
            verb, kernel = device.todo[device.done]
            if verb == "run":
                _queue(device, kernel)
            elif self._end(kernel) < 0:
                break
            else:
                device.free_ns = max(device.free_ns, kernel.end_ns)
            device.done += 1
        return device.done > before

    def _start(self, kernel: Kernel) -> int:
        """Return when a message's kernel starts: after the one before it on its stream."""
        if kernel.start_ns < 0 and kernel.ready_ns >= 0:
            behind = self._end(kernel.behind) if kernel.behind else 0
            kernel.start_ns = -1 if behind < 0 else max(kernel.ready_ns, behind)
        return kernel.start_ns

    def _end(self, kernel: Kernel) -> int:
        """Return when a kernel ends; -1 where that is not known yet: messages need both sides."""
        if kernel.end_ns < 0 and kernel.messages and self._start(kernel) >= 0:
            ends = [self._arrival(message, kernel) for message in kernel.messages]
            kernel.end_ns = -1 if min(ends) < 0 else max(ends)
        return kernel.end_ns

    def _arrival(self, message: Message, mine: Kernel) -> int:
        out, into = self.ends[message, "out"], self.ends[message, "in"]
        wire = TOKEN_NS if message.what[0] == "token" else self._wire(message)
        if self.setup.buffered and mine is out:
            return out.start_ns + wire
        if self._start(out) < 0 or self._start(into) < 0:
            return -1
        if self.setup.buffered:
            return max(out.start_ns + wire, into.start_ns + wire // 2)
        return max(out.start_ns, into.start_ns) + wire

    def _wire(self, message: Message) -> int:
        slow = self.setup.slow_hop
        if slow and (message.source, message.destination) == slow[:2]:
            return round(self.setup.wire_ns * slow[2])
        return self.setup.wire_ns

    def finish(self, steps: list[RankStep]) -> None:
        """End the reduction of gradients everywhere at once; let hosts wait where they do."""
        reductions = [k for step in steps for k in step.kernels if k.collective and k.end_ns < 0]
        together = max((kernel.start_ns for kernel in reductions), default=0) + 500 * US
        for step, device in zip(steps, self.devices, strict=True):
            for kernel in step.kernels:
                if kernel.collective:
                    kernel.end_ns = together if kernel.end_ns < 0 else kernel.end_ns
                    device.free_ns = kernel.end_ns
                assert self._end(kernel) >= 0
            if not self.setup.run_ahead:
                device.host_ns = max(kernel.end_ns for kernel in step.kernels) + 10 * US
                step.end_ns = device.host_ns
            device.todo, device.done = [], 0


def _queue(device: Device, kernel: Kernel) -> None:
    """Put a kernel on its stream. Each waits for all compute that was issued before it."""
    kernel.ready_ns = max(device.free_ns, kernel.launch_ns + 5 * US)
    kernel.behind = device.last.get(kernel.stream) if kernel.messages else None
    device.last[kernel.stream] = kernel
    if not kernel.messages:
        kernel.start_ns = kernel.ready_ns + US
    if kernel.computes:
        kernel.end_ns = device.free_ns = kernel.start_ns + kernel.length_ns


def _issue(step: RankStep, device: Device, late: tuple[int, int]) -> None:
    """Let the host go through its program: it queues everything and waits for nothing."""
    step.start_ns = device.host_ns = device.host_ns + 100 * US
    passes = 0
    for block in step.blocks:
        if any(kernel.action for _, kernel in block.items):
            passes += 1
            device.host_ns += late[0] if passes % late[1] == 0 else 0
        block.start_ns = device.host_ns = device.host_ns + 5 * US
        for verb, kernel in block.items:
            device.todo.append((verb, kernel))
            if verb == "run" and kernel.first_of_launch:
                device.host_ns += 40 * US + 60 * US * len(kernel.messages)
            if verb == "run":
                kernel.launch_ns = device.host_ns - 15 * US
        block.end_ns = device.host_ns = device.host_ns + 5 * US
    step.end_ns = device.host_ns = device.host_ns + 20 * US


def true_passes(play: Play) -> list[TruePass]:
    """Return every pass, by the kernels that were launched for it."""
    passes = []
    for number, step in enumerate(play.steps):
        for rank, mine in enumerate(step):
            kernels: dict[tuple[int, str, int], list[Kernel]] = {}
            for kernel in mine.kernels:
                if kernel.action:
                    kernels.setdefault(kernel.action[:3], []).append(kernel)
            passes += [
                TruePass(
                    rank=rank,
                    step=number,
                    stage=stage,
                    kind=kind,
                    microbatch=microbatch,
                    start_ns=min(kernel.start_ns for kernel in parts),
                    end_ns=max(kernel.end_ns for kernel in parts),
                )
                for (stage, kind, microbatch), parts in kernels.items()
            ]
    return passes


def true_windows(play: Play, ranks: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Return each step's window: from the first pass's start to the last pass's end."""
    ranks = ranks or range(len(play.devices))
    passes = [true for true in true_passes(play) if true.rank in ranks]
    return [
        (min(true.start_ns for true in here), max(true.end_ns for true in here))
        for here in (
            [true for true in passes if true.step == step] for step in range(len(play.steps))
        )
    ]


def true_bubbles(play: Play, ranks: Sequence[int] = ()) -> list[float]:
    """Return each step's bubble: what neither compute nor a ring covers; of some ranks, or all."""
    ranks = ranks or range(len(play.devices))
    spans = [
        [
            (kernel.start_ns, kernel.end_ns)
            for step in play.steps
            for kernel in step[rank].kernels
            if (kernel.computes and not kernel.optimizes) or is_ring(kernel)
        ]
        for rank in ranks
    ]
    return [bubble_of(spans, begin, end) for begin, end in true_windows(play, ranks)]
