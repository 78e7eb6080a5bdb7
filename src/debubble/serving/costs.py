"""Batches and their kernels in → what a batch of any size takes on each stage, and its message.

A pass is a program: the host takes so long from one launch to the next, the device so long for each
kernel, and now and then the host waits for the device:

    host     l l l s . . . l l l s
    device     k k kkkkkk    k k kkk        s: kept until the device is done

Run again with other lengths it tells what a pass takes where hosts are quicker, as they are without
the profiler, or where kernels are longer, as with more tokens. The device's part is told by two
sizes, decode's and the prompts': kernels of attention grow with tokens times context, all others
with tokens, from what a small batch takes up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from debubble.costs.passes import surely_share
from debubble.serving.batches import Batches, Phase, pass_rows
from debubble.serving.queue import Queue
from debubble.timeline.model import I64, Flags, RankTimeline
from debubble.timeline.work import find_synchronisations, find_work
from debubble.trace.columns import RankTrace

# From a launch to the kernel's start, on a device that has nothing to do.
_LATENCY_NS = 5_000
_ATTENTION = re.compile(r"sdpa|flash|fmha|attention|mha|softmax", re.IGNORECASE)
_SOFTMAX = re.compile(r"softmax", re.IGNORECASE)
_MATRIX = re.compile(r"gemm|nvjet|cutlass|xmma|bmm", re.IGNORECASE)
# How much quicker hosts launch without the profiler: recorded with one and two batches in flight,
# where no launch waits for another rank's.
_USUAL_SLOWDOWN = 2.1
# What a launch takes for each rank that launches at the same time, where ranks share a device (four
# of them by MPS, recorded: some 110,000 launches a second in all).
_SHARED_LAUNCH_NS = 9_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One pass, in the order of its host: launches, and calls that wait for the device."""

    host_ns: I64
    """Before each."""
    device_ns: I64
    """Of the kernel that is launched; 0 of a call that waits."""
    waits: Flags

    def run(self, hosts: float, device: float, floor_ns: float = 0.0) -> float:
        """Return what the pass takes with hosts so many times as quick, kernels so many times as
        long, and launches that take no less than a floor.
        """  # noqa: D205 (one sentence)
        host = at = 0.0
        steps = np.maximum(self.host_ns / hosts, np.where(self.waits, 0.0, floor_ns)).tolist()
        kernels = (self.device_ns * device).tolist()
        for step, kernel, waits in zip(steps, kernels, self.waits.tolist(), strict=True):
            host += step
            if waits:
                host = max(host, at)
            else:
                at = max(at, host + _LATENCY_NS) + kernel
        return at


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCosts:
    """What batches of one phase take on one stage."""

    tokens: float
    length_ns: float
    device_ns: float
    attention_ns: float
    """Of the device's, what grows with the context."""
    program: Program | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the passes, messages and turns of a stream take under the profiler."""

    stages: int
    decode: tuple[PhaseCosts, ...]
    prompts: tuple[PhaseCosts, ...] | None
    """Of batches with prompts in them; None where none was captured."""
    wire_ns: tuple[float, float]
    """Of a message: what it takes at least, and of each token more."""
    turn_ns: tuple[float, ...]
    back_ns: float
    layers: tuple[int, ...] | None
    rest_share: tuple[float, ...]
    """Of each stage's pass, what is not of its layers."""
    shared: bool
    """Ranks share a device, and the way of their launches to it."""
    memo: dict[tuple[int, bool, int, int, int], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How quick hosts are against the recording, and what a launch takes that others hold up."""

    hosts: float = 1.0
    launch_ns: float = 0.0
    """Of one rank among others that launch at once, on a shared device."""
    stretch: float = 1.0
    """How many times as long passes are as all this says."""


def measure_costs(
    batches: Batches,
    queue: Queue,
    traces: Sequence[RankTrace],
    layers: tuple[int, ...] | None,
) -> Costs | None:
    """Fit what a batch takes; None where no batch of known size decodes."""
    by_rank = {trace.rank: trace for trace in traces}
    mine = [by_rank[rank.rank] for rank in batches.ranks if rank.rank in by_rank]
    with_prompts = (batches.phase == Phase.MIXED) | (batches.phase == Phase.PREFILL)
    decode = _phase_costs(batches, mine, batches.phase == Phase.DECODE)
    if decode is None:
        return None
    prompts = _phase_costs(batches, mine, with_prompts)
    rows = np.flatnonzero(np.isin(batches.start[:, 0], queue.entered))
    tokens, wire = batches.tokens[rows], queue.wire[:, 1:]
    small = float(np.median(wire[tokens <= np.median(tokens)])) if wire.size else 0.0
    a_token = 0.0
    if prompts is not None and prompts[0].tokens > decode[0].tokens:
        large = wire[tokens > (decode[0].tokens + prompts[0].tokens) / 2]
        small = float(np.median(wire[tokens <= 2 * decode[0].tokens]))
        if large.size:
            grown = float(np.median(large)) - small
            a_token = max(grown, 0.0) / (prompts[0].tokens - decode[0].tokens)
    turn = tuple(float(np.median(queue.turn[:, stage])) for stage in range(batches.stages))
    back = queue.back[queue.back > 0]
    known = {one.stage: one for rank in batches.ranks for one in rank.layers}
    rest = tuple(
        known[stage].rest_ns
        / max(known[stage].rest_ns + known[stage].layers * known[stage].layer_ns, 1)
        if stage in known
        else 0.0
        for stage in range(batches.stages)
    )
    return Costs(
        stages=batches.stages,
        decode=decode,
        prompts=prompts,
        wire_ns=(small - a_token * decode[0].tokens, a_token),
        turn_ns=turn,
        back_ns=float(np.percentile(back, 25)) if len(back) else 0.0,
        layers=layers,
        rest_share=rest,
        shared=surely_share(batches.ranks),
    )


def _phase_costs(
    batches: Batches, traces: Sequence[RankTrace], mine: Flags
) -> tuple[PhaseCosts, ...] | None:
    """Return what the batch in the middle takes on each stage, as a program where kernels tell."""
    rows = np.flatnonzero(mine & batches.inside & (batches.tokens > 0))
    if not len(rows):
        return None
    length, found = batches.length(), []
    for stage, rank in enumerate(batches.ranks):
        order = rows[np.argsort(length[rows, stage], kind="stable")]
        middle = int(order[len(order) // 2])
        program, attention = None, 0.0
        if len(traces) == batches.stages and len(traces[stage].kernels):
            begin, end = int(batches.issued[middle, stage]), int(batches.end[middle, stage])
            program, attention = _read_program(traces[stage], rank, begin, end)
        found.append(
            PhaseCosts(
                tokens=float(np.median(batches.tokens[rows])),
                length_ns=float(np.median(length[rows, stage])),
                device_ns=float(np.median(batches.busy[rows, stage])),
                attention_ns=attention,
                program=program,
            )
        )
    return tuple(found)


def _read_program(
    trace: RankTrace, rank: RankTimeline, begin: int, end: int
) -> tuple[Program, float]:
    """Read the launches, waits and kernels of a pass; and what of it is attention's."""
    work, calls = find_work(trace), find_synchronisations(trace)
    rows = pass_rows(work, rank.clock_offset_ns, begin, end)
    issued = work.issued_ns[rows]
    kernels = work.end_ns[rows] - work.start_ns[rows]
    last = int(issued.max())
    kept = np.flatnonzero((calls.start_ns >= issued.min()) & (calls.start_ns <= last))
    moments = np.concatenate((issued, calls.start_ns[kept]))
    stays = np.concatenate(
        (np.zeros(len(rows), np.int64), calls.end_ns[kept] - calls.start_ns[kept])
    )
    device = np.concatenate((kernels, np.zeros(len(kept), dtype=np.int64)))
    waits = np.repeat([False, True], [len(rows), len(kept)])
    order = np.argsort(moments, kind="stable")
    moments, stays = moments[order], stays[order]
    before = np.concatenate((moments[:1], moments[:-1] + stays[:-1]))
    program = Program(
        host_ns=np.maximum(moments - before, 0), device_ns=device[order], waits=waits[order]
    )
    names = [trace.names[number] for number in work.name[rows].tolist()]
    attends = np.zeros(len(names), dtype=bool)
    for row, name in enumerate(names):
        if _SOFTMAX.search(name) and not _MATRIX.search(name):
            # Written out, attention is all from one product of matrices to the other.
            first = next((at for at in range(row, -1, -1) if _MATRIX.search(names[at])), row)
            stop = next((at for at in range(row, len(names)) if _MATRIX.search(names[at])), row)
            attends[first : stop + 1] = True
        elif _ATTENTION.search(name):
            attends[row] = True
    return program, float(kernels[attends].sum())


def pass_ns(  # noqa: PLR0913 (what a pass is made of)
    costs: Costs,
    pace: Pace,
    stage: int,
    *,
    prompt_tokens: int,
    rows: int,
    grown: float = 1.0,
    layers: int | None = None,
    beside: float = 1.0,
) -> float:
    """Return what a pass takes: with tokens of prompts, rows of decode, at a context so many times
    as long as the recorded, with so many layers, beside so many ranks that launch at once.
    """  # noqa: D205 (one sentence)
    decode = costs.decode[stage]
    known = costs.prompts[stage] if costs.prompts and prompt_tokens else decode
    device = _device(costs, stage, prompt_tokens, rows, grown)
    share = 1.0
    if layers is not None and costs.layers is not None:
        rest = costs.rest_share[stage]
        share = rest + (1 - rest) * layers / max(costs.layers[stage], 1)
    floor = pace.launch_ns * beside
    key = (
        stage,
        bool(prompt_tokens),
        round(device / 10_000),
        round(floor),
        round(1e6 / pace.hosts),
    )
    if key not in costs.memo:
        scale = device / max(known.device_ns, 1.0)
        if known.program is None:
            costs.memo[key] = known.length_ns * scale / pace.hosts
        else:
            # Kernels overlap a little, and programs have none: as recorded, it takes what it took.
            as_it_was = known.program.run(1.0, 1.0)
            taken = known.program.run(pace.hosts, scale, floor)
            costs.memo[key] = taken * known.length_ns / max(as_it_was, 1.0)
    return costs.memo[key] * share * pace.stretch


def _device(costs: Costs, stage: int, prompt_tokens: int, rows: int, grown: float) -> float:
    """Return the device's part: linear between the two sizes that were recorded."""
    decode = costs.decode[stage]
    rest = decode.device_ns - decode.attention_ns
    attention = decode.attention_ns * grown * rows / max(decode.tokens, 1.0)
    if costs.prompts is None:
        return rest + attention
    prompts = costs.prompts[stage]
    slope = (prompts.device_ns - prompts.attention_ns - rest) / max(
        prompts.tokens - decode.tokens, 1.0
    )
    rest += max(slope, 0.0) * (prompt_tokens + rows - decode.tokens)
    chunk = max(prompts.tokens - decode.tokens, 1.0)
    own = max(prompts.attention_ns - decode.attention_ns, 0.0)
    return max(rest, 0.0) + attention + own * grown * prompt_tokens / chunk


def wire_ns(costs: Costs, tokens: int) -> float:
    """Return what a message of so many tokens takes."""
    least, a_token = costs.wire_ns
    return max(least + a_token * tokens, 0.0)


def usual_pace(costs: Costs) -> Pace:
    """Return how quick hosts are taken to be without the profiler, where nothing else tells."""
    return Pace(hosts=_USUAL_SLOWDOWN, launch_ns=_SHARED_LAUNCH_NS if costs.shared else 0.0)
