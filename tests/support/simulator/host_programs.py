"""What the host of each rank of a pipeline does in a step: compute, post messages, wait for them.

As torch does it: fused exchanges for 1F1B, separate sends and receives for all other schedules.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from typing import NamedTuple

import numpy as np

from debubble.timeline.schedules import Action, order_of

MS, US = 1_000_000, 1_000
# Of a stage of weight one. A full backward pass computes both gradients.
LENGTH_NS = {"F": 5 * MS, "B": 10 * MS, "I": 5 * MS, "W": 5 * MS}
KERNELS = {"F": 3, "B": 5, "I": 3, "W": 2}
# A message of a few bytes.
TOKEN_NS = 30 * US
MAIN, AUTOGRAD = 100, 200
OPTIMIZER = "Optimizer.step#AdamW.step"

Group = tuple[Action, ...]
"""One pass, or a forward and a backward pass that run as one."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is run, and how its messages behave."""

    schedule: str
    ranks: int
    microbatches: int
    chunks: int | None = None
    steps: int = 2
    weights: tuple[float, ...] = ()
    layers: tuple[int, ...] = ()
    """Of each stage: its forward pass has as many kernels. Else traces tell none."""
    fused: bool = False
    """As torch's 1F1B: a send and the next receive in one batch, waited for at once."""
    buffered: bool = False
    """A send ends before its receive begins, as over a network."""
    early: bool = False
    """Receives are posted one pass ahead and spin; a stream for each peer and direction."""
    wire_ns: int = 1_300 * US
    run_ahead: bool = True
    """The host never waits for its device; otherwise at the end of each step."""
    messages: int = 1
    """Tensors in each message of the schedule, such as hidden states and residual."""
    separate: bool = False
    """Each of them is posted and carried on its own."""
    recompute: bool = False
    answers: bool = True
    """The last rank of a forward-only run hands a token to the first; else ranks run freely."""
    megatron: bool = False
    """Interleaved: a forward and a backward pass, then all their messages in one batch."""
    context: int = 1
    """Ranks that share each stage, side by side; they pass blocks around a ring in each pass."""
    graphs: bool = False
    """A pass is one launch of a CUDA graph."""
    optimizer_ns: int = 0
    """What each rank's optimizer takes right after its last pass; then nothing is reduced."""
    noise: float = 0.03
    seed: int = 0
    # What can be wrong with a run, each to be planted.
    slow_hop: tuple[int, int, float] | None = None
    """Sender, receiver, and how many times as long its messages take."""
    spikes: tuple[int, float] | None = None
    """A rank whose every fourth pass takes so many times as long."""
    slow_data: tuple[tuple[int, float], ...] = ()
    """Microbatches that take so many times as long on every stage."""
    late_host: tuple[int, int, int] | None = None
    """A rank whose host takes so many ns more before every n-th pass."""
    collective: tuple[int, int] | None = None
    """A rank whose passes each hold a collective of so many ns."""
    lowered: tuple[tuple[str, ...], ...] = ()
    """What each rank's host does in torch's own words: `0F0`, `0SEND_F0`, `4RECV_F0`."""
    slow_first: float = 1.0
    """How much longer every pass of the first step takes."""

    @property
    def trains(self) -> bool:
        return self.schedule != "forward-only"


class Message(NamedTuple):
    source: int
    destination: int
    what: tuple[str, int, int, int]
    """Kind, stage that sends, microbatch, and which tensor."""


@dataclass(eq=False)
class Kernel:
    """Something on a device: a part of a pass, a batch of messages, or neither."""

    stream: int
    thread: int = MAIN
    action: Action | None = None
    messages: tuple[Message, ...] = ()
    collective: bool = False
    reduces: bool = False
    """A collective in the middle of a pass."""
    optimizes: bool = False
    first_of_launch: bool = True
    length_ns: int = 0
    launch_ns: int = 0
    ready_ns: int = -1
    behind: Kernel | None = None
    start_ns: int = -1
    end_ns: int = -1

    @property
    def computes(self) -> bool:
        return not self.messages and not self.collective


@dataclass
class Block:
    """What the host does in one go, under a label where the framework writes one."""

    name: str
    items: list[tuple[str, Kernel]] = field(default_factory=list)
    """`run` or `wait`, and for which kernel."""
    start_ns: int = 0
    end_ns: int = 0


class Programs:
    """Writes the host program of each rank, from the schedule's order."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.order = order_of(setup.schedule, setup.ranks, setup.microbatches, setup.chunks)
        self.home = {a.stage: r for r, actions in enumerate(self.order) for a in actions}
        self.stages = len(self.home)
        self.noise = np.random.default_rng(setup.seed)
        self.computed = [0] * setup.ranks
        self.steps = 0

    def step(self) -> list[list[Block]]:
        """Return the blocks of one step for each rank."""
        self.steps += 1
        groups = [_pairs(actions) for actions in self.order]
        self.sent: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
        for rank, actions in enumerate(self.order):
            for message in (m for action in actions for m in self._sends(rank, action)):
                self.sent[rank, message.destination].append(message)
        write = self._fused if self.setup.fused else self._asynchronous
        write = self._in_torchs_words if self.setup.lowered else write
        return [[*write(rank, mine), *self._ending(rank)] for rank, mine in enumerate(groups)]

    def _sends(self, rank: int, action: Action) -> list[Message]:
        return self._messages(rank, action, sends=True)

    def _needs(self, rank: int, action: Action) -> list[Message]:
        return self._messages(rank, action, sends=False)

    def _messages(self, rank: int, action: Action, *, sends: bool) -> list[Message]:
        ahead = {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
        target = action.stage + (ahead if sends else -ahead)
        other = self.home.get(target, rank)
        if other == rank:
            return []
        ends = (rank, other) if sends else (other, rank)
        what = "F" if ahead > 0 else "B", action.stage if sends else target, action.microbatch
        return [Message(*ends, (*what, tensor)) for tensor in range(self.setup.messages)]

    def _compute(self, action: Action) -> list[Kernel]:
        weights = self.setup.weights or (1.0,) * self.stages
        length = LENGTH_NS[action.kind] * weights[action.stage]
        length *= self.setup.slow_first if self.steps == 1 else 1
        length *= dict(self.setup.slow_data).get(action.microbatch, 1.0)
        length *= 1 + self.setup.noise * float(self.noise.standard_normal())
        rank = self.home[action.stage]
        self.computed[rank] += 1
        if self.setup.spikes and self.setup.spikes[0] == rank and self.computed[rank] % 4 == 0:
            length *= self.setup.spikes[1]
        count = KERNELS[action.kind] - (action.kind == "B" and action.microbatch == 0)
        if self.setup.layers and action.kind == "F":
            count = self.setup.layers[action.stage]
        thread = MAIN if action.kind == "F" else AUTOGRAD
        if self.setup.recompute and action.kind == "B":
            length, count = length * 1.5, count + KERNELS["F"]
        kernels = [
            Kernel(7, thread, action, length_ns=round(length / count),
                   first_of_launch=not (self.setup.graphs and number))
            for number in range(count)
        ]  # fmt: skip
        if self.setup.collective and self.setup.collective[0] == rank:
            reduction = Kernel(7, thread, action, reduces=True, length_ns=self.setup.collective[1])
            kernels.insert(1, reduction)
        return kernels

    def _post(self, messages: list[Message]) -> list[Kernel]:
        """Carry messages in one kernel, or each in its own."""
        size = 1 if self.setup.separate else max(len(messages), 1)
        batches = [messages[at : at + size] for at in range(0, len(messages), size)]
        return [Kernel(self._stream(batch[0]), messages=tuple(batch)) for batch in batches]

    def _stream(self, message: Message) -> int:
        return 16 + (message.source * 64 + message.destination if self.setup.early else 0)

    def _ending(self, rank: int) -> list[Block]:
        """Scale gradients and reduce them; or hand the last rank's token to the first."""
        if self.setup.trains:
            scale = [("run", Kernel(7, length_ns=40 * US)) for _ in range(3)]
            step = Kernel(7, length_ns=self.setup.optimizer_ns, optimizes=True)
            if self.setup.optimizer_ns:
                return [Block("", scale), Block(OPTIMIZER, [("run", step)])]
            return [Block("", scale), Block("", [("run", Kernel(20, collective=True))])]
        last = self.setup.ranks - 1
        token = Message(last, 0, ("token", 0, 0, 0))
        if rank not in {0, last} or not self.setup.answers:
            return []
        kernel = Kernel(self._stream(token), messages=(token,))
        return [Block("", [("run", kernel), ("wait", kernel)])]

    def _asynchronous(self, rank: int, groups: list[Group]) -> Iterator[Block]:
        """Post receives in the order of their sends, just before their pass or one pass ahead."""
        posted: dict[Message, Kernel] = {}
        for number, group in enumerate(groups):
            needs = [n for action in group for n in self._needs(rank, action)]
            for one in groups[number : number + (2 if self.setup.early else 1)]:
                wanted = [n for action in one for n in self._needs(rank, action)]
                for batch in self._unposted(rank, wanted, posted):
                    kernels = self._post(batch)
                    posted |= {message: kernel for kernel in kernels for message in kernel.messages}
                    name = f"{one[0].stage}RECV_{batch[0].what[0]}{batch[0].what[2]}"
                    yield Block(name, [("run", kernel) for kernel in kernels])
            yield Block(_name(group), [("wait", posted[n]) for n in needs] + self._run(group))
            for action in group:
                if sends := self._post(self._sends(rank, action)):
                    name = f"{action.stage}SEND_{action.kind}{action.microbatch}"
                    yield Block(name, [("run", kernel) for kernel in sends])

    def _in_torchs_words(self, rank: int, groups: list[Group]) -> Iterator[Block]:
        """Post receives where torch does: ahead of their pass, maybe in front of ready sends."""
        actions = {str(action): action for group in groups for action in group}
        posted: dict[Message, Kernel] = {}
        for word in self.setup.lowered[rank]:
            if word in actions:
                waits = [("wait", posted[need]) for need in self._needs(rank, actions[word])]
                yield Block(word, waits + self._run((actions[word],)))
                continue
            stage, verb, kind, number = _TORCHS_WORD.fullmatch(word).groups()
            action = actions[f"{stage}{kind}{number}"]
            take = self._needs if verb == "RECV" else self._sends
            kernels = self._post(take(rank, action))
            posted |= {message: kernel for kernel in kernels for message in kernel.messages}
            yield Block(word, [("run", kernel) for kernel in kernels])

    def _unposted(
        self, rank: int, wanted: list[Message], posted: dict[Message, Kernel]
    ) -> Iterator[list[Message]]:
        """Yield what must be posted for a pass: each message behind all that were sent before."""
        for source in sorted({message.source for message in wanted}):
            queue = self.sent[source, rank]
            last = max(queue.index(message) for message in wanted if message.source == source)
            missing = [message for message in queue[: last + 1] if message not in posted]
            for _, batch in groupby(missing, key=lambda message: message.what[:3]):
                yield list(batch)

    def _fused(self, rank: int, groups: list[Group]) -> Iterator[Block]:
        """Write torch's Schedule1F1B: between F and B, sends and receives go in one batch."""
        pending: list[Message] = []
        before = ""
        for (action,) in groups:
            needs = self._needs(rank, action)
            together = before not in {"", action.kind}
            batches = [[*pending, *needs]] if together else [pending, needs]
            kernels = [kernel for batch in batches for kernel in self._post(batch)]
            waited = [k for k in kernels if together or k.messages[0].destination == rank]
            yield Block("", [("run", kernel) for kernel in kernels])
            yield Block("", [*(("wait", k) for k in waited), *self._run((action,))])
            pending, before = self._sends(rank, action), action.kind
        yield Block("", [("run", kernel) for kernel in self._post(pending)])

    def _run(self, group: Group) -> list[tuple[str, Kernel]]:
        """Launch the kernels of a pass, or of two passes in turns."""
        parts = [self._compute(action) for action in group]
        turns = zip_longest(*parts)
        return [("run", kernel) for turn in turns for kernel in turn if kernel]


_TORCHS_WORD = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")


def _pairs(actions: list[Action]) -> list[Group]:
    """Put a forward pass that overlaps together with the backward pass after it."""
    rest = iter(actions)
    return [(action, next(rest)) if action.overlap else (action,) for action in rest]


def _name(group: Group) -> str:
    names = [str(action) for action in group]
    return names[0] if len(names) == 1 else f"({';'.join(names)})OVERLAP_F_B"
