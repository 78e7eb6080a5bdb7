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
from statistics import median

import numpy as np

from debubble.serving.batches import UNSEEN, Batches, slope_of
from debubble.serving.queue import Queue
from debubble.timeline.figures import FEWEST_BATCHES
from debubble.timeline.model import I64, Flags, RankTimeline, Synchronisations
from debubble.timeline.turns import Phase
from debubble.timeline.work import Work, find_synchronisations, find_work
from debubble.trace.columns import RankTrace

_OF_CONTEXT = 2 / 3
# What is launched so long before the kernel ahead of it ends surely waits for it alone.
_QUEUED_NS = 15_000
_ATTENTION = re.compile(r"sdpa|flash|fmha|attention|mha|softmax", re.IGNORECASE)
_SOFTMAX = re.compile(r"softmax", re.IGNORECASE)
_MATRIX = re.compile(r"gemm|nvjet|cutlass|xmma|bmm", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reflexes:
    """How quickly a device and its host go on, as a trace shows it: no profiler changes that."""

    gap_ns: float = 0.0
    """From one kernel to the next that was launched long before."""
    latency_ns: float = 5_000.0
    """From a launch to the kernel's start, on a device that has nothing to do."""
    wake_ns: float = 0.0
    """From the end of a kernel to that of the call that waited for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassProgram:
    """One pass, in the order of its host: launches, and calls that wait for the device."""

    host_ns: I64
    """Before each."""
    device_ns: I64
    """Of the kernel that is launched; 0 of a call that waits."""
    waits: Flags
    reflexes: Reflexes

    def run(self, hosts: float, device: float) -> tuple[float, float]:
        """Return what the pass takes with hosts so many times as quick, kernels so many as long;
        and how long before its end its host is done with it.

        A chain of two machines, asked for thousands of times: quicker than events, and equal.
        """  # noqa: D205 (one sentence)
        host = at = 0.0
        gap, latency = self.reflexes.gap_ns, self.reflexes.latency_ns
        steps = (self.host_ns / hosts).tolist()
        kernels = (self.device_ns * device).tolist()
        for step, kernel, waits in zip(steps, kernels, self.waits.tolist(), strict=True):
            host += step
            if waits:
                host = max(host, at + self.reflexes.wake_ns)
            else:
                at = max(at + gap, host + latency) + kernel
        return at, max(at - host, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCosts:
    """What batches of one phase take on one stage."""

    tokens: float
    length_ns: float
    device_ns: float
    attention_ns: float
    """Of the device's, what grows with the context."""
    token_ns: float
    """Of the device's, for each token more in the batch, as batches of several sizes show it."""
    program: PassProgram | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the passes, messages and turns of a stream take under the profiler."""

    stages: int
    decode: tuple[PhaseCosts, ...]
    prompts: tuple[PhaseCosts, ...] | None
    """Of batches with prompts in them; None where none was captured."""
    wire_ns: tuple[tuple[float, float], ...]
    """Of a message into each stage: what it takes at least, and of each token more."""
    turn_ns: tuple[tuple[float, float], ...]
    """Of each stage's host, from the end of a pass to its next: after decode, after a prompt."""
    back_ns: float
    on_device: int | None
    """Batches that the devices take at once where a broadcast of sampled tokens holds the next one
    up; None where nothing does."""
    held_ns: float
    """From the end of that batch to the start of the message that stood behind its tokens."""
    layers: tuple[int, ...] | None
    rest_share: tuple[float, ...]
    """Of each stage's pass, what is not of its layers."""
    spread: tuple[tuple[float, ...], tuple[float, ...]]
    """Passes over what they mostly take, of decode and of batches with prompts: one after another
    they keep stages waiting that would not wait for what they mostly take."""
    memo: dict[tuple[int, bool, int, int], tuple[float, float]] = field(default_factory=dict)

    @property
    def chunk(self) -> int:
        """The tokens of prompts in a batch that was captured, without those that decode."""
        if self.prompts is None:
            return 1
        return max(1, round((self.prompts[0].tokens - self.decode[0].tokens + 1) / 16) * 16)


def measure_costs(
    batches: Batches,
    queue: Queue,
    traces: Sequence[RankTrace],
    layers: tuple[int, ...] | None,
) -> Costs | None:
    """Fit what a batch takes; None where no batch of known size decodes."""
    by_rank = {trace.rank: trace for trace in traces}
    mine = [by_rank[rank.rank] for rank in batches.ranks if rank.rank in by_rank]
    with_prompts = batches.with_prompts
    decode = _phase_costs(batches, mine, batches.phase == Phase.DECODE)
    if decode is None:
        return None
    prompts = _phase_costs(batches, mine, with_prompts)
    rows = np.flatnonzero(np.isin(batches.start[:, 0], queue.entered))
    sizes = (decode[0].tokens, prompts[0].tokens if prompts else 0.0)
    wires = [
        _wire(queue.wire[:, stage], batches.tokens[rows], sizes)
        for stage in range(1, batches.stages)
    ]
    back = queue.back[queue.back > 0]
    back_ns = float(np.percentile(back, 25)) if len(back) else 0.0
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
        wire_ns=((0.0, 0.0), *wires),
        turn_ns=_turns(batches, with_prompts, back_ns),
        back_ns=back_ns,
        on_device=batches.at_entry if batches.held_back else None,
        held_ns=float(np.median(queue.lag[:, 0])) if queue.held else 0.0,
        layers=layers,
        rest_share=rest,
        spread=(_spread(batches, batches.phase == Phase.DECODE), _spread(batches, with_prompts)),
    )


def _wire(wire: I64, tokens: I64, sizes: tuple[float, float]) -> tuple[float, float]:
    """Return what a message takes on a hop at least, and of each token more, by both phases'."""
    decoded, prompts = sizes
    small = wire[tokens <= max(2 * decoded, float(np.min(tokens)))]
    large = wire[tokens > (decoded + prompts) / 2]
    least, a_token = float(np.median(small)), 0.0
    if not prompts:
        # Decode alone, in several sizes: one after another, slow ones count with the others.
        a_token = slope_of(tokens, wire)
        least = float(wire.mean()) - a_token * (float(tokens.mean()) - decoded)
    elif prompts > decoded and large.size:
        a_token = max(float(np.median(large)) - least, 0.0) / (prompts - decoded)
    return least - a_token * decoded, a_token


def _turns(
    batches: Batches, with_prompts: Flags, back_ns: float
) -> tuple[tuple[float, float], ...]:
    """Return what hosts take from the end of a pass until they ask for the next, by its phase.

    Only a host that found its message waiting shows it. All of them run one loop: so one that
    never did takes as long as the others. The first stage's also plans, as it does on the way back.
    """
    before, now = np.arange(len(batches) - 1), np.arange(1, len(batches))
    both = batches.seen[before] & batches.seen[now]
    before, now = before[both], now[both]
    shown: list[tuple[int, bool, int]] = []
    for stage in range(batches.stages):
        free = batches.end[before, stage]
        if stage:
            asked = np.maximum(batches.posted[now, stage], free)
            told = (asked >= batches.sent[now, stage - 1]) & (batches.posted[now, stage] != UNSEEN)
        else:
            asked = batches.start[now, 0]
            slots = (batches.at_entry if batches.held_back else batches.in_flight) or 1
            left = batches.end[np.maximum(now - slots, 0), -1]
            told = (now >= slots) & (left < free) & (left != UNSEEN)
        shown += [
            (stage, prompts, taken)
            for taken, prompts in zip(
                (asked - free)[told].tolist(), with_prompts[before][told].tolist(), strict=True
            )
        ]

    # Hosts that hand shapes over ask for a message when the host before has done so: only those
    # that are late in most batches take so long themselves.
    enough = max(FEWEST_BATCHES, len(now) // 2) if batches.turn_known else FEWEST_BATCHES

    def middle(stages: Sequence[int], prompts: bool) -> float | None:
        mine = [one for at, phase, one in shown if at in stages and phase == prompts]
        return float(np.median(mine)) if len(mine) >= enough else None

    def of(stage: int, prompts: bool) -> float:
        for stages in ((stage,), range(1, batches.stages)):
            found = middle(stages, prompts)
            if found is not None:
                return found
            if not stage and not prompts:
                return back_ns
        return of(stage, False) if prompts else 0.0

    return tuple((of(stage, False), of(stage, True)) for stage in range(batches.stages))


def _spread(batches: Batches, mine: Flags) -> tuple[float, ...]:
    """Return passes of a phase over what their stage mostly takes for their size, in no order."""
    kept = mine & batches.inside & (batches.tokens > 0)
    ratios = batches.length()[kept] / np.maximum(batches.usual_ns()[kept], 1.0)
    return tuple(np.random.default_rng(0).permutation(ratios.ravel()).tolist()) or (1.0,)


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
                token_ns=slope_of(batches.tokens[rows], batches.busy[rows, stage]),
                program=program,
            )
        )
    return tuple(found)


def _read_program(
    trace: RankTrace, rank: RankTimeline, begin: int, end: int
) -> tuple[PassProgram, float]:
    """Read the launches, waits and kernels of a pass; and what of it is attention's."""
    work, calls = find_work(trace), find_synchronisations(trace)
    begin, end = begin - rank.clock_offset_ns, end - rank.clock_offset_ns
    launched = (work.issued_ns >= begin) & (work.issued_ns <= end)
    rows = np.flatnonzero(launched & (work.end_ns <= end))
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
    program = PassProgram(
        host_ns=np.maximum(moments - before, 0),
        device_ns=device[order],
        waits=waits[order],
        reflexes=_read_reflexes(work, calls),
    )
    names = [trace.names[number] for number in work.name[rows].tolist()]
    attends = np.zeros(len(names))
    products = np.flatnonzero([bool(_MATRIX.search(name)) for name in names])
    for row, name in enumerate(names):
        if _SOFTMAX.search(name) and not _MATRIX.search(name):
            # Written out, attention is all from one product of matrices to the other. What is
            # between the projection and them makes queries, keys and values ready: two of three
            # are of the context.
            number = int(np.searchsorted(products, row))
            bounds = [0, *products.tolist(), len(names) - 1]
            projection, first, stop = bounds[max(number - 1, 0)], bounds[number], bounds[number + 1]
            attends[projection + 1 : first] = _OF_CONTEXT
            attends[first : stop + 1] = 1.0
        elif _ATTENTION.search(name):
            attends[row] = 1.0
    return program, float((kernels * attends).sum())


def _read_reflexes(work: Work, calls: Synchronisations) -> Reflexes:
    """Measure them over a whole trace; what it does not show is as usual."""
    usual, ends = Reflexes(), np.maximum.accumulate(work.end_ns)
    free, start, issued = ends[:-1], work.start_ns[1:], work.issued_ns[1:]
    gaps = (start - free)[(issued < free - _QUEUED_NS) & (start >= free)]
    delays = (start - issued)[issued > free]
    last = np.searchsorted(ends, calls.end_ns, side="right") - 1
    kept = (last >= 0) & (ends[last] > calls.start_ns)
    wakes = (calls.end_ns - ends[last])[kept]

    def middle(found: I64, otherwise: float) -> float:
        return float(np.median(found)) if len(found) >= FEWEST_BATCHES else otherwise

    return Reflexes(
        gap_ns=middle(gaps, usual.gap_ns),
        latency_ns=middle(delays, usual.latency_ns),
        wake_ns=middle(wakes, usual.wake_ns),
    )


def pass_ns(  # noqa: PLR0913 (what a pass is made of)
    costs: Costs,
    hosts: float,
    stage: int,
    *,
    prompt_tokens: int,
    rows: int,
    grown: tuple[float, float] = (1.0, 1.0),
    layers: int | None = None,
) -> tuple[float, float]:
    """Return what a pass takes, with hosts so many times as quick as recorded, tokens of prompts,
    rows of decode, at contexts of both so many times as long as the recorded, with so many layers;
    and the turn that its host takes after it.

    A host that is done before its device has taken part of its turn by then, as after long prompts.
    """  # noqa: D205 (one sentence)
    decode = costs.decode[stage]
    known = costs.prompts[stage] if costs.prompts and prompt_tokens else decode
    device = _device(costs, stage, prompt_tokens, rows, grown)
    share = 1.0
    if layers is not None and costs.layers is not None:
        rest = costs.rest_share[stage]
        share = rest + (1 - rest) * layers / max(costs.layers[stage], 1)
    key = (stage, bool(prompt_tokens), round(device / 10_000), round(1e6 / hosts))
    if key not in costs.memo:
        scale = device / max(known.device_ns, 1.0)
        if known.program is None:
            turn = costs.turn_ns[stage][bool(prompt_tokens)] / hosts
            costs.memo[key] = (known.length_ns * scale / hosts, turn)
        else:
            # Kernels overlap a little, and programs have none: as recorded, it takes what it took.
            as_it_was, _ = known.program.run(1.0, 1.0)
            taken, lead = known.program.run(hosts, scale)
            turn = costs.turn_ns[stage][0] / hosts
            if prompt_tokens and decode.program is not None:
                turn -= lead - decode.program.run(hosts, 1.0)[1]
            costs.memo[key] = (taken * known.length_ns / max(as_it_was, 1.0), max(turn, 0.0))
    length, turn = costs.memo[key]
    return length * share, turn


def _device(
    costs: Costs, stage: int, prompt_tokens: int, rows: int, grown: tuple[float, float]
) -> float:
    """Return the device's part: linear between the two sizes that were recorded."""
    of_prompt, of_rows = grown
    decode = costs.decode[stage]
    rest = decode.device_ns - decode.attention_ns
    more = rows - decode.tokens
    # Where decode ran in several sizes they tell what a request more takes, its attention too.
    each = 1.0 if decode.token_ns else rows / max(decode.tokens, 1.0)
    attention = decode.attention_ns * of_rows * each
    if costs.prompts is None:
        return rest + attention + decode.token_ns * more
    prompts = costs.prompts[stage]
    chunk = max(prompts.tokens - decode.tokens, 1.0)
    own = max(prompts.attention_ns - decode.attention_ns, 0.0)
    slope = (prompts.device_ns - prompts.attention_ns - rest) / chunk
    if prompts.token_ns:
        slope = prompts.token_ns - own / chunk
    slope = max(slope, 0.0)
    rest += slope * prompt_tokens + (decode.token_ns or slope) * more
    return max(rest, 0.0) + attention + own * of_prompt * prompt_tokens / chunk


def wire_ns(costs: Costs, stage: int, tokens: int, repaired: Sequence[int] = ()) -> float:
    """Return what a message of so many tokens into a stage takes; of a repaired hop as others'."""
    hops = [stage]
    if stage in repaired:
        hops = [other for other in range(1, costs.stages) if other not in repaired] or hops
    taken = [costs.wire_ns[hop][0] + costs.wire_ns[hop][1] * tokens for hop in hops]
    return max(median(taken), 0.0)
