"""Requests and a setting in → what a server would do: tokens a second, time to and between tokens.

Clients are a closed loop: a request that ends is followed by another. Each of the batches in flight
has its own requests; a batch takes all of them on by a token, beside a chunk of a prompt if one of
them is not through with it. What batches take on the stages is the closed queue's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from debubble.serving.costs import Costs, Pace, pass_ns, wire_ns
from debubble.units import NS_PER_S

# Cycles of requests before it is measured, and measured; batches at most.
_WARM, _MEASURED, _MOST = 1, 2, 4_000
_HALVINGS = 14
# A server that no pace brings nearer to what it did is not understood.
_NEAR = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is asked of a server."""

    clients: int
    """Requests that are under way at once."""
    prompts: tuple[tuple[int, float], ...]
    """Tokens of a prompt, and the share of such prompts."""
    output: int
    """Tokens of an answer."""

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


@dataclass(slots=True)
class _Request:
    prompt: int
    done: int = 0
    out: int = 0
    came: float = 0.0
    first: float = 0.0


def _lengths(traffic: Traffic, count: int) -> list[int]:
    """Return lengths of prompts in turn, each as often as its share says, well mixed."""
    owed = {length: 0.0 for length, _ in traffic.prompts}
    found = []
    for _ in range(count):
        for length, share in traffic.prompts:
            owed[length] += share
        length = max(owed, key=lambda one: owed[one])
        owed[length] -= 1.0
        found.append(length)
    return found


def serve(  # noqa: C901, PLR0912, PLR0915 (one loop, as an engine's is)
    costs: Costs, traffic: Traffic, setting: Setting, pace: Pace, recorded_prompt: float
) -> ServerRates:
    """Run a server until it has come round some times."""
    slots = setting.in_flight
    seats = -(-traffic.clients // slots)
    seats = min(seats, setting.requests_a_batch or seats)
    lengths = _lengths(traffic, 64)
    taken = 0

    def ask(moment: float) -> _Request:
        nonlocal taken
        taken += 1
        length = lengths[(taken - 1) % len(lengths)]
        # Without a prompt it is as after its first token.
        return _Request(prompt=length, came=moment, first=moment, out=int(not length))

    groups = [
        [ask(0.0) for seat in range(seats) if seat * slots + slot < traffic.clients]
        for slot in range(slots)
    ]
    batches_a_cycle = slots * (traffic.output + seats * -(-traffic.prompt // setting.chunk))
    warm = min(int(_WARM * batches_a_cycle), _MOST // 2)
    count = warm + min(int(_MEASURED * batches_a_cycle), _MOST // 2)
    layers = setting.layers or (None,) * costs.stages
    free = [0.0] * costs.stages
    landed = [0.0] * slots
    ended: list[float] = []
    flying: list[tuple[list[tuple[_Request, int]], list[_Request]] | None] = [None] * slots
    out = into = held = 0
    rounds: list[tuple[float, int, int, int]] = []
    firsts: list[float] = []
    between: list[float] = []
    turns = [0.0] * costs.stages
    back = costs.back_ns / pace.hosts
    for number in range(count):
        slot, group = number % slots, groups[number % slots]
        now = landed[slot]
        flight = flying[slot]
        if flight is not None:
            prompts, answered = flight
            for prompting, tokens in prompts:
                into += tokens
                prompting.done += tokens
                if prompting.done >= prompting.prompt:
                    prompting.out, prompting.first = 1, now
                    out += 1
                    firsts += [now - prompting.came] if number > warm else []
            for request in answered:
                request.out += 1
                if request.out >= traffic.output:
                    if number > warm and traffic.output > 1:
                        between.append((now - request.first) / (request.out - 1))
                    seat = group.index(request)
                    group[seat] = ask(now)
                    if not slot and not seat and number >= warm:
                        # Whole rounds are counted: from an end in the first seat to its last.
                        rounds.append((now, out + len(answered), into, number))
            out += len(answered)
        prompts, tokens = [], 0
        for prompting in (one for one in group if one.done < one.prompt):
            chunk = min(setting.chunk - tokens, prompting.prompt - prompting.done)
            if chunk > 0 and (setting.together or not prompts):
                prompts.append((prompting, chunk))
                tokens += chunk
        answered = [one for one in group if one.done >= one.prompt]
        longest = max((one for one, _ in prompts), key=lambda one: one.done, default=None)
        grown = _grown(longest, tokens, answered, recorded_prompt, costs.chunk)
        phase = int(tokens > 0)
        at = max(free[0] + turns[0], now + back)
        if costs.on_device is not None and number >= costs.on_device:
            at = max(at, ended[number - costs.on_device] + back)
        for stage in range(costs.stages):
            if stage:
                if stage == 1 and costs.on_device is not None and number:
                    at = max(at, ended[number - 1]) + costs.held_ns
                wire = wire_ns(costs, stage, tokens + len(answered), setting.repaired)
                at = max(at, free[stage] + turns[stage]) + wire
            taken_ns, turns[stage] = pass_ns(
                costs,
                pace,
                stage,
                prompt_tokens=tokens,
                rows=len(answered),
                grown=grown,
                layers=layers[stage],
            )
            spread = costs.spread[phase]
            at += taken_ns * spread[(number * costs.stages + stage) % len(spread)]
            free[stage] = at
        ended.append(at)
        landed[slot], flying[slot] = at, (prompts, answered)
        held = max(held, sum(one.done + one.out for each in groups for one in each))
    if len(rounds) < 2:
        rounds = [(0.0, 0, 0, 0), (max(landed), out, into, count)]
    first, last = rounds[0], rounds[-1]
    length = (last[0] - first[0]) / NS_PER_S
    return ServerRates(
        batches_per_s=(last[3] - first[3]) / length,
        tokens_out_per_s=(last[1] - first[1]) / length,
        tokens_in_per_s=(last[2] - first[2]) / length,
        ttft_s=fmean(firsts) / NS_PER_S if firsts else 0.0,
        tpot_s=fmean(between) / NS_PER_S if between else 0.0,
        kv_tokens=held,
    )


def _grown(
    prompting: _Request | None,
    tokens: int,
    answered: Sequence[_Request],
    recorded_prompt: float,
    chunk: int,
) -> tuple[float, float]:
    """Return how many times the recorded context a batch looks back on: its prompt, its answers.

    What was recorded is a prompt, or the first chunk of one.
    """
    of_prompt = 1.0
    if prompting is not None:
        of_prompt = max(prompting.done + tokens, 1) / max(min(recorded_prompt, chunk), 1.0)
    longest = max((one.prompt for one in answered), default=recorded_prompt)
    return of_prompt, max(float(longest), 1.0) / max(recorded_prompt, 1.0)


def calibrate(
    costs: Costs, traffic: Traffic, setting: Setting, tokens_out_per_s: float
) -> Pace | None:
    """Find how quick hosts are without the profiler: so that the server does what it did.

    None where no pace comes near.
    """

    def reaches(pace: Pace) -> float:
        costs.memo.clear()
        served = serve(costs, traffic, setting, pace, traffic.prompt)
        return served.tokens_out_per_s / tokens_out_per_s

    found = Pace(hosts=_between(0.5, 12.0, lambda at: reaches(Pace(hosts=at))))
    off = abs(reaches(found) - 1)
    costs.memo.clear()
    return found if off < _NEAR else None


def _between(low: float, high: float, reaches: Callable[[float], float]) -> float:
    """Return where something that grows reaches 1."""
    at = (low + high) / 2
    for _ in range(_HALVINGS):
        at = (low * high) ** 0.5 if low > 0 else (low + high) / 2
        if reaches(at) < 1:
            low = at
        else:
            high = at
    return at
