"""A stream's account in → what a server would do with another setting, each with its interval.

Everything is held against the server as it is: it must land on what was measured, or nothing is
predicted. What was measured without the profiler, by the server's own metrics, counts first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from debubble.errors import NoFit
from debubble.serving.account import StreamAccount
from debubble.serving.batches import Batches
from debubble.serving.costs import Costs, measure_costs, pass_ns, wire_ns
from debubble.serving.queue import Queue
from debubble.serving.traffic import ServerRates, Setting, Traffic, calibrate, serve
from debubble.timeline.model import I64
from debubble.timeline.turns import Phase
from debubble.trace.columns import RankTrace
from debubble.units import show_percent

# A model that misses the run as it is by more may not price anything.
MOST_OFF = 0.05
# The pace that its parts come to in the queue may be off by more, and intervals hold it: on 14
# captures of 15 to 49 batches it was 3 % in the middle and 11 % at worst.
MOST_PLAYED_OFF = 0.15
# How far predictions may be off, by what is changed: four of five recorded pairs are inside.
_OFF = {
    "in_flight": 0.05,
    "split": 0.12,
    "clients": 0.05,
    "requests": 0.05,
    "prompts": 0.08,
    "chunk": 0.30,
    "hop": 0.10,
}
# From one start of a server to another with the same setting: four pairs of our engine were 2, 6, 8
# and 10 % apart in tokens a second, for its hosts took up to a fifth longer for the same decode.
_NOISE = 0.08
# How many times as quick hosts may be without the profiler, where no metrics tell: on our engine
# they were 2.0 and 2.5 times.
WITHOUT_PROFILER = 3.0
# Tokens of an answer where nothing tells; without prompts it changes nothing.
_ANSWER = 64
# What gains less is not worth a restart.
_WORTH = 0.02
_NEARLY = 0.9
# Other numbers in flight and chunks that are tried, against those that ran.
_TIMES = (0.25, 0.5, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerModel:
    """A server that was captured, as it is replayed."""

    slow: tuple[int, ...]
    """Stages whose incoming hop carries less than its peers."""

    costs: Costs
    traffic: Traffic
    setting: Setting
    hosts: float
    """How many times as quick hosts are as in the recording: the profiler makes them slow."""
    engine: str | None
    """Whose labels the batches have."""
    as_is: ServerRates
    off: float
    """How far the model is from what was measured."""
    quick: ServerRates | None
    """As it is with hosts as quick as they may be without the profiler, where no metrics of the
    server tell what that costs: all other figures are under it."""

    @property
    def profiled(self) -> bool:
        """Whether figures are under the profiler."""
        return self.quick is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOption:
    """One change, and what it would do."""

    kinds: tuple[str, ...]
    setting: Setting
    traffic: Traffic
    served: ServerRates
    off: float
    """How far it may be from what comes: four of five are nearer."""
    gain: float
    """Of tokens out a second, over the server as it is."""
    quick: ServerRates | None
    quick_gain: float
    """The same with hosts as quick as they may be without the profiler, where that is not known."""
    of_prompts: bool
    """Prompts were captured: without them nothing is sure of traffic that has some."""
    refused: str = ""
    """Why it cannot be."""

    @property
    def low(self) -> float:
        """Of tokens out a second, over the server as it is; so `high`."""
        return (1 + min(self.gain, self.quick_gain)) / (1 + self.off)

    @property
    def high(self) -> float:
        """The other end."""
        return (1 + max(self.gain, self.quick_gain)) * (1 + self.off)

    @property
    def tpot_s(self) -> tuple[float, float]:
        """Between what a token's time would be."""
        quick = self.quick or self.served
        low, high = sorted((self.served.tpot_s, quick.tpot_s))
        return low / (1 + self.off), high * (1 + self.off)

    @property
    def verdict(self) -> str:
        """Yes where even the low end gains."""
        if self.refused:
            return "refused"
        if self.low > 1 + _WORTH and self.of_prompts:
            return "yes"
        return "no" if self.high < 1 + _WORTH else "maybe"


def model_server(  # noqa: C901, PLR0913 (what the traces may not tell, one argument each)
    account: StreamAccount,
    traces: Sequence[RankTrace],
    *,
    layers: tuple[int, ...] | None = None,
    traffic: Traffic | None = None,
    tokens_out_per_s: float | None = None,
    requests_running: float | None = None,
    requests_waiting: float | None = None,
    tokens_in_out: tuple[float, float] | None = None,
) -> ServerModel:
    """Fit a server: what batches take, what is asked of it, and how quick its hosts really are."""
    batches, queue = account.batches, _queue_of(account)
    costs = measure_costs(batches, queue, traces, layers)
    if costs is None:
        raise NoFit(
            "no batch that only decodes was captured: what a token takes is not known",
            hint="capture longer, with record_shapes=True",
        )
    setting = Setting(in_flight=batches.groups or queue.in_flight or 1, chunk=costs.chunk)
    if batches.turn_known and costs.prompts is not None:
        prompts = batches.tokens - np.maximum(batches.rows, 0)
        setting = replace(setting, chunk=int(prompts.max()), together=True)
    if traffic is None and costs.prompts is None:
        # What the server did before and after was of prompts too: of answers alone, batches tell.
        traffic = _decoding(batches)
        tokens_out_per_s = None
    elif traffic is None:
        traffic = _traffic(account, costs, setting, requests_running, tokens_in_out)
        if requests_waiting and requests_waiting >= 1:
            # More come than batches take: those that run are as many as they may take.
            most = -(-traffic.clients // setting.in_flight)
            setting = replace(setting, requests_a_batch=most)
            traffic = replace(traffic, clients=traffic.clients + round(requests_waiting))
    if costs.prompts is None and traffic.prompt > 0:
        raise NoFit(
            "no batch with a prompt was captured: what prompts take is not known",
            hint="capture longer: some prompts must fall into it",
        )
    found = tokens_out_per_s and calibrate(costs, traffic, setting, tokens_out_per_s)
    if tokens_out_per_s and found is None:
        if not batches.turn_known:
            raise NoFit(
                "no pace of hosts lands on what the server did without the profiler",
                hint="state the traffic that it had then: --load 'clients=32 prompt=512 output=48'",
            )
        # What holds its batches up is not its hosts' pace: figures stay those under the profiler.
        tokens_out_per_s = None
    hosts = found or 1.0
    as_is = serve(costs, traffic, setting, hosts, traffic.prompt)
    off = missed = 0.0
    if tokens_out_per_s is None:
        missed, off = _played_off(account, queue, costs)
    else:
        off = as_is.tokens_out_per_s / tokens_out_per_s - 1
    if abs(missed) > MOST_OFF or abs(off) > MOST_PLAYED_OFF:
        worst = missed if abs(missed) > MOST_OFF else off
        raise NoFit(
            f"the model misses the captured batches by {show_percent(abs(worst))}",
            hint="capture steady traffic; what the batches wait for, `find` says",
        )
    return ServerModel(
        slow=account.slow,
        costs=costs,
        traffic=traffic,
        setting=setting,
        hosts=hosts,
        engine=batches.ranks[0].parallelism.framework if batches.turn_known else None,
        as_is=as_is,
        off=off,
        quick=None
        if tokens_out_per_s is not None
        else serve(costs, traffic, setting, WITHOUT_PROFILER, traffic.prompt),
    )


def _decoding(batches: Batches) -> Traffic:
    """Return traffic of answers alone."""
    return Traffic(clients=batches.requests, prompts=((0, 1.0),), output=_ANSWER)


def _queue_of(account: StreamAccount) -> Queue:
    """Return the closed queue that a server is, where the captured batches show it."""
    batches, queue = account.batches, account.queue
    if queue is None or len(queue) <= (queue.in_flight or 0):
        raise NoFit(
            f"{len(queue or ())} batches were seen from end to end: too few to show the way back",
            hint="capture longer, all ranks at once",
        )
    if queue.in_flight is None or not batches.in_flight_sure:
        raise NoFit(
            "the captured batches tell no number in flight",
            hint="state what the server keeps with --in-flight-measured, or capture some hundred "
            "milliseconds of steady traffic with prompts in it, all ranks at once",
        )
    return queue


def _traffic(
    account: StreamAccount,
    costs: Costs,
    setting: Setting,
    running: float | None,
    tokens: tuple[float, float] | None,
) -> Traffic:
    """Tell what was asked of the server: by its metrics, else by the mix of captured batches."""
    rows = costs.decode[0].tokens
    clients = max(1, round(running or rows * setting.in_flight))
    phase = account.batches.phase
    mixed = float(((phase == Phase.MIXED) | (phase == Phase.PREFILL)).mean())
    if tokens is not None and tokens[1] > 0:
        into, out = tokens
        into = _computed(account.batches, into, out)
        # Requests are cut at both ends of a count: what is nearly whole chunks is whole ones.
        chunks = into / setting.chunk
        if chunks > _NEARLY and abs(chunks - round(chunks)) < 1 - _NEARLY:
            into = round(chunks) * setting.chunk
        return Traffic(
            clients=clients, prompts=((max(1, round(into)), 1.0),), output=max(2, round(out))
        )
    if not mixed:
        return Traffic(clients=clients, prompts=((0, 1.0),), output=_ANSWER)
    # Each request has one batch with its prompt among those that answer it.
    output = max(2, round(clients / setting.in_flight / mixed))
    return Traffic(clients=clients, prompts=((setting.chunk, 1.0),), output=output)


def _computed(batches: Batches, prompt: float, answer: float) -> float:
    """Return how many tokens of a prompt are computed: a cache of prefixes has the others.

    A prompt that is cut in chunks is in as many batches; one that is not is in one of them whole.
    """
    held = batches.prompts > 0
    if not batches.turn_known or not held.any():
        return prompt
    tokens = batches.tokens[held] - np.maximum(batches.rows[held], 0)
    longest = float((tokens / batches.prompts[held]).max())
    ended = max(float(batches.rows[batches.rows > 0].sum()) / answer, 1.0)
    chunked = float(batches.prompts[held].sum()) / ended > prompt / longest / 2
    return prompt if chunked else min(prompt, longest)


def _played_off(account: StreamAccount, queue: Queue, costs: Costs) -> tuple[float, float]:
    """Return how far passes are from those that were captured, and the pace that they come to.

    The captured batches run once more through the closed queue, in their order, each taking what
    predictions say that its like takes: nothing that was measured of the batch itself is in it.
    """
    batches, stages = account.batches, account.batches.stages
    length, turn, wire = (np.zeros(batches.start.shape) for _ in range(3))
    for row in np.flatnonzero(batches.tokens > 0).tolist():
        decodes, tokens = batches.phase[row] == Phase.DECODE, int(batches.tokens[row])
        decoded = tokens if decodes else min(tokens, round(costs.decode[0].tokens))
        if batches.turn_known and batches.rows[row] >= 0:
            decoded = int(batches.rows[row])
        for stage in range(stages):
            length[row, stage], turn[row, stage] = pass_ns(
                costs, 1.0, stage, prompt_tokens=tokens - decoded, rows=decoded
            )
            wire[row, stage] = wire_ns(costs, stage, tokens) if stage else 0.0
    whole = batches.inside & (batches.tokens > 0)
    missed = length[whole].sum() / max(float(batches.length()[whole].sum()), 1.0) - 1
    rows = np.flatnonzero(np.isin(batches.start[:, 0], queue.entered))
    drawn = [np.resize(spread, queue.length.shape) for spread in costs.spread]
    with_prompts = (batches.phase[rows] != Phase.DECODE)[:, None]
    played = replace(
        queue,
        length=np.rint(length[rows] * np.where(with_prompts, drawn[1], drawn[0])).astype(np.int64),
        turn=np.rint(turn[np.maximum(rows - 1, 0)]).astype(np.int64),
        wire=np.rint(wire[rows]).astype(np.int64),
        begin=np.zeros_like(queue.begin),
        lag=_held_lag(queue, costs),
        back=np.full(len(queue), round(costs.back_ns)),
    )
    return float(missed), played.turn_ns() / (account.turn_ns or 1.0) - 1


def _held_lag(queue: Queue, costs: Costs) -> I64:
    """Return what messages wait for beyond a batch whose tokens held them up."""
    lag = np.zeros_like(queue.lag)
    lag[:, 0] = round(costs.held_ns)
    return lag


def predict(
    model: ServerModel,
    setting: Setting,
    traffic: Traffic | None = None,
    *,
    limit: int | None = None,
) -> ServerOption:
    """Say what another setting, or other traffic, would do."""
    asked = traffic or model.traffic
    served = serve(model.costs, asked, setting, model.hosts, model.traffic.prompt)
    gain = quick_gain = served.tokens_out_per_s / model.as_is.tokens_out_per_s - 1
    quick = None
    if model.quick is not None:
        quick = serve(model.costs, asked, setting, WITHOUT_PROFILER, model.traffic.prompt)
        quick_gain = quick.tokens_out_per_s / model.quick.tokens_out_per_s - 1
    kinds = []
    if setting.in_flight != model.setting.in_flight:
        kinds.append("in_flight")
    if setting.layers is not None and setting.layers != model.costs.layers:
        kinds.append("split")
    if setting.chunk != model.setting.chunk:
        kinds.append("chunk")
    if setting.requests_a_batch != model.setting.requests_a_batch:
        kinds.append("requests")
    if setting.repaired:
        kinds.append("hop")
    if asked.prompts != model.traffic.prompts:
        kinds.append("prompts")
    if (asked.clients, asked.output) != (model.traffic.clients, model.traffic.output):
        kinds.append("clients")
    off = float(np.sqrt(_NOISE**2 + sum(_OFF[kind] ** 2 for kind in kinds)))
    off += abs(model.off)
    refused = ""
    if limit is not None and served.kv_tokens > limit:
        refused = f"needs a cache for {served.kv_tokens} tokens, there is one for {limit}"
    return ServerOption(
        kinds=tuple(kinds),
        setting=setting,
        traffic=asked,
        served=served,
        off=off,
        gain=gain,
        quick=quick,
        quick_gain=quick_gain,
        of_prompts=model.costs.prompts is not None,
        refused=refused,
    )


def plan_server(model: ServerModel, *, limit: int | None = None) -> tuple[ServerOption, ...]:
    """Try other numbers in flight, splits, chunks, requests a batch, and slow hops repaired; the
    best of those that go together, together; the best first.
    """  # noqa: D205 (one sentence)
    now, costs = model.setting, model.costs
    slots = {max(1, round(now.in_flight * times)) for times in _TIMES}
    slots |= {costs.stages, costs.stages + 1, 2 * costs.stages}
    settings = [replace(now, in_flight=count) for count in sorted(slots - {now.in_flight})]
    if model.engine is not None:  # its scheduler sends out as many as there are stages
        settings = []
    if costs.prompts is not None:
        longest = max(length for length, _ in model.traffic.prompts)
        chunks = {max(16, round(now.chunk * times / 16) * 16) for times in _TIMES}
        chunks = {chunk for chunk in chunks if min(chunk, now.chunk) < longest}
        settings += [replace(now, chunk=chunk) for chunk in sorted(chunks - {now.chunk})]
    if costs.layers is not None:
        settings += [replace(now, layers=split) for split in _splits(model)]
    settings += [replace(now, requests_a_batch=count) for count in _requests(model)]
    if model.slow:
        settings.append(replace(now, repaired=model.slow))
    options = [predict(model, setting, limit=limit) for setting in settings]
    best = {
        kind: max(
            (one for one in options if one.kinds == (kind,) and not one.refused),
            key=lambda one: one.gain,
            default=None,
        )
        for kind in ("in_flight", "split", "hop")
    }
    gains = [one for one in best.values() if one is not None and one.gain > 0]
    gains.sort(key=lambda one: -one.gain)
    for number, one in enumerate(gains[1:], start=1):
        # The best alone, and with each other that makes it better still.
        gains[number] = gains[number - 1]
        changed = {
            name: getattr(one.setting, name)
            for name in ("in_flight", "layers", "repaired")
            if getattr(one.setting, name) != getattr(now, name)
        }
        both = predict(model, replace(gains[number - 1].setting, **changed), limit=limit)
        if both.gain > gains[number - 1].gain + _WORTH and not both.refused:
            gains[number] = both
    if gains and gains[-1] not in options:
        options.append(gains[-1])
    return tuple(sorted(options, key=lambda one: (bool(one.refused), -one.gain)))


def _requests(model: ServerModel) -> list[int]:
    """Return other numbers of requests a batch: half, and double where more wait than it takes."""
    each = -(-model.traffic.clients // model.setting.in_flight)
    most = min(model.setting.requests_a_batch or each, each)
    return [count for count in (most // 2, 2 * most) if 0 < count < most or most < count <= each]


def _splits(model: ServerModel) -> list[tuple[int, ...]]:
    """Return the even split, and the one whose longest stage is shortest, where they differ."""
    costs, layers = model.costs, model.costs.layers or ()
    total, stages = sum(layers), costs.stages
    phases = [(0, round(costs.decode[0].tokens))]
    if costs.prompts is not None:
        phases.append((model.setting.chunk, round(costs.decode[0].tokens) - 1))

    def takes(stage: int, count: int) -> float:
        return sum(
            pass_ns(costs, model.hosts, stage, prompt_tokens=n, rows=rows, layers=count)[0]
            for n, rows in phases
        )

    # By stages: the least that the longest takes with so many layers given out.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ()), *([(np.inf, ())] * total)]
    for stage in range(stages):
        grown: list[tuple[float, tuple[int, ...]]] = []
        for given in range(total + 1):
            ways = [
                (
                    max(best[before][0], takes(stage, given - before)),
                    (*best[before][1], given - before),
                )
                for before in range(max(stage, 0), given)
                if len(best[before][1]) == stage
            ]
            grown.append(min(ways, default=(np.inf, ())))
        best = grown
    even = tuple(len(part) for part in np.array_split(np.arange(total), stages))
    found = {even, best[total][1]} - {layers, ()}
    return sorted(found)
