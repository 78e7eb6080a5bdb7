"""The types of a timeline: ranks, passes, messages, intervals; how a job is divided.

Frameworks name their groups, and so tell themselves and what a collective is for (recorded):

    PIPELINE_MODEL_PARALLEL_GROUP  [0, 2]   Megatron-core 0.19
    TENSOR_MODEL_PARALLEL_GROUP    [0, 1]     its all-reduces are work of passes
    DATA_PARALLEL_GROUP_WITH_CP    [0, 1]     its gathers and reductions run beside passes
    mesh_pp  mesh_tp  mesh_fsdp  mesh_batch   torchtitan 0.2; other torch meshes are called alike
    undefined                                 DeepSpeed 0.19, which names none
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from debubble.errors import Gap
from debubble.trace.columns import Group, merge
from debubble.units import NS_PER_US

if TYPE_CHECKING:
    from debubble.timeline.turns import Turns

# Multiprocessors of whole devices. A process that was given a part of one (MPS, MIG) sees fewer.
_MULTIPROCESSORS = {
    "V100": 80, "A100": 108, "A800": 108, "H100 PCIe": 114, "H100": 132, "H800": 132,
    "H200": 132, "GH200": 132, "B200": 148, "B300": 148, "L40S": 142,
}  # fmt: skip


class Role(StrEnum):
    """What the members of a group share."""

    PIPELINE = "pipeline"
    INNER = "inner"
    """A stage: tensor, context, sequence and expert parallelism. Part of passes."""
    DATA = "data"
    """Gradients and sharded parameters. Beside passes, whenever it runs."""
    MODEL = "model"
    """All stages of a model: norms, tied embeddings. Outside passes."""
    UNKNOWN = "unknown"


def _words(*words: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|[^a-z])(?:{'|'.join(words)})(?:[^a-z]|$)", re.IGNORECASE)


# In this order: Megatron's `TENSOR_AND_DATA_PARALLEL_GROUP` is for data, its
# `EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP` for the norm of all gradients of a model.
_ROLES = (
    (
        Role.MODEL,
        re.compile(
            r"MODEL_PIPELINE|^\S* ?MODEL_PARALLEL_GROUP|EMBEDDING_GROUP|OPTIMIZER_INSTANCE_GROUP"
        ),
    ),
    (
        Role.DATA,
        _words(
            "dp", "ddp", "fsdp", "efsdp", "hsdp", "edp", "data", "replicate", "shard", "batch",
            "loss",
        ),
    ),
    (Role.PIPELINE, _words("pp", "pipe", "pipeline")),
    (Role.INNER, _words("tp", "cp", "ep", "sp", "etp", "tensor", "context", "expert", "sequence")),
)  # fmt: skip


def role_of(group: Group) -> Role:
    """Say what a group is for, by its name and description; unknown where they tell nothing."""
    text = f"{group.name} {group.description}"
    return next((role for role, pattern in _ROLES if pattern.search(text)), Role.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How a job is divided over its ranks; None where the groups do not tell."""

    framework: str | None = None
    """`megatron`, `torchtitan`, `deepspeed`; None where nothing tells."""
    tensor: int | None = None
    context: int | None = None
    expert: int | None = None
    data: int | None = None
    """Replicas: samples of a batch are divided over so many."""
    sharded: int | None = None
    """Ranks that share one copy of the parameters, where they are fully sharded."""
    microbatch_size: int | None = None
    """Samples of a microbatch."""
    sequence: int | None = None
    """Tokens of a sample, as messages hold them: with sequence parallelism, of one rank's share."""

    @property
    def microbatch_tokens(self) -> int | None:
        """Tokens of one microbatch, where both sizes are known."""
        if self.microbatch_size is None or self.sequence is None:
            return None
        return self.microbatch_size * self.sequence


_DIMENSIONS = 3
_MEGATRON = "PIPELINE_MODEL_PARALLEL_GROUP"
# A torch mesh may be anybody's; this one is torchtitan's own.
_TORCHTITAN = "mesh_loss_mesh"
_SIZES = {
    "tensor": ("TENSOR_MODEL_PARALLEL_GROUP", "mesh_tp"),
    "context": ("CONTEXT_PARALLEL_GROUP", "mesh_cp"),
    "expert": ("EXPERT_MODEL_PARALLEL_GROUP", "mesh_ep"),
    "data": ("DATA_PARALLEL_GROUP", "mesh_batch"),
    "sharded": ("mesh_fsdp",),
}


def divide(groups: Iterable[Group]) -> Parallelism:
    """Read a rank's groups: it is a member of each, so that their sizes are the job's."""
    size = {group.description: len(group.ranks) for group in groups if group.ranks}
    framework = None
    if _MEGATRON in size:
        framework = "megatron"
    elif _TORCHTITAN in size:
        framework = "torchtitan"
    found = {
        what: next((size[name] for name in names if name in size), None)
        for what, names in _SIZES.items()
    }
    return Parallelism(framework=framework, **found)


def read_shapes(parallelism: Parallelism, shapes: Mapping[str, int]) -> Parallelism:
    """Tell samples and tokens by messages, counted by shape: Megatron writes [tokens, samples,
    width], others samples first. Of tokens that differ, the mean; each rank of a context-parallel
    group holds a part of a sample.

    Where nobody's framework is known, neither is which of the two comes first.
    """  # noqa: D205 (one sentence)
    read = {tuple(map(int, shape.split("x"))): count for shape, count in shapes.items()}
    tensors = {sizes: count for sizes, count in read.items() if len(sizes) == _DIMENSIONS}
    if not tensors or parallelism.framework is None:
        return parallelism
    tokens_at = 0 if parallelism.framework == "megatron" else 1
    tokens = sum(sizes[tokens_at] * count for sizes, count in tensors.items())
    usual = max(tensors, key=lambda sizes: tensors[sizes])
    return replace(
        parallelism,
        microbatch_size=usual[1 - tokens_at],
        sequence=round(tokens / sum(tensors.values())) * (parallelism.context or 1),
    )


I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
F64 = NDArray[np.float64]
Flags = NDArray[np.bool_]

UNKNOWN = -1
# Beyond all times, and far enough from the largest number to be laid on another clock.
NEVER_WAITED_NS = 2**62
# Batches and messages have heavy tails, which a median hides: one in twenty takes longer than this.
TAIL_PERCENT = 95
# Of fewer samples nothing is concluded; of one step neither, which may be any step.
FEWEST_SAMPLES, FEWEST_STEPS = 3, 2
# No capture begins later than another, and no scheduler is ahead, by more batches or collectives.
MOST_IN_FLIGHT = 64
# What begins this soon after another thing ends was queued behind it, or waited for it.
AT_ONCE_NS = 50_000


class PassKind(IntEnum):
    """What a pass computes."""

    F = 0
    B = 1
    I = 2  # noqa: E741 (the papers' letter)
    W = 3


_TYPES = {"I32": np.int32, "U8": np.uint8, "Flags": np.bool_}
_LENGTHS = ("busy_ns", "exposed_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Arrays of one length; those called `_ns` are moments, but for two."""

    def __len__(self) -> int:
        return len(next(iter(self.arrays().values())))

    @classmethod
    def no_rows(cls) -> Self:
        """Return no row at all."""
        types = {column.name: _TYPES.get(str(column.type), np.int64) for column in fields(cls)}
        return cls(**{name: np.zeros(0, dtype=dtype) for name, dtype in types.items()})

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the columns alone, by name."""
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        return {name: col for name, col in columns.items() if isinstance(col, np.ndarray)}

    def where(self, kept: Flags | I64) -> Self:
        """Return a part of the rows."""
        return replace(self, **{name: column[kept] for name, column in self.arrays().items()})

    def shifted(self, offset_ns: int) -> Self:
        """Return them on a clock that is ahead by so much."""
        moments = {
            name: column + offset_ns
            for name, column in self.arrays().items()
            if name.endswith("_ns") and name not in _LENGTHS
        }
        return replace(self, **moments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes(Columns):
    """Stretches of compute, one a stage, microbatch and kind, sorted by start."""

    rank: I32
    stage: I32
    kind: U8
    microbatch: I32
    step: I32
    issued_ns: I64
    """When the host issued the first piece of it."""
    start_ns: I64
    end_ns: I64
    busy_ns: I64
    """Compute inside the stretch, as a union."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers(Columns):
    """Messages from rank to rank, each send matched with its receive, sorted by receive end."""

    source: I32
    destination: I32
    step: I32
    message_bytes: I64
    send_start_ns: I64
    send_end_ns: I64
    receive_start_ns: I64
    receive_end_ns: I64
    fused: Flags
    """Part of an exchange: its kernel also carried a message the other way."""
    send_issued_ns: I64
    """When the sender's host issued it."""
    receive_issued_ns: I64
    send_queue: I32
    """The sender's stream for it: what is on one stream keeps its order. -1 where there is none."""
    receive_queue: I32
    send_waited_ns: I64
    """When the sender's host let its later work wait for it; `NEVER_WAITED_NS` where not known."""
    receive_waited_ns: I64

    @property
    def met_ns(self) -> I64:
        """When both sides were there: from then on a message is on the wire, before it is wait."""
        return np.maximum(self.send_start_ns, self.receive_start_ns)

    @property
    def waited(self) -> Flags:
        """Whose receiver was there first: all of the message is seen."""
        waited: Flags = self.receive_start_ns <= self.send_start_ns
        return waited

    @property
    def buffered(self) -> Flags:
        """Which had left before their receive began: their wire is hidden, the drain is seen."""
        buffered: Flags = ~self.fused & (self.send_end_ns <= self.receive_start_ns)
        return buffered


def rows_by_hop(transfers: Transfers) -> dict[tuple[int, int], I64]:
    """Return the rows of each hop, by the rank that sends and the one that receives."""
    source, destination = transfers.source, transfers.destination
    order = np.lexsort((destination, source))
    changes = (np.diff(source[order]) != 0) | (np.diff(destination[order]) != 0)
    parts = np.split(order, np.flatnonzero(changes) + 1) if len(order) else []
    return {(int(source[part[0]]), int(destination[part[0]])): part for part in parts}


_Columns = TypeVar("_Columns", bound=Columns)


def join_columns(parts: Sequence[_Columns], *, by: str) -> _Columns:
    """Put the rows of several tables into one, sorted by a column."""
    arrays = [part.arrays() for part in parts]
    columns = {name: np.concatenate([part[name] for part in arrays]) for name in arrays[0]}
    order = np.argsort(columns[by], kind="stable")
    ordered: dict[str, Any] = {name: column[order] for name, column in columns.items()}
    return replace(parts[0], **ordered)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmatchedMessages:
    """Messages of a step that only one side has, or that have no times."""

    ends: tuple[int, int]
    """The rank that sends, or should have, and the one that receives."""
    step: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals(Columns):
    """Disjoint stretches of time, sorted."""

    start_ns: I64
    end_ns: I64

    def inside(self, begin_ns: int, end_ns: int) -> int:
        """Return how many nanoseconds of a window they cover."""
        first = self.end_ns.searchsorted(begin_ns, side="right")
        last = self.start_ns.searchsorted(end_ns)
        if first >= last:
            return 0
        start = np.maximum(self.start_ns[first:last], begin_ns)
        return int((np.minimum(self.end_ns[first:last], end_ns) - start).sum())

    def covered_until(self, moments: I64) -> I64:
        """Return how much of the time up to each moment they cover."""
        before = np.concatenate(([0], np.cumsum(self.end_ns - self.start_ns)))
        begun = np.searchsorted(self.start_ns, moments, side="right")
        reach = np.concatenate(([0], self.end_ns))[begun]
        covered: I64 = before[begun] - np.maximum(reach - moments, 0) * (begun > 0)
        return covered


def union_of(start_ns: I64, end_ns: I64) -> Intervals:
    """Return the union of stretches that may overlap, in any order."""
    order = np.argsort(start_ns, kind="stable")
    start, end = merge(start_ns[order], end_ns[order])
    return Intervals(start_ns=start, end_ns=end)


def split(intervals: Intervals, begin: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """Cut a stretch by intervals: what lies in them, and what between."""
    at = begin
    touched = slice(
        intervals.end_ns.searchsorted(begin, side="right"), intervals.start_ns.searchsorted(end)
    )
    columns = intervals.start_ns[touched].tolist(), intervals.end_ns[touched].tolist()
    for start, until in zip(*columns, strict=True):
        if at < start:
            yield at, start, False
        if max(at, start) < min(end, until):
            yield max(at, start), min(end, until), True
        at = max(at, min(end, until))
    if at < end:
        yield at, end, False


def without(some: Intervals, others: Intervals) -> Intervals:
    """Return the time of some intervals that no other covers."""
    parts = (some.start_ns, some.end_ns, others.start_ns, others.end_ns)
    moments = np.concatenate(parts)
    weight = np.repeat([1, -1, -2, 2], [len(part) for part in parts])
    order = np.argsort(moments, kind="stable")
    moments, state = moments[order], np.cumsum(weight[order])
    rows = np.flatnonzero((state[:-1] == 1) & (np.diff(moments) > 0))
    return Intervals(start_ns=moments[rows], end_ns=moments[rows + 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronisations(Columns):
    """Calls that kept a host until its device was done, sorted."""

    start_ns: I64
    end_ns: I64
    whole: Flags
    """Until all streams of the device were; else one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Allocated bytes of one rank, as a line over microbatches in flight."""

    peak_bytes: int
    """Whenever it was: while passes run, or between steps, as optimizers make it."""
    peak_reserved_bytes: int | None
    static_bytes: int | None
    """Held with no microbatch in flight: parameters, gradients, optimizer."""
    per_microbatch_bytes: int | None
    transient_bytes: int | None
    """What the peak has beyond the line: work space of a pass."""
    most_in_flight: int
    limit_bytes: int | None
    gradient_bytes: int | None = None
    """Of what is held, that which comes with a step's first backward pass."""
    passes_peak_bytes: int | None = None
    """The most while passes were issued: what activations and gradients hold counts there."""
    between_peak_bytes: int | None = None
    """The most between the passes of two steps: what an optimizer's step holds counts there."""
    halfway_bytes: int | None = None
    """What a microbatch takes more once it had I and waits for W; 0 where B is whole."""
    job_peak_bytes: int | None = None
    """The most since the job began, by its sidecar: steps that were not captured count too."""
    free_bytes: int | None = None
    """Of the device after the capture, by its sidecar."""
    other_bytes: int | None = None
    """Held on the device by others than this process's PyTorch, by its sidecar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers of one kind in a row, where a model has several kinds."""

    name: str
    """`dense` or `experts`."""
    layers: int
    layer_ns: int
    """What one takes forward, in kernel time."""
    span_ns: int
    """From its first kernel to the next layer's: collectives and gaps are in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """What one forward pass of a stage is made of, in kernel time: layers, and what is none."""

    stage: int
    layers: int
    layer_ns: int
    """0 where the stage has none."""
    before_ns: int
    """An embedding, on a first stage."""
    after_ns: int
    """Norm, head and loss, on a last stage."""
    backward_layer_ns: int | None = None
    """The same of a backward pass; None where its layers could not be told."""
    backward_rest_ns: int | None = None
    kinds: tuple[LayerKind, ...] = ()
    """The layers in their order; nothing where all of the model are of one kind."""

    @property
    def rest_ns(self) -> int:
        """What is not of layers."""
        return self.before_ns + self.after_ns

    @property
    def stretch(self) -> float:
        """How many times its kernels a layer lasts, where there are kinds; else 1, by kernels."""
        lasted = sum(kind.layers * kind.span_ns for kind in self.kinds)
        return lasted / max(self.layers * self.layer_ns, 1) if self.kinds else 1.0


class CollectiveKind(IntEnum):
    """A collective that no member can leave before all have arrived."""

    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_GATHER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCollectives(Columns):
    """One rank's reductions and gathers, in the order it asked for them."""

    groups: tuple[Group, ...]
    group: I32
    """Which of them; -1 where the trace does not tell."""
    kind: U8
    step: I32
    ready_ns: I64
    """When it was asked for and the compute that was issued before it had ended."""
    start_ns: I64
    end_ns: I64
    exposed_ns: I64
    """What no compute covers of it."""
    blocks: Flags
    """Nothing is computed when it ends: what follows waited for it."""
    in_forward: Flags
    """In the middle of a forward pass."""
    message_bytes: I64


@dataclass(frozen=True, slots=True, kw_only=True)
class Meetings(Columns):
    """Members of collectives, each as its rank saw it, sorted by start."""

    rank: I32
    start_ns: I64
    end_ns: I64
    arrived_ns: I64
    """When the last member that it waited for came: from then on it is its own time."""
    late: I32
    """Which rank that was; -1 where it is the rank itself."""

    @property
    def waits(self) -> Intervals:
        """When the rank spun until the last member came."""
        spun = self.arrived_ns > self.start_ns
        return union_of(self.start_ns[spun], self.arrived_ns[spun])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """One rank: where it stands in its pipeline, and when it was busy."""

    rank: int
    pipeline: int
    position: int
    """Its place among the ranks of the pipeline, from the first."""
    stages: tuple[int, ...]
    busy: Intervals
    """Compute."""
    occupied: Intervals
    """Compute, but no optimizer or clipping; and collectives inside passes that nothing covers."""
    apparent: Intervals
    """Any kernel at all: what a dashboard shows."""
    unissued: Intervals = field(default_factory=Intervals.no_rows)
    """Without compute, and the host had not issued the next of it."""
    data_parallel: Intervals = field(default_factory=Intervals.no_rows)
    """In a gather of parameters or a reduction of gradients that no compute covered, until the last
    pass of a step."""
    synchronisations: Synchronisations = field(default_factory=Synchronisations.no_rows)
    """Its host's."""
    held_up: Intervals = field(default_factory=Intervals.no_rows)
    """When its host's launches waited for room in the device's queue."""
    synchronised: Intervals = field(default_factory=Intervals.no_rows)
    """When its host was kept so, or had yet to issue the first thing afterwards."""
    clock_offset_ns: int = 0
    """What was added to this rank's stamps to lay them on the first rank's clock."""
    memory: MemoryFigures | None = None
    members: tuple[int, ...] = ()
    """All ranks of its pipeline, first to last, those without a trace too."""
    layers: tuple[StageLayers, ...] = ()
    """What each of its stages is made of, where all stages have a layer in common."""
    parallelism: Parallelism = field(default_factory=Parallelism)
    """How its job is divided, and by whose framework."""
    recomputed_share: float = 0.0
    """Of its pipeline's layers, those whose forward kernels backward passes run once more."""
    weight_shares: Mapping[int, float] = field(default_factory=dict)
    """By stage: of a whole backward pass, what makes gradients of weights, where that is told."""
    outside: tuple[tuple[str, Intervals], ...] = ()
    """What it does besides its passes: optimizer, reductions, data loading."""
    side_work: tuple[tuple[str, Intervals], ...] = ()
    """What runs beside its passes, and no pass waits for: prefetch, checkpoints, reductions."""
    collectives: RankCollectives | None = None
    """What it reduces and gathers with others, where it does."""
    meetings: Meetings = field(default_factory=Meetings.no_rows)
    """Its collectives with ranks of other stages."""
    shared: Meetings = field(default_factory=Meetings.no_rows)
    """Its collectives with ranks of its own stage, of other pipelines, that were captured."""
    handing_over: Intervals = field(default_factory=Intervals.no_rows)
    """When its host stood in a send to another host, which ends when that one takes it."""
    turns: Turns | None = None
    """Those of its scheduler, where an engine labels them."""
    timers: bool = False
    """Known by its job's own timers, pass by pass: of kernels and hosts they show nothing."""
    set_up: tuple[tuple[int, str], ...] = ()
    """Steps in which it was still setting up, with what was seen."""
    unfinished: tuple[int, ...] = ()
    """Steps of which kernels were launched and not recorded."""
    file: str = ""
    """Its trace."""
    base_ns: int = 0
    """What the trace counts its stamps from."""
    device: tuple[str, int] = ("", -1)
    """Its host and the number of its device there; -1 where it has none."""
    device_name: str = ""
    multiprocessors: int | None = None
    """Of the device, as the rank sees it."""

    def shifted(self, offset_ns: int) -> RankTimeline:
        """Return it on the clock of its pipeline, to which so much is added."""
        laid: dict[str, Any] = {"clock_offset_ns": self.clock_offset_ns + offset_ns}
        for column in fields(self):
            value = getattr(self, column.name)
            if isinstance(value, Columns):
                laid[column.name] = value.shifted(offset_ns)
        for name in ("outside", "side_work"):
            laid[name] = tuple((what, ran.shifted(offset_ns)) for what, ran in getattr(self, name))
        return replace(self, **laid)

    @property
    def recomputes(self) -> bool:
        """Whether backward passes run forward kernels of any layer once more."""
        return self.recomputed_share > 0

    def stamp_us(self, moment_ns: int) -> float:
        """Return a moment as the rank's own trace writes it."""
        return (moment_ns - self.clock_offset_ns - self.base_ns) / NS_PER_US

    @property
    def peak_memory_bytes(self) -> int | None:
        """The most bytes allocated on the device."""
        return self.memory.peak_bytes if self.memory else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A run on one clock."""

    ranks: tuple[RankTimeline, ...]
    passes: Passes
    transfers: Transfers
    steps: tuple[int, ...]
    """None where the run marks none; then all passes carry step 0."""
    clock_uncertainty_ns: int
    gaps: tuple[Gap, ...] = ()
    unmatched: tuple[UnmatchedMessages, ...] = ()
    """Messages left over when sends were matched with receives."""
    inferred: bool = False
    """No step was marked; the order of the passes told them."""
    mixed: frozenset[int] = frozenset()
    """Pipelines whose ranks are of different runs: nothing may be compared between them."""
    unsure: Mapping[int, tuple[int, int | None]] = field(default_factory=dict)
    """Of pipelines that stream: how many batches fewer may be in flight than told, and how many
    more (None: any number), where captures do not show which batch of one rank is which of the
    next."""

    @property
    def pipelines(self) -> tuple[int, ...]:
        """The numbers of the pipelines."""
        return tuple(sorted({rank.pipeline for rank in self.ranks}))

    @property
    def members(self) -> dict[int, tuple[int, ...]]:
        """All ranks of each pipeline, first to last, those without a trace too."""
        return {rank.pipeline: rank.members for rank in self.ranks}

    def ranks_of(self, pipeline: int) -> tuple[RankTimeline, ...]:
        """Return the ranks of a pipeline, first to last."""
        members = [rank for rank in self.ranks if rank.pipeline == pipeline]
        return tuple(sorted(members, key=lambda rank: rank.position))


def may_share(ranks: Sequence[RankTimeline]) -> bool:
    """Tell whether all ranks may be on one device: same host as far as known, same number."""
    places = {rank.device for rank in ranks}
    return len(ranks) > 1 and len(places) == 1 and all(number >= 0 for _, number in places)


def surely_share(ranks: Sequence[RankTimeline]) -> bool:
    """Tell whether each rank was given a part of a device, and all may be of the same one."""
    return may_share(ranks) and all(_is_part(rank) for rank in ranks)


def ranks_a_device(ranks: Sequence[RankTimeline]) -> int:
    """Return how many of these ranks divide the memory of one device: 1 unless it is sure."""
    return len(ranks) if surely_share(ranks) else 1


def _is_part(rank: RankTimeline) -> bool:
    whole = [count for name, count in _MULTIPROCESSORS.items() if name in rank.device_name]
    return bool(whole and rank.multiprocessors and rank.multiprocessors < whole[0])
