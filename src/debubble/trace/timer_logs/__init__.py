"""Logs of timers in → what a pass of each stage takes, and why that is no timeline.

Megatron's and NeMo's timers and DeepSpeed's `wall_clock_breakdown` print how long things took, and
not when: no wait can be told from that. Where every rank prints, costs of stages can:

    times across ranks (ms):                      Megatron, --timing-log-option all: of an iteration
      forward-compute:
         rank  0: 812.41
         rank  1: 934.07
    [Rank 0] time (ms) | fwd_microstep: 21.36 | bwd_microstep: 45.10      DeepSpeed: of a microbatch
    [Rank 0] rank=0 time (ms) | forward_microstep: 21.36 | …              DeepSpeed before 0.9

Other lines are of no rank: (812.41, 934.07) is the fastest and the slowest, one number the slowest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from debubble.errors import TraceError
from debubble.trace.format import OTHER, Format, Reading, TraceFile
from debubble.trace.source import DEFAULT_LIMITS, Limits, inflate
from debubble.units import NS_PER_MS, counted

_DECIMAL = rb"\d{1,12}(?:\.\d{1,12})?"
_OF_RANKS = re.compile(rb"(?:^|\s)(forward|backward)-compute\s*:\s*$")
_OF_OTHERS = re.compile(rb"(?:^|\s)[a-zA-Z][\w-]*\s*:\s*$")
_OF_RANK = re.compile(rb"(?:^|\s)rank\s+(\d{1,7})\s*:\s*(%b)\s*$" % _DECIMAL)
_LINE_OF_RANK = re.compile(rb"\[Rank (\d{1,7})\] (?:rank=\d+ )?time \(ms\)([^\n]*)")
_TIMED = re.compile(rb"\b(fwd|forward|bwd|backward)(_microstep)?:\s*(%b)" % _DECIMAL)
_SETTING = re.compile(rb"(?:^|\s)([a-z_]{4,60})\s*\.{3,}\s*(\d{1,9}|True)\s*$")
# Lines of no rank.
_OF_NO_RANK = re.compile(
    rb"time \(ms\)[^\n]*\b(?:fwd|forward)(?:_microstep)?:|forward-compute\s*\.*\s*:\s*\(?\s*\d"
)
_HOW_TO_LOG = (
    "Megatron: --timing-log-level 2 --timing-log-option all; "
    "DeepSpeed: call `engine.timers.log(names, ranks=range(world))`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """What a pass of one microbatch takes in each stage, as its ranks printed it."""

    forward_ns: tuple[float, ...]
    backward_ns: tuple[float, ...]
    ranks: int
    """Of a pipeline; with several chunks each has as many stages."""
    chunks: int
    microbatches: int


_OfRanks = defaultdict[str, defaultdict[int, list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Printed:
    """Milliseconds by kind and rank, of a whole batch and of one microbatch."""

    batch: _OfRanks
    microbatch: _OfRanks
    settings: Mapping[str, str]

    @property
    def ranks(self) -> int:
        """How many ranks print both."""
        times = (self.batch, self.microbatch)
        return max(len(part["forward"].keys() & part["backward"].keys()) for part in times)


def _gather(data: bytes) -> _Printed:
    """Read all lines of ranks, and the settings that Megatron prints before it begins."""
    batch: _OfRanks = defaultdict(lambda: defaultdict(list))
    single: _OfRanks = defaultdict(lambda: defaultdict(list))
    settings: dict[str, str] = {}
    kind = ""
    for line in data.splitlines():
        if (found := _OF_RANK.search(line)) and kind:
            batch[kind][int(found[1])].append(float(found[2]))
        elif found := _OF_RANKS.search(line):
            kind = found[1].decode()
        elif found := _LINE_OF_RANK.search(line):
            rank = int(found[1])
            for name, of_one, value in _TIMED.findall(found[2]):
                told = single if of_one else batch
                told["forward" if name[:1] == b"f" else "backward"][rank].append(float(value))
        elif _OF_OTHERS.search(line):
            kind = ""
        elif found := _SETTING.search(line):
            settings[found[1].decode()] = found[2].decode()
    return _Printed(batch=batch, microbatch=single, settings=settings)


def read_stage_times(
    file: str,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> StageTimes:
    """Read what passes cost from a log; what it does not say of the pipeline has to be given."""
    data = inflate(file, limits)
    printed = _gather(data)
    if printed.ranks < 2:
        raise TraceError("no rank prints what its passes take", file=file, hint=_HOW_TO_LOG)
    said = printed.settings
    stages = _agree(file, "--stages", ranks, said.get("pipeline_model_parallel_size"))
    many = _agree(file, "--microbatches", microbatches, _microbatches(said))
    chunks = int(said.get("virtual_pipeline_model_parallel_size", 1))
    found = {}
    for kind in ("forward", "backward"):
        told = printed.microbatch if printed.microbatch[kind] else printed.batch
        share = chunks if told is printed.microbatch else chunks * many
        by_stage: defaultdict[int, list[float]] = defaultdict(list)
        world = max(told[kind]) + 1
        if world % stages or len(told[kind]) != world:
            message = f"{counted(len(told[kind]), 'rank')} of {world} print their {kind} passes"
            hint = f"a log of all ranks is needed, as many to each of {counted(stages, 'stage')}"
            raise TraceError(message, file=file, hint=hint)
        for rank, times in told[kind].items():
            warm = times[1:] or times  # the first iteration sets things up
            by_stage[_stage_of(rank, world, stages, said)].append(median(warm))
        one_chunk = [median(by_stage[stage]) * NS_PER_MS / share for stage in range(stages)]
        found[kind] = tuple(one_chunk * chunks)
    return StageTimes(
        forward_ns=found["forward"],
        backward_ns=found["backward"],
        ranks=stages,
        chunks=chunks,
        microbatches=many,
    )


def _microbatches(said: Mapping[str, str]) -> str | None:
    """Return how many microbatches a step has by the sizes of a batch."""
    sizes = [said.get(name) for name in ("global_batch_size", "micro_batch_size",
                                         "data_parallel_size")]  # fmt: skip
    if None in sizes or "0" in sizes or "True" in sizes:
        return None
    whole, one, replicas = (int(size or 0) for size in sizes)
    return str(whole // (one * replicas)) if whole % (one * replicas) == 0 else None


def _agree(file: str, flag: str, given: int | None, said: str | None) -> int:
    """Return what the log says, else what was given; where both do, they must agree."""
    if said is None and given is None:
        message = f"the log does not say what {flag} is"
        raise TraceError(message, file=file, hint=f"give it, such as {flag} 8")
    if said is not None and given is not None and int(said) != given:
        hint = f"leave {flag} out: costs are of the run that was logged"
        raise TraceError(f"the log says {said}, and {flag} {given}", file=file, hint=hint)
    value = int(said) if said is not None else int(given or 0)
    if value < 1:
        raise TraceError(f"{flag} {value} is none", file=file)
    return value


def _stage_of(rank: int, world: int, stages: int, said: Mapping[str, str]) -> int:
    """Return the place of a rank: pipelines are the outermost dimension unless told otherwise."""
    if said.get("use_tp_pp_dp_mapping") == "True":
        inner = int(said.get("tensor_model_parallel_size", 1))
        inner *= int(said.get("context_parallel_size", 1))
        return rank // max(inner, 1) % stages
    return rank // (world // stages)


def recognise(file: str, prefix: bytes) -> TraceFile | None:
    """Tell a log by lines that only such timers print, and say what can be made of it."""
    if b"-compute" not in prefix and b"time (ms)" not in prefix:
        return None
    command = f"debubble simulate --costs {file}"
    if _gather(prefix).ranks > 1:
        hint = f"what passes of each stage cost is enough for `{command}`; for waits, record traces"
    elif _OF_NO_RANK.search(prefix) and re.search(rb"bwd|backward", prefix):
        hint = f"for costs of each stage log every rank, and give it to `{command}`: {_HOW_TO_LOG}"
    else:
        return None
    why = TraceError(
        "is a log of timers: how long passes took, and not when, so no wait can be told from it",
        hint=hint,
        file=file,
    )
    return TraceFile(file=file, format=OTHER, why_not=why)


def read(known: TraceFile, limits: Limits) -> Reading:  # noqa: ARG001 (no log is ever read so)
    """Say once more why it is none."""
    return Reading(error=known.why_not)


FORMAT = Format(
    name="timer log",
    position=45,
    recognise=recognise,
    read=read,
    one_a_rank=False,
)
