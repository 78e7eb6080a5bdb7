"""A server's model in → what other settings would do, each with its interval; and what is asked.

Everything is held against the server as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from debubble.errors import UsageError
from debubble.plan.advice import WORTH, Advice, advise, first_of
from debubble.serving.costs import pass_ns
from debubble.serving.model import ServerModel
from debubble.serving.traffic import ServerRates, Setting, Traffic
from debubble.units import counted, parse_lengths

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
# Other numbers in flight and chunks that are tried, against those that ran.
_TIMES = (0.25, 0.5, 2.0)


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
    others: tuple[tuple[float, ServerRates], ...]
    """The same where it is as the recording leaves open: the gain, and what comes of it."""
    of_prompts: bool
    """Prompts were captured: without them nothing is sure of traffic that has some."""
    refused: str = ""
    """Why it cannot be."""

    @property
    def low(self) -> float:
        """Of tokens out a second, over the server as it is; so `high`."""
        return (1 + min([self.gain, *(gain for gain, _ in self.others)])) / (1 + self.off)

    @property
    def high(self) -> float:
        """The other end."""
        return (1 + max([self.gain, *(gain for gain, _ in self.others)])) * (1 + self.off)

    @property
    def tpot_s(self) -> tuple[float, float]:
        """Between what a token's time would be."""
        tpots = [self.served.tpot_s, *(served.tpot_s for _, served in self.others)]
        return min(tpots) / (1 + self.off), max(tpots) * (1 + self.off)

    @property
    def verdict(self) -> Advice | Literal["refused"]:
        """Whether to do it."""
        if self.refused:
            return "refused"
        return advise(self.gain, self.low - 1, self.high - 1, unseen=not self.of_prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """A server as it is replayed, and changes of it: the most tokens first."""

    model: ServerModel
    options: tuple[ServerOption, ...]

    @property
    def first(self) -> ServerOption | None:
        """What to begin with, as of a job."""
        return first_of(self.options, lambda option: option.verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedLoad:
    """What a server was put under, as it was typed."""

    clients: int | None = None
    """None: as many as its metrics say were running."""
    prompt: str = "512"
    output: str = "48"

    def traffic(self, running: float | None) -> Traffic:
        """Return the traffic: of so many clients as were running, unless it says how many."""
        output = sum(length * share for length, share in parse_lengths(self.output))
        clients = self.clients or round(running or 1)
        return read_traffic(clients, self.prompt, max(1, round(output)))


def read_stated_load(text: str) -> StatedLoad:
    """Read `clients=32 prompt=512:0.8,2048:0.2 output=48`."""
    values = dict(word.partition("=")[::2] for word in text.split())
    wrong = sorted(set(values) - {"clients", "prompt", "output"})
    clients = values.get("clients", "1")
    if wrong or not clients.isdigit() or not int(clients):
        raise UsageError(
            f"{wrong[0] if wrong else clients!r} says nothing of a load",
            hint="write 'clients=32 prompt=512:0.8,2048:0.2 output=48'",
        )
    for lengths in (values.get("prompt"), values.get("output")):
        parse_lengths(lengths or "1")
    return StatedLoad(**values | ({"clients": int(clients)} if "clients" in values else {}))  # type: ignore[arg-type]


def read_traffic(clients: int, prompts: str, output: int) -> Traffic:
    """Return traffic as it is written: lengths of prompts as one, or as a mix."""
    return Traffic(clients=clients, prompts=parse_lengths(prompts), output=output)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerQuestion:
    """What is said of a server and of its change; None is what is not said."""

    load: StatedLoad | None = None
    """What it was put under, where its metrics do not tell."""
    kv_tokens: int | None = None
    """That its cache holds, on each stage."""
    layers: tuple[int, ...] | None = None
    split: tuple[int, ...] | None = None
    in_flight: int | None = None
    chunk: int | None = None
    prompts: str | None = None
    """Of other traffic: a length, or a mix."""

    def ask(self, model: ServerModel) -> ServerPlan:
        """Predict the change that is asked for, if any is."""
        self._check(model)
        asked = (self.split, self.in_flight, self.chunk, self.prompts)
        if all(value is None for value in asked):
            return ServerPlan(model=model, options=())
        now, traffic = model.setting, None
        setting = replace(
            now,
            in_flight=self.in_flight or now.in_flight,
            chunk=self.chunk or now.chunk,
            layers=self.split,
        )
        if self.prompts is not None:
            traffic = replace(model.traffic, prompts=parse_lengths(self.prompts))
        option = predict(model, setting, traffic, limit=self.kv_tokens)
        return ServerPlan(model=model, options=(option,))

    def plan(self, model: ServerModel) -> ServerPlan:
        """Rank what could be changed."""
        return ServerPlan(model=model, options=plan_server(model, limit=self.kv_tokens))

    def _check(self, model: ServerModel) -> None:
        """Refuse a split of other layers, and more batches than there are requests."""
        known = model.costs.layers
        if self.split is not None and (
            known is None or (sum(known), len(known)) != (sum(self.split), len(self.split))
        ):
            has = "not known" if known is None else ",".join(map(str, known))
            raise UsageError(
                f"{','.join(map(str, self.split))} is no split of this server's layers",
                hint=f"its stages have {has}; state them with --layers",
            )
        if (self.in_flight or 0) > model.traffic.clients:
            asked = counted(self.in_flight or 0, "batch", "batches")
            raise UsageError(
                f"{counted(model.traffic.clients, 'request')} at once do not fill {asked} in "
                "flight",
                hint="a batch has one request or more; other traffic is stated with --load",
            )


def predict(
    model: ServerModel,
    setting: Setting,
    traffic: Traffic | None = None,
    *,
    limit: int | None = None,
) -> ServerOption:
    """Say what another setting, or other traffic, would do."""
    asked = traffic or model.traffic
    served = model.serve(asked, setting)
    now = model.setting
    changed = {
        "in_flight": setting.in_flight != now.in_flight,
        "split": setting.layers not in {None, model.costs.layers},
        "chunk": setting.chunk != now.chunk,
        "requests": setting.requests_a_batch != now.requests_a_batch,
        "hop": bool(setting.repaired),
        "prompts": asked.prompts != model.traffic.prompts,
        "clients": (asked.clients, asked.output) != (model.traffic.clients, model.traffic.output),
    }
    kinds = [kind for kind, differs in changed.items() if differs]
    others = []
    for case in model.others:
        # Clients find another step where a server is started again, for another setting.
        if case.more_in_turn and (not kinds or "in_flight" in kinds):
            continue
        otherwise = replace(setting, in_flight=setting.in_flight + case.more_in_turn)
        came = model.serve(asked, otherwise, case.hosts)
        others.append((came.tokens_out_per_s / case.now.tokens_out_per_s - 1, came))
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
        gain=served.tokens_out_per_s / model.as_is.tokens_out_per_s - 1,
        others=tuple(others),
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
    if costs.prompts is None:  # what prompts lose where some stage is without a batch is not known
        slots = {count for count in slots if count >= costs.stages}
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
            (option for option in options if option.kinds == (kind,) and not option.refused),
            key=lambda option: option.gain,
            default=None,
        )
        for kind in ("in_flight", "split", "hop")
    }
    gains = [option for option in best.values() if option is not None and option.gain > 0]
    gains.sort(key=lambda option: -option.gain)
    for number, option in enumerate(gains[1:], start=1):
        # The best alone, and with each other that makes it better still.
        gains[number] = gains[number - 1]
        changed = {
            name: getattr(option.setting, name)
            for name in ("in_flight", "layers", "repaired")
            if getattr(option.setting, name) != getattr(now, name)
        }
        both = predict(model, replace(gains[number - 1].setting, **changed), limit=limit)
        if both.gain > gains[number - 1].gain + WORTH and not both.refused:
            gains[number] = both
    if gains and gains[-1] not in options:
        options.append(gains[-1])
    return tuple(sorted(options, key=lambda option: (bool(option.refused), -option.gain)))


def _requests(model: ServerModel) -> list[int]:
    """Return other numbers of requests a batch: half, and double where more wait than it takes."""
    each = -(-model.traffic.clients // model.setting.in_flight)
    most = min(model.setting.requests_a_batch or each, each)
    return [count for count in (most // 2, 2 * most) if 0 < count < most or most < count <= each]


def _splits(model: ServerModel) -> list[tuple[int, ...]]:
    """Return the even split, and the one that should be quickest, where they differ from now.

    Most servers are as quick as their longest stage. Where a broadcast of sampled tokens keeps a
    batch in the first stage until the one before has left the last, the others follow each other,
    and the first runs beside them: it may be longer.

        stage 0   1111 2222......3333......
        stage 1        1111      2222
        stage 2            1111      2222
    """
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

    # By stages, the last first: the least that the longest takes with so many layers given out.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ()), *([(np.inf, ())] * total)]
    followers = best
    for stage in reversed(range(stages)):
        followers, best = best, [(np.inf, ())] * (total + 1)
        for given in range(1, total + 1):
            best[given] = min(
                (max(takes(stage, count), followers[given - count][0]), (count, *rest))
                for count in range(1, given + 1)
                for rest in (followers[given - count][1],)
            )
    quickest = best[total][1]
    if costs.on_device is not None:

        def give_first(count: int) -> tuple[int, ...]:
            return (count, *followers[total - count][1])

        def rate(split: tuple[int, ...]) -> float:
            return model.serve(model.traffic, replace(model.setting, layers=split)).tokens_out_per_s

        step = total // 4
        while step:
            firsts = (quickest[0] + more for more in (-step, 0, step))
            splits = [give_first(count) for count in firsts if 1 <= count <= total - stages + 1]
            better = max(splits, key=rate)
            step = step if better != quickest else step // 2
            quickest = better
    even = tuple(len(part) for part in np.array_split(np.arange(total), stages))
    return sorted({even, quickest} - {layers})
