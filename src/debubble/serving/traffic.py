"""Requests and a setting in → what a server would do: tokens a second, time to and between tokens.

Clients are a closed loop: a request that ends is followed by another. Each of the batches in flight
has its own requests; a batch takes all of them on by a token, beside a chunk of a prompt if one of
them is not through with it. So a scheduler's policy writes batches, and the closed queue runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import cycle

import numpy as np

from debubble.serving.costs import Costs, pass_ns, wire_ns
from debubble.serving.queue import Queue, whole
from debubble.simulate.program import NONE
from debubble.timeline.model import F64
from debubble.units import NS_PER_S

# Cycles of requests before it is measured, and measured; batches at most.
_WARM, _MEASURED, _MOST = 1, 2, 4_000
_HALVINGS = 14
_QUICKEST_HOSTS = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is asked of a server."""

    clients: int
    """Requests that are under way at once."""
    prompts: tuple[tuple[int, float], ...]
    """Tokens of a prompt, and the share of such prompts."""
    output: int
    """Tokens of an answer."""
    in_step: bool = True
    """Requests began together, and so come and end together; else at any time."""

    @property
    def prompt(self) -> float:
        """The mean length."""
        return sum(length * share for length, share in self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a server runs its batches."""

    in_flight: int
    chunk: int
    layers: tuple[int, ...] | None = None
    """Of each stage; None as recorded."""
    requests_a_batch: int | None = None
    together: bool = False
    """A batch takes chunks of several prompts, up to `chunk` tokens; else of one."""
    repaired: tuple[int, ...] = ()
    """Stages whose incoming hop is to be as quick as the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRates:
    """What came of it."""

    batches_per_s: float
    tokens_out_per_s: float
    tokens_in_per_s: float
    ttft_s: float
    """From the moment that a request has a place in a batch."""
    tpot_s: float
    kv_tokens: int
    """The most that requests under way hold in the cache of each stage."""

    def over(self, times: float) -> ServerRates:
        """Return the same at a pace that is so many times lower."""
        return replace(
            self,
            batches_per_s=self.batches_per_s / times,
            tokens_out_per_s=self.tokens_out_per_s / times,
            tokens_in_per_s=self.tokens_in_per_s / times,
            ttft_s=self.ttft_s * times,
            tpot_s=self.tpot_s * times,
        )


@dataclass(slots=True)
class Request:
    """A request as it goes through its batches; moments are batches, as they land."""

    prompt: int
    done: int = 0
    out: int = 0
    came: int = NONE
    """The batch that it came upon: when that landed, or before the first of all."""
    first: int = NONE
    """The batch that had its first token."""


@dataclass(slots=True)
class SentOut:
    """The batches that a scheduler sends out one after the other, and what requests had of them."""

    tokens: list[int] = field(default_factory=list)
    """Of prompts, in each batch."""
    rows: list[int] = field(default_factory=list)
    """Requests that it decodes for."""
    grown: list[tuple[float, float]] = field(default_factory=list)
    """How many times the recorded context it looks back on: its prompt, its answers."""
    firsts: list[tuple[int, int]] = field(default_factory=list)
    """From when a request came to its first token."""
    answers: list[tuple[int, int, int]] = field(default_factory=list)
    """From its first token to its last, and how many lie between."""
    rounds: list[tuple[int, int, int, int]] = field(default_factory=list)
    """When the first seat's requests ended; tokens out and in, and batches, by then."""
    out: int = 0
    into: int = 0
    kv_tokens: int = 0


def send_out(  # noqa: C901 (one loop, as an engine's is)
    traffic: Traffic, setting: Setting, *, recorded_prompt: float, recorded_chunk: int
) -> SentOut:
    """Say which requests are in which batch until they have come round some times.

    No time is needed: the batch that lands frees its own slot, and those take turns.
    """
    slots = setting.in_flight
    seats = -(-traffic.clients // slots)
    seats = min(seats, setting.requests_a_batch or seats)
    lengths = cycle(_lengths(traffic, 64))

    def ask(landed: int) -> Request:
        length = next(lengths)
        # Without a prompt it is as after its first token.
        return Request(prompt=length, came=landed, first=landed, out=int(not length))

    groups = [
        [ask(NONE) for seat in range(seats) if seat * slots + slot < traffic.clients]
        for slot in range(slots)
    ]
    if not traffic.in_step:
        begun = np.random.default_rng(0).integers(1, traffic.output, (slots, seats))
        for slot, group in enumerate(groups):
            for seat, request in enumerate(group):
                request.done, request.out = request.prompt, int(begun[slot, seat])
    batches_a_cycle = slots * (traffic.output + seats * -(-traffic.prompt // setting.chunk))
    warm = min(int(_WARM * batches_a_cycle), _MOST // 2)
    count = warm + min(int(_MEASURED * batches_a_cycle), _MOST // 2)
    sent = SentOut()
    flying: list[tuple[list[tuple[Request, int]], list[Request]]] = [([], [])] * slots
    for number in range(count):
        slot, group, landed = number % slots, groups[number % slots], number - slots
        prompts, answered = flying[slot]
        for request, tokens in prompts:
            sent.into += tokens
            request.done += tokens
            if request.done >= request.prompt:
                request.out, request.first = 1, landed
                sent.out += 1
                sent.firsts += [(request.came, landed)] if number > warm else []
        for request in answered:
            request.out += 1
            if request.out >= traffic.output:
                if number > warm and traffic.output > 1:
                    sent.answers.append((request.first, landed, request.out - 1))
                seat = group.index(request)
                group[seat] = ask(landed)
                if not slot and not seat and number >= warm:
                    # Whole rounds are counted: from an end in the first seat to its last.
                    sent.rounds.append((landed, sent.out + len(answered), sent.into, number))
        sent.out += len(answered)
        prompts, tokens = [], 0
        for request in group:
            chunk = min(setting.chunk - tokens, request.prompt - request.done)
            if chunk > 0 and (setting.together or not prompts):
                prompts.append((request, chunk))
                tokens += chunk
        answered = [request for request in group if request.done >= request.prompt]
        flying[slot] = prompts, answered
        sent.tokens.append(tokens)
        sent.rows.append(len(answered))
        # What was recorded is a prompt, or the first chunk of one.
        done = max((request.done for request, _ in prompts), default=0)
        looked_back = max(done + tokens, 1) / max(min(recorded_prompt, recorded_chunk), 1.0)
        longest = max((request.prompt for request in answered), default=recorded_prompt)
        of_answers = max(float(longest), 1.0) / max(recorded_prompt, 1.0)
        sent.grown.append((looked_back if prompts else 1.0, of_answers))
        under_way = sum(one.done + one.out for members in groups for one in members)
        sent.kv_tokens = max(sent.kv_tokens, under_way)
    return sent


def _lengths(traffic: Traffic, count: int) -> list[int]:
    """Return lengths of prompts in turn, each as often as its share says, well mixed."""
    owed = {length: 0.0 for length, _ in traffic.prompts}
    lengths = []
    for _ in range(count):
        for length, share in traffic.prompts:
            owed[length] += share
        length = max(owed, key=lambda one: owed[one])
        owed[length] -= 1.0
        lengths.append(length)
    return lengths


def serve(
    costs: Costs, traffic: Traffic, setting: Setting, hosts: float, recorded_prompt: float
) -> ServerRates:
    """Run a server whose hosts are so many times as quick, until it has come round some times."""
    sent = send_out(traffic, setting, recorded_prompt=recorded_prompt, recorded_chunk=costs.chunk)
    stages = range(costs.stages)
    layers = setting.layers or (None,) * costs.stages
    length, turn, wire = np.zeros((3, len(sent.tokens), costs.stages))
    batches = enumerate(zip(sent.tokens, sent.rows, sent.grown, strict=True))
    for number, (tokens, rows, grown) in batches:
        spread = costs.spread[int(tokens > 0)]
        for stage in stages:
            taken, after = pass_ns(
                costs,
                hosts,
                stage,
                prompt_tokens=tokens,
                rows=rows,
                grown=grown,
                layers=layers[stage],
            )
            length[number, stage] = taken * spread[(number * costs.stages + stage) % len(spread)]
            if number + 1 < len(turn):
                turn[number + 1, stage] = after
            wire[number, stage] = wire_ns(costs, stage, tokens + rows, setting.repaired)
    wire[:, 0] = 0
    lag = np.zeros_like(length)
    lag[1:, 0] = costs.held_ns
    back = np.full(len(length), round(costs.back_ns / hosts))
    _, ended = Queue(
        in_flight=setting.in_flight,
        on_device=costs.on_device,
        held=costs.on_device is not None,
        length=whole(length),
        busy=whole(length),
        turn=whole(turn),
        wire=whole(wire),
        begin=np.zeros_like(whole(wire)),
        lag=whole(lag),
        back=back,
        entered=back,
        opened=np.zeros(costs.stages, dtype=np.int64),
    ).run()
    return _rates(sent, np.append(ended[:, -1], 0) / NS_PER_S)


def _rates(sent: SentOut, landed_s: F64) -> ServerRates:
    """Return what users have of batches that land so; the last moment is the beginning."""
    rounds = sent.rounds
    if len(rounds) < 2:
        last = int(landed_s.argmax())
        rounds = [(NONE, 0, 0, 0), (last, sent.out, sent.into, len(sent.tokens))]
    first, last_round = rounds[0], rounds[-1]
    length = landed_s[last_round[0]] - landed_s[first[0]]
    firsts = [landed_s[token] - landed_s[came] for came, token in sent.firsts]
    between = [(landed_s[last] - landed_s[first]) / count for first, last, count in sent.answers]
    return ServerRates(
        batches_per_s=float((last_round[3] - first[3]) / length),
        tokens_out_per_s=float((last_round[1] - first[1]) / length),
        tokens_in_per_s=float((last_round[2] - first[2]) / length),
        ttft_s=float(np.mean(firsts)) if firsts else 0.0,
        tpot_s=float(np.mean(between)) if between else 0.0,
        kv_tokens=sent.kv_tokens,
    )


def calibrate(costs: Costs, traffic: Traffic, setting: Setting, tokens_out_per_s: float) -> float:
    """Find how many times as quick hosts are unprofiled: the server comes nearest to what it did.

    The profiler makes no host quicker: what the model misses at its pace is not the hosts'.
    """

    def falls_short(hosts: float) -> bool:
        served = serve(costs, traffic, setting, hosts, traffic.prompt)
        return served.tokens_out_per_s < tokens_out_per_s

    low, high = 1.0, _QUICKEST_HOSTS
    if not falls_short(low):
        return low
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if falls_short(middle) else (low, middle)
    return float((low * high) ** 0.5)
