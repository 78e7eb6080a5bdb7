"""A stream's account in → a model of the server, which lands on what was measured or is refused.

What was measured without the profiler, by the server's own metrics, counts first; else what the
captured batches show. That is decided here, once, for all that is said of a server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from debubble.errors import NoFit
from debubble.serving.account import StreamAccount
from debubble.serving.batches import Batches
from debubble.serving.costs import Costs, measure_costs, pass_ns, wire_ns
from debubble.serving.queue import Queue
from debubble.serving.traffic import ServerRates, Setting, Traffic, calibrate, serve
from debubble.timeline.figures import FEWEST_BATCHES
from debubble.timeline.turns import Phase
from debubble.trace.columns import RankTrace
from debubble.trace.server_notes import Span
from debubble.units import counted, show_percent

# A model that misses the run as it is by more may not price anything.
MOST_OFF = 0.05
# The pace that its parts come to in the queue may be off by more, and intervals hold it: on 14
# captures of 15 to 49 batches it was 3 % in the middle and 11 % at worst.
MOST_PLAYED_OFF = 0.15
# How many times as quick hosts may be without the profiler, where no metrics tell: on our engine
# they were 2.0 and 2.5 times.
WITHOUT_PROFILER = 3.0
# Tokens of an answer where nothing tells; without prompts it changes nothing.
_ANSWER = 64
_NEARLY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherCase:
    """Something that the recording leaves open: options are weighed as it may be, too."""

    hosts: float
    """How many times as quick hosts are as in the recording."""
    more_in_turn: int
    """Batches that take turns beyond those of the recording."""
    now: ServerRates
    """What the server does as it is set, where options are held against that."""


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
    """As it was measured; options are what the model makes of that."""
    off: float
    """How far the model is from what was measured."""
    profiled: bool
    """Figures are those of the captured batches: nothing tells what the profiler costs."""
    others: tuple[OtherCase, ...] = ()

    def serve(self, traffic: Traffic, setting: Setting, hosts: float | None = None) -> ServerRates:
        """Run it with other traffic or another setting; off as the model is as it is."""
        prompt = self.traffic.prompt
        return serve(self.costs, traffic, setting, hosts or self.hosts, prompt).over(1 + self.off)


def model_server(
    account: StreamAccount,
    traces: Sequence[RankTrace],
    *,
    layers: tuple[int, ...] | None = None,
    traffic: Traffic | None = None,
    around: Span | None = None,
) -> ServerModel:
    """Fit a server: what batches take, what is asked of it, and how quick its hosts really are.

    `around` is what it did around the capture, unprofiled, by its own metrics.
    """
    batches, queue = account.batches, _queue_of(account)
    if batches.drafted:
        raise NoFit(
            "batches check drafts of several tokens: the traces do not show how many are accepted",
            hint="`find` says what the batches wait for; a draft is part of its stage there",
        )
    if batches.with_prompts.all():
        raise NoFit(
            "every captured batch holds prompts: no predictions for servers of prompts only",
            hint="`find` says what its stages wait for; if it also decodes, capture longer",
        )
    costs = measure_costs(batches, queue, traces, layers)
    if costs is None:
        raise NoFit(
            "no decode batch was captured: the time per token is unknown",
            hint="capture longer, with record_shapes=True",
        )
    if costs.prompts is None:
        # What the server did before and after was of prompts too: of answers alone, batches tell.
        around = None
    setting = Setting(in_flight=batches.groups or queue.in_flight or 1, chunk=costs.chunk)
    if batches.turn_known and costs.prompts is not None:
        prompts = batches.tokens - np.maximum(batches.rows, 0)
        setting = replace(setting, chunk=int(prompts.max()), together=True)
    if traffic is None:
        traffic = _traffic(batches, costs, setting, around)
        waiting = round(around.requests_waiting or 0) if around else 0
        if waiting:  # those that run are as many as batches take
            most = -(-traffic.clients // setting.in_flight)
            setting = replace(setting, requests_a_batch=most)
            traffic = replace(traffic, clients=traffic.clients + waiting)
    if costs.prompts is None and traffic.prompt > 0:
        raise NoFit(
            "no batch with a prompt was captured: the time of prompts is unknown",
            hint="capture longer: some prompts must fall into it",
        )
    traffic = replace(traffic, in_step=batches.in_step)
    landing = _land(account, queue, costs, traffic, setting, around)
    model = ServerModel(
        slow=account.slow,
        costs=costs,
        traffic=traffic,
        setting=setting,
        hosts=landing.hosts,
        engine=batches.ranks[0].parallelism.framework if batches.turn_known else None,
        as_is=landing.modelled.over(1 + landing.off),
        off=landing.off,
        profiled=landing.profiled,
    )
    return replace(model, others=tuple(_other_cases(model)))


class _Landing(NamedTuple):
    """How a model lands on what was measured."""

    hosts: float
    modelled: ServerRates
    off: float
    profiled: bool


def _land(  # noqa: PLR0913, PLR0917 (what was captured, fitted, asked and measured)
    account: StreamAccount,
    queue: Queue,
    costs: Costs,
    traffic: Traffic,
    setting: Setting,
    around: Span | None,
) -> _Landing:
    """Hold a model against what the server did unprofiled, else against the captured batches."""
    free = around.tokens_out_per_s if around else None
    if free:
        hosts = calibrate(costs, traffic, setting, free)
        modelled = serve(costs, traffic, setting, hosts, traffic.prompt)
        off = modelled.tokens_out_per_s / free - 1
        if abs(off) <= MOST_PLAYED_OFF:
            return _Landing(hosts, modelled, off, profiled=False)
        if not account.batches.turn_known:
            raise NoFit(
                "no host speed reproduces the unprofiled throughput of the server",
                hint="state the traffic that it had then: --load 'clients=32 prompt=512 output=48'",
            )
        # Labels show what holds batches up, and it is not hosts: figures stay profiled.
    modelled = serve(costs, traffic, setting, 1.0, traffic.prompt)
    missed, off = _played_off(account, queue, costs)
    captured = None if traffic.prompt else account.tokens_out_per_s
    if captured:
        off = modelled.tokens_out_per_s / captured - 1
    if abs(missed) > MOST_OFF or abs(off) > MOST_PLAYED_OFF:
        rounds = len(queue) // setting.in_flight
        if rounds < FEWEST_BATCHES:
            raise NoFit(
                f"{counted(len(queue), 'batch', 'batches')} were seen from end to end, "
                f"{counted(rounds, 'round')} of the {setting.in_flight} in flight: too few to hold "
                "a model against",
                hint="capture longer",
            )
        worst = missed if abs(missed) > MOST_OFF else off
        raise NoFit(
            f"model error {show_percent(abs(worst))} on the captured batches: no predictions",
            hint="capture steady traffic; `find` says what the batches wait for",
        )
    return _Landing(1.0, modelled, off, profiled=True)


def _other_cases(model: ServerModel) -> Iterator[OtherCase]:
    """Yield what may be otherwise: quicker hosts, clients that come round in other batches."""
    if model.profiled:
        quick = model.serve(model.traffic, model.setting, WITHOUT_PROFILER)
        yield OtherCase(hosts=WITHOUT_PROFILER, more_in_turn=0, now=quick)
    # After a restart clients in step may come round in other batches.
    in_step = model.traffic.in_step and not model.traffic.prompt
    for more in (-1, 1) if in_step else ():
        slots = model.setting.in_flight + more
        if 1 <= slots <= max(model.costs.stages, model.setting.in_flight):
            yield OtherCase(hosts=model.hosts, more_in_turn=more, now=model.as_is)


def _queue_of(account: StreamAccount) -> Queue:
    """Return the closed queue that a server is, where the captured batches show it."""
    batches, queue = account.batches, account.queue
    if queue is None or len(queue) <= (queue.in_flight or 0):
        raise NoFit(
            f"{len(queue or ())} batches were captured from first to last stage: too few",
            hint="capture longer, all ranks at once",
        )
    if queue.in_flight is None or not batches.stream.sure:
        raise NoFit(
            "the number of batches in flight is unknown",
            hint="capture some hundred milliseconds of steady traffic with prompts in it, all "
            "ranks at once",
        )
    return queue


def _traffic(batches: Batches, costs: Costs, setting: Setting, around: Span | None) -> Traffic:
    """Tell what was asked of the server: by its metrics, else by the mix of captured batches."""
    if costs.prompts is None:
        return Traffic(clients=batches.requests, prompts=((0, 1.0),), output=_ANSWER)
    running = around.requests_running if around else None
    clients = max(1, round(running or costs.decode[0].tokens * setting.in_flight))
    if around and around.first_tokens and around.tokens_in_per_s and around.tokens_out_per_s:
        each = around.seconds / around.first_tokens
        answer = around.tokens_out_per_s * each
        prompt = _computed(batches, around.tokens_in_per_s * each, answer)
        # Requests are cut at both ends of a count: what is nearly whole chunks is whole ones.
        chunks = prompt / setting.chunk
        if chunks > _NEARLY and abs(chunks - round(chunks)) < 1 - _NEARLY:
            prompt = round(chunks) * setting.chunk
        return Traffic(
            clients=clients, prompts=((max(1, round(prompt)), 1.0),), output=max(2, round(answer))
        )
    # Each request has one batch with its prompt among those that answer it.
    output = max(2, round(clients / setting.in_flight / float(batches.with_prompts.mean())))
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
    lag = np.zeros_like(queue.lag)
    lag[:, 0] = round(costs.held_ns)
    played = replace(
        queue,
        length=np.rint(length[rows] * np.where(with_prompts, drawn[1], drawn[0])).astype(np.int64),
        turn=np.rint(turn[np.maximum(rows - 1, 0)]).astype(np.int64),
        wire=np.rint(wire[rows]).astype(np.int64),
        begin=np.zeros_like(queue.begin),
        lag=lag,
        back=np.full(len(queue), round(costs.back_ns)),
    )
    return float(missed), played.turn_ns() / (account.turn_ns or 1.0) - 1
