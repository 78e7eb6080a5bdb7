"""What a user says of a server, and asks of it → its load, and the setting to try."""

from __future__ import annotations

from dataclasses import dataclass, replace

from debubble.errors import UsageError
from debubble.serving.plan import ServerModel, ServerOption, plan_server, predict
from debubble.serving.traffic import Traffic
from debubble.units import counted, parse_lengths


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
class ServerPlan:
    """A server as it is replayed, and changes of it: the most tokens first."""

    model: ServerModel
    options: tuple[ServerOption, ...]


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
    requests: int | None = None
    prompts: str | None = None
    """Of other traffic: a length, or a mix."""

    def ask(self, model: ServerModel) -> ServerPlan:
        """Predict the change that is asked for, if any is."""
        self._check(model)
        asked = (self.split, self.in_flight, self.chunk, self.requests, self.prompts)
        if all(value is None for value in asked):
            return ServerPlan(model=model, options=())
        now, traffic = model.setting, None
        setting = replace(
            now,
            in_flight=self.in_flight or now.in_flight,
            chunk=self.chunk or now.chunk,
            layers=self.split,
            requests_a_batch=self.requests or now.requests_a_batch,
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
