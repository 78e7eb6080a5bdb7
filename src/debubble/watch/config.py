"""`watch.toml` in → what to watch and how; whatever is wrong in it is said by its key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import time
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from debubble.capture.server import KINDS
from debubble.errors import UsageError, WatchError
from debubble.trace.digest.place import BESIDE
from debubble.trace.source import DEFAULT_LIMITS, Limits, is_url
from debubble.units import parse_bytes, parse_period, parse_share
from debubble.watch import drift

_Value = TypeVar("_Value")

# A name is a label of metrics and a part of addresses.
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}")
_QUIET = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)")
# Each is a label; more than these are another service.
MOST_SOURCES = 100
_SHORTEST_TOKEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """A server that is captured on a schedule."""

    url: str
    kind: str
    every_s: float
    jitter: float
    seconds: float
    steps: int | None
    quiet_hours: tuple[tuple[time, time], ...]
    """Local time; from, to."""
    most_waiting: float
    """More requests than these in the server's queue are pressure: the capture waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where captures of one pipeline appear."""

    name: str
    folder: str
    """A folder or an fsspec prefix."""
    settle_s: float
    poll_s: float
    keep: int | None
    """How many raw captures are kept; None for all."""
    digests: str | None = None
    """Where digests are kept: a folder, a prefix, or `beside` the traces."""
    trigger: Trigger | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where the service answers."""

    host: str = "127.0.0.1"
    port: int = 9464
    token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How changes are told from noise."""

    reference: int = drift.REFERENCE
    rate: float = drift.RATE
    sides: Literal["worse", "both"] = "worse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything the service is told."""

    sources: tuple[Source, ...]
    store: str | None
    lock: Path
    listen: Listen
    drift: Drift
    webhooks: tuple[str, ...]
    workers: int
    timeout_s: float
    """How long the analysis of one capture may take."""
    limits: Limits


def read_config(path: Path, *, store: str | None = None) -> Config:
    """Read the file; a `--store` of the command line goes before its own."""
    try:
        with path.open("rb") as stream:
            data = tomllib.load(stream)
    except OSError as error:
        raise WatchError(
            f"cannot be read: {error.strerror}", file=str(path), hint="give --config a TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WatchError(f"is no TOML: {error}", file=str(path), hint=_SEE) from error
    try:
        return _as_config(_Table(data, ""), path, store)
    except UsageError as error:
        raise WatchError(error.message, hint=error.hint or _SEE, file=str(path)) from error


_SEE = "docs/reference/watch-config.md lists every key"


class _Table:
    """One table of the file; what is left in the end was not understood."""

    def __init__(self, data: Mapping[str, Any], place: str) -> None:
        self.left = dict(data)
        self.place = place

    def name(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def take(self, key: str, kind: type[_Value], default: _Value | None = None) -> _Value | None:
        value = self.left.pop(key, None)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            kinds = {str: "text", int: "a whole number", float: "a number", list: "a list"}
            raise UsageError(f"{self.name(key)} must be {kinds.get(kind, 'a table')}")
        return value

    def need(self, key: str, kind: type[_Value]) -> _Value:
        value = self.take(key, kind)
        if value is None:
            raise UsageError(f"{self.name(key)} is missing")
        return value

    def read(self, key: str, default: str, parse: Callable[[str], _Value]) -> _Value:
        text = self.take(key, str, default) or default
        try:
            return parse(text)
        except UsageError as error:
            raise UsageError(f"{self.name(key)}: {error.message}", hint=error.hint) from error

    def count(self, key: str, default: int | None, least: int = 1) -> int | None:
        value = self.take(key, int, default)
        if value is not None and value < least:
            raise UsageError(f"{self.name(key)} must be at least {least}")
        return value

    def table(self, key: str) -> _Table:
        return _Table(self.take(key, dict, {}) or {}, self.name(key))

    def tables(self, key: str) -> list[_Table]:
        found = self.take(key, list, []) or []
        if not all(isinstance(one, dict) for one in found):
            raise UsageError(f"{self.name(key)} must be tables: [[{self.name(key)}]]")
        return [_Table(one, f"{self.name(key)}[{place}]") for place, one in enumerate(found)]

    def done(self) -> None:
        if self.left:
            raise UsageError(f"{self.name(min(self.left))} is no key of the configuration")


def _as_config(table: _Table, path: Path, store: str | None) -> Config:
    sources = tuple(_as_source(one) for one in table.tables("source"))
    if not sources:
        raise UsageError("there is nothing to watch", hint="add a [[source]]")
    if len(sources) > MOST_SOURCES:
        raise UsageError(f"more than {MOST_SOURCES} sources", hint="run several services")
    names = [one.name for one in sources]
    if len(set(names)) < len(names):
        raise UsageError("two sources have one name", hint="give every [[source]] its own name")
    listen = _as_listen(table.table("listen"), path)
    webhooks = tuple(_as_webhook(one) for one in table.tables("webhook"))
    analysis, limits = table.table("analysis"), DEFAULT_LIMITS
    config = Config(
        sources=sources,
        store=store or table.take("store", str),
        lock=path.resolve().parent / (table.take("lock", str, f".{path.name}.lock") or ""),
        listen=listen,
        drift=_as_drift(table.table("drift")),
        webhooks=webhooks,
        workers=analysis.count("workers", 1) or 1,
        timeout_s=analysis.read("timeout", "30min", parse_period),
        limits=Limits(
            inflated_bytes=analysis.read("max_inflated", str(limits.inflated_bytes), parse_bytes),
            ratio=analysis.take("max_ratio", float, limits.ratio) or limits.ratio,
        ),
    )
    table.left.pop("store", None)
    analysis.done()
    table.done()
    return config


def _as_source(table: _Table) -> Source:
    name = table.need("name", str)
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{table.name('name')}: {name!r} is no name",
            hint="letters, digits, '_', '.' and '-', at most 64",
        )
    folder = _as_place(table, "folder")
    if folder is None:
        raise UsageError(f"{table.name('folder')} is missing")
    source = Source(
        name=name,
        folder=folder,
        settle_s=table.read("settle", "30s", parse_period),
        poll_s=max(0.05, table.read("poll", "10s", parse_period)),
        keep=table.count("keep", None, least=0),
        digests=_as_place(table, "digests"),
        trigger=_as_trigger(table),
    )
    table.done()
    return source


def _as_place(table: _Table, key: str) -> str | None:
    """Return a folder or a prefix; digests may also lie beside their traces."""
    place = table.take(key, str)
    if place is None or (key == "digests" and place == BESIDE):
        return place
    if not is_url(place) and not Path(place).is_absolute():
        raise UsageError(f"{table.name(key)}: {place!r} is no absolute path", hint=_SEE)
    return place.rstrip("/") or "/"


# Keys that say how a server is captured.
_OF_SERVER = ("kind", "every", "jitter", "seconds", "steps", "quiet_hours", "most_waiting")


def _as_trigger(table: _Table) -> Trigger | None:
    url = table.take("server", str)
    if url is None:
        for key in _OF_SERVER:
            if key in table.left:
                raise UsageError(
                    f"{table.name(key)} needs {table.name('server')}: it says how one is captured",
                    hint=f"add server, or leave {key} out",
                )
        return None
    if urlsplit(url).scheme not in {"http", "https"}:
        raise UsageError(f"{table.name('server')}: {url!r} is no address", hint="http://host:8000")
    kind = table.need("kind", str)
    if kind not in KINDS:
        raise UsageError(f"{table.name('kind')}: {kind!r}", hint=f"one of {', '.join(KINDS)}")
    steps = table.count("steps", None)
    if steps is not None and kind == "vllm":
        raise UsageError(f"{table.name('steps')}: vLLM takes none", hint="give seconds instead")
    hours = table.take("quiet_hours", list, []) or []
    return Trigger(
        url=url,
        kind=kind,
        every_s=table.read("every", "1h", parse_period),
        jitter=table.read("jitter", "10%", parse_share),
        seconds=table.read("seconds", "5s", parse_period),
        steps=steps,
        quiet_hours=tuple(_as_hours(one, table.name("quiet_hours")) for one in hours),
        most_waiting=table.take("most_waiting", float, 8.0) or 0.0,
    )


def _as_hours(text: object, place: str) -> tuple[time, time]:
    match = _QUIET.fullmatch(str(text))
    try:
        if match is not None:
            first, second, third, fourth = (int(part) for part in match.groups())
            return time(first, second), time(third, fourth)
    except ValueError:
        pass
    raise UsageError(f"{place}: {text!r} are no hours", hint='write them as "22:00-06:00"')


def _as_listen(table: _Table, path: Path) -> Listen:
    host, _, port = (table.take("address", str, "127.0.0.1:9464") or "").rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{table.name('address')} is no address", hint="such as 127.0.0.1:9464")
    file = table.take("token_file", str)
    table.done()
    token = None if file is None else _read_token(path.resolve().parent / file)
    if token is None and not is_loopback(host):
        raise UsageError(
            f"listen.address: {host} can be reached from elsewhere, and there is no token",
            hint="add listen.token_file, or listen on 127.0.0.1",
        )
    return Listen(host=host, port=int(port), token=token)


def is_loopback(host: str) -> bool:
    """Tell an address that only this machine reaches."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _read_token(file: Path) -> str:
    try:
        token = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"listen.token_file: {file} cannot be read") from error
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise UsageError(
            f"listen.token_file: the token needs {_SHORTEST_TOKEN} plain characters or more",
            hint=f"openssl rand -hex 32 > {file}",
        )
    return token


def _as_webhook(table: _Table) -> str:
    url = table.need("url", str)
    if urlsplit(url).scheme not in {"http", "https"} or not urlsplit(url).hostname:
        raise UsageError(f"{table.name('url')}: {url!r} is no address", hint="https://host/path")
    table.done()
    return url


def _as_drift(table: _Table) -> Drift:
    sides = table.take("sides", str, "worse")
    if sides not in {"worse", "both"}:
        raise UsageError(f"{table.name('sides')}: {sides!r}", hint="worse or both")
    found = Drift(
        reference=table.count("reference", drift.REFERENCE) or drift.REFERENCE,
        rate=table.read("false_alarms", f"{drift.RATE:g}", parse_share),
        sides="both" if sides == "both" else "worse",
    )
    drift.Chart(sides="both", reference=found.reference, rate=found.rate)
    table.done()
    return found
