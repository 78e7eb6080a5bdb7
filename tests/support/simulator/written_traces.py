"""Played pipelines in → one Kineto document a rank out, as torch and NCCL write them.

Modelled on the recorded H200 runs: kernels tell nothing of their messages, the operators of the
host tell all; labels stand on the host; the host's steps end long before the device's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from support.simulator.devices import Play, RankStep
from support.simulator.host_programs import AUTOGRAD, MAIN, OPTIMIZER, US, Block, Kernel, Message
from support.traces.kineto_events import (
    Event,
    annotation,
    details,
    document,
    kernel,
    launch,
    memory,
    send,
    write,
)

# Room for clocks that are behind.
BEGIN_NS = 10_000_000_000
ELEMENTS = 1024 * 4096
MICROBATCH_BYTES = 300 * 1024**2
STATIC_BYTES = 2 * 1024**3


@dataclass(frozen=True, kw_only=True)
class Clock:
    """What a rank's clock shows at a true time."""

    skew_ns: int = 0
    drift_ppm: float = 0.0

    def us(self, true_ns: float) -> float:
        return round(BEGIN_NS + self.skew_ns + true_ns * (1 + self.drift_ppm * 1e-6)) / 1000


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How a run is written down."""

    labels: str = "none"
    """`runtime` for `PP:1F0`, `simple` for `Forward 3`, or `none`."""
    clocks: Sequence[Clock] = ()
    members: tuple[int, ...] = ()
    """The global ranks of the pipeline; peers are counted inside it."""
    world: int = 0
    group: str = "pp"
    """The group that messages go through."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """What the header tells of groups; peers are counted inside `group` if it is one of them."""
    waits_inside: str = ""
    """The group in which the host waits for something in the middle of each pass."""
    data: tuple[tuple[int, ...], ...] = ()
    """For each rank of the pipeline, the group that it reduces its gradients in."""
    data_name: str = "dp"
    inner: tuple[tuple[int, ...], ...] = ()
    """For each rank of the pipeline, the group of the collectives in the middle of its passes."""
    inner_name: str = ""
    marks: bool = True
    """`ProfilerStep#3` around each step."""
    elements: int = ELEMENTS
    """Of each message."""
    static_bytes: int = STATIC_BYTES
    """What a rank holds however many microbatches are in flight."""


class RankWriter:
    """Writes the events of one rank."""

    def __init__(self, play: Play, rank: int, writing: Writing) -> None:
        self.rank = rank
        self.writing = writing
        self.members = writing.members or tuple(range(len(play.devices)))
        lanes = play.setup.context
        self.lane = tuple(range(rank % lanes, len(play.devices), lanes))
        self.ring = tuple(range(rank - rank % lanes, rank - rank % lanes + lanes))
        self.clock = writing.clocks[rank] if writing.clocks else Clock()
        self.graphs = play.setup.graphs
        self.correlation = count(1)
        self.in_flight = 0

    def events(self, steps: Sequence[RankStep]) -> Iterator[Event]:
        for number, step in enumerate(steps):
            if self.writing.marks:
                yield self._annotation(f"ProfilerStep#{number}", step.start_ns, step.end_ns)
            for block in step.blocks:
                yield from self._block(block)

    def _annotation(self, name: str, start_ns: int, end_ns: int) -> Event:
        begin = self.clock.us(start_ns)
        return annotation(name, ts=begin, dur=self.clock.us(end_ns) - begin, tid=MAIN)

    def _block(self, block: Block) -> Iterator[Event]:
        name = self._label(block.name)
        if name:
            yield self._annotation(name, block.start_ns, block.end_ns)
        launched = 0
        if any(verb == "wait" for verb, _ in block.items):
            yield self._wait(block.start_ns, self.writing.group)
        for one in (item for verb, item in block.items if verb == "run"):
            launched = next(self.correlation) if one.first_of_launch else launched
            if one.messages:
                yield from self._batch(one, launched)
            elif one.collective:
                yield from self._reduction(one, launched)
            else:
                yield from self._compute(one, launched)
        yield from self._memory(block)

    def _wait(self, at_ns: int, group: str) -> Event:
        return details("wait", ts=self.clock.us(at_ns), dur=3, **{"Process Group Name": group})

    def _label(self, name: str) -> str:
        """Return what torch calls this: runtime schedules name all, older ones only passes."""
        if name == OPTIMIZER:
            return name
        if not name or self.writing.labels == "none":
            return ""
        if self.writing.labels == "runtime":
            return f"PP:{name}"
        kind = {"F": "Forward", "B": "Backward"}.get(name.lstrip("0123456789")[0], "")
        return f"{kind} {name.rpartition(name.lstrip('0123456789')[0])[2]}" if kind else ""

    def _memory(self, block: Block) -> Iterator[Event]:
        actions = {item.action for _, item in block.items if item.action}
        for action in actions:
            change = {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            self.in_flight += change
            yield memory(
                ts=self.clock.us(block.end_ns),
                allocated=self.writing.static_bytes + self.in_flight * MICROBATCH_BYTES,
                change=change * MICROBATCH_BYTES,
            )

    def _device(self, work: Kernel, name: str, correlation: int) -> Event:
        begin = self.clock.us(work.start_ns)
        length = self.clock.us(work.end_ns) - begin
        return kernel(name, ts=begin, dur=length, stream=work.stream, correlation=correlation)

    def _compute(self, work: Kernel, correlation: int) -> Iterator[Event]:
        if work.first_of_launch:
            at = self.clock.us(work.launch_ns)
            if work.reduces and self.writing.inner:
                told = _group(f"{40 + self.rank}", self.writing.inner_name,
                              self.writing.inner[self.rank])  # fmt: skip
                yield send(ts=at - 4, dur=10, kind="allreduce_", **{"Concrete Inputs": []}) | {
                    "tid": work.thread
                }
                yield details("allreduce", ts=at - 3, dur=8, **told) | {"tid": work.thread}
            event = launch(at, 5.0, tid=work.thread, correlation=correlation)
            yield event | ({"name": "cudaGraphLaunch"} if self.graphs else {})
        name = "gemm_bwd" if work.thread == AUTOGRAD else "gemm_fwd"
        name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL" if work.reduces else name
        yield self._device(work, name if work.action else "multi_tensor_scale", correlation)
        if self.writing.waits_inside and work.action:
            yield self._wait(work.launch_ns + 10 * US, self.writing.waits_inside)

    def _reduction(self, work: Kernel, correlation: int) -> Iterator[Event]:
        at = self.clock.us(work.launch_ns)
        yield send(ts=at - 10, dur=20, kind="allreduce_", **{"Concrete Inputs": []})
        yield details("allreduce", ts=at - 8, dur=16, **self._data_group())
        yield launch(at, 5.0, tid=MAIN, correlation=correlation)
        yield self._device(work, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", correlation)

    def _data_group(self) -> Event:
        if not self.writing.data:
            return {}
        return _group(f"{70 + self.rank}", self.writing.data_name, self.writing.data[self.rank])

    def _batch(self, work: Kernel, correlation: int) -> Iterator[Event]:
        """Write queued sends and receives, and the bracket that launches them all."""
        at = self.clock.us(work.launch_ns)
        for number, message in enumerate(reversed(work.messages)):
            yield from self._operator(message, at - 60 * (number + 1), work.thread)
        yield annotation("nccl:coalesced", ts=at - 2, dur=12, tid=work.thread)
        yield launch(at, 5.0, tid=work.thread, correlation=correlation) | {
            "cat": "cuda_driver",
            "name": "cuLaunchKernelEx",
        }
        name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
        yield self._device(work, name, correlation)

    def _group_of(self, message: Message) -> tuple[str, tuple[int, ...]]:
        """Return the group that a message goes through, and its members."""
        if message.what[0].startswith("ring"):
            return ("cp", self.ring) if self.writing.group == "pp" else ("0", self.members)
        name = self.writing.group
        lane = tuple(self.members[rank] for rank in self.lane)
        return name, self.writing.groups.get(name, lane if name == "pp" else self.members)

    def _operator(self, message: Message, at: float, thread: int) -> Iterator[Event]:
        sends = message.source == self.rank
        name, group = self._group_of(message)
        peer = self.members[message.destination if sends else message.source]
        yield send(group.index(peer), ts=at, dur=50, kind="send" if sends else "recv_") | {
            "tid": thread
        }
        yield details(
            "send" if sends else "recv",
            ts=at + 10,
            dur=30,
            **{
                "In msg nelems": 1 if message.what[0] == "token" else self.writing.elements,
                "Process Group Name": name,
                "Process Group Ranks": str(list(group)),
                ("Dst Rank" if sends else "Src Rank"): peer,
            },
        ) | {"tid": thread}


def _group(name: str, description: str, ranks: tuple[int, ...]) -> Event:
    return {
        "Process Group Name": name,
        "Process Group Description": description,
        "Process Group Ranks": str(list(ranks)),
    }


def write_run(play: Play, folder: Path, writing: Writing | None = None) -> None:
    """Write a trace a rank; the middle of a real trace lies between its hosts' steps."""
    writing = writing or Writing()
    for rank in range(len(play.devices)):
        writer = RankWriter(play, rank, writing)
        events = list(writer.events([step[rank] for step in play.steps]))
        name = writer.members[rank]
        world = writing.world or len(play.devices)
        content = document(events, rank=name, world=world)
        content["distributedInfo"]["pg_config"] = [
            {"pg_name": group, "ranks": list(ranks)} for group, ranks in writing.groups.items()
        ]
        write(folder / f"rank{name}.json", content)
