"""`watch.toml` in → what to watch and how; whatever is wrong in it is said by its key.

The structs are the tables of the file, key by key: msgspec holds it against them. Before that,
`_READERS` say what a text means: a period, a share, an address; after it, `_check` asks for what no
key tells alone.
"""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from msgspec import Meta, Struct, ValidationError, convert, field
from msgspec.structs import fields

from debubble.annexes import drift
from debubble.capture.server import KINDS
from debubble.errors import UsageError, WatchError
from debubble.trace.digest import BESIDE
from debubble.trace.source import is_url
from debubble.units import parse_period, parse_share

# A name is a label of metrics and a part of addresses.
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}")
_SHORTEST_TOKEN = 16
_SEE = "docs/reference/watch-config.md lists every key"

_Count = Annotated[int, Meta(ge=1)]
# Of fewer captures nobody knows the noise.
_FEWEST = 2 * drift.STAYS


class Table(Struct, frozen=True, forbid_unknown_fields=True):
    """One table of the file."""


class Trigger(Table, frozen=True, kw_only=True):
    """A server that is captured on a schedule."""

    url: str = field(name="server")
    kind: str
    every_s: float = field(name="every", default=3600.0)
    seconds: float = 5.0
    around_s: float = field(name="around", default=2.0)
    """How long its own metrics are noted before and after; 0 for not at all."""
    most_waiting: float = 8.0
    """More requests than these in the server's queue are pressure: the capture waits."""


class Source(Table, frozen=True, kw_only=True):
    """Where captures of one pipeline appear."""

    name: str
    folder: str
    """A folder or an fsspec prefix."""
    settle_s: float = field(name="settle", default=30.0)
    poll_s: float = field(name="poll", default=10.0)
    keep: Annotated[int, Meta(ge=0)] | None = None
    """How many raw captures are kept; None for all."""
    digests: str | None = None
    """Where digests are kept: a folder, a prefix, or `beside` the traces."""
    trigger: Trigger | None = field(name="server", default=None)
    """In the file its keys stand beside the source's own."""


class Listen(Table, frozen=True, kw_only=True):
    """Where the service answers."""

    address: tuple[str, int] = ("127.0.0.1", 9464)
    token: str | None = field(name="token_file", default=None)

    @property
    def host(self) -> str:
        """The address without its port."""
        return self.address[0]

    @property
    def port(self) -> int:
        """The port alone."""
        return self.address[1]


class Drift(Table, frozen=True, kw_only=True):
    """How changes are told from noise."""

    reference: Annotated[int, Meta(ge=_FEWEST)] = drift.REFERENCE
    min_change: float = drift.MIN_CHANGE
    sides: str = "worse"


class Webhook(Table, frozen=True, kw_only=True):
    """Who gets every alert."""

    url: str


class Effort(Table, frozen=True, kw_only=True):
    """What analysis may take."""

    workers: _Count = 1
    timeout_s: float = field(name="timeout", default=1800.0)
    """For one capture."""


class Config(Table, frozen=True, kw_only=True):
    """Everything the service is told."""

    lock: Path
    store: str | None = None
    listen: Listen = Listen()
    sources: tuple[Source, ...] = field(name="source", default=())
    drift: Drift = Drift()
    webhooks: tuple[Webhook, ...] = field(name="webhook", default=())
    analysis: Effort = Effort()


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
    except RecursionError as error:
        raise _too_deep(path) from error
    data = {"lock": f".{path.name}.lock"} | data | ({"store": store} if store else {})
    # Files that are named lie beside the configuration.
    folder = path.resolve().parent
    readers = _READERS | {
        "lock": lambda text: folder / text,
        "token_file": lambda text: _read_token(folder / text),
    }
    try:
        config = convert(_read("", data, "", readers), type=Config)
        _check(config)
    except ValidationError as error:
        raise WatchError(_explain(str(error)), hint=_SEE, file=str(path)) from error
    except UsageError as error:
        raise WatchError(error.message, hint=error.hint or _SEE, file=str(path)) from error
    except RecursionError as error:
        raise _too_deep(path) from error
    return config


def _too_deep(path: Path) -> WatchError:
    return WatchError("brackets are nested too deep", file=str(path), hint=_SEE)


def _read(key: str, value: Any, path: str, readers: Mapping[str, Callable[[str], object]]) -> Any:
    """Return what a value of the file means, with all that is in it."""
    if isinstance(value, list):
        return [_read(key, part, f"{path}[{at}]", readers) for at, part in enumerate(value)]
    if key in readers:
        if not isinstance(value, str):
            where = ", above the first [table]" if path == key else ""
            raise UsageError(f"{path} must be text", hint=f'write {key} = "…"{where}')
        try:
            return readers[key](value)
        except UsageError as error:
            raise UsageError(f"{path}: {error.message}", hint=error.hint) from error
    if not isinstance(value, dict):
        return value
    inside = f"{path}." if path else ""
    table = {name: _read(name, part, f"{inside}{name}", readers) for name, part in value.items()}
    # What says how a server is captured becomes a table of its own.
    asked = [known.encode_name for known in fields(Trigger) if known.encode_name in table]
    if key != "source" or not asked:
        return table
    if "server" not in table:
        raise UsageError(
            f"{path}.{asked[0]} needs {path}.server: it says how one is captured",
            hint=f"add server, or leave {asked[0]} out",
        )
    table["server"] = {name: table.pop(name) for name in asked}
    return table


def _explain(problem: str) -> str:
    """Put the key first: msgspec writes "what is wrong - at `$.source[0].keep`"."""
    words, _, path = problem.partition(" - at `$.")
    path = re.sub(r"^(source\[\d+\])\.server\b", r"\1", path.rstrip("`"))
    field_at = re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", words)
    if field_at is None:
        return f"{path}: {words}"
    said = "is no key of the configuration" if "unknown" in field_at[1] else "is missing"
    return f"{path}.{field_at[2]} {said}".removeprefix(".")


def _check(config: Config) -> None:
    """Refuse what is wrong only together."""
    if not config.sources:
        raise UsageError("there is nothing to watch", hint="add a [[source]]")
    if len({source.name for source in config.sources}) < len(config.sources):
        raise UsageError("two sources have one name", hint="give every [[source]] its own name")
    if config.listen.token is None and not is_loopback(config.listen.host):
        raise UsageError(
            f"listen.address: {config.listen.host} can be reached from elsewhere, "
            "and there is no token",
            hint="add listen.token_file, or listen on 127.0.0.1",
        )


def is_loopback(host: str) -> bool:
    """Tell an address that only this machine reaches."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _read_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        hint = "letters, digits, '_', '.' and '-', at most 64"
        raise UsageError(f"{text!r} is no name", hint=hint)
    return text


def _read_folder(text: str) -> str:
    if not is_url(text) and not Path(text).is_absolute():
        raise UsageError(f"{text!r} is no absolute path")
    return text.rstrip("/") or "/"


def _read_url(example: str, text: str) -> str:
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname)
        _ = parts.port  # a port that is none is said when it is asked for
    except ValueError:
        is_address = False
    if not is_address:
        raise UsageError(f"{text!r} is no address", hint=example)
    if "@" in parts.netloc:
        raise UsageError("an address with a name or a password is not asked", hint=example)
    return text


def _read_word(known: Sequence[str], text: str) -> str:
    if text not in known:
        raise UsageError(repr(text), hint=f"one of {', '.join(known)}")
    return text


def _read_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{text!r} is no address", hint="such as 127.0.0.1:9464")
    return host, int(port)


def _read_token(file: Path) -> str:
    try:
        mode = file.stat().st_mode
        token = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise UsageError(f"everybody on this machine may read {file}", hint=f"chmod 600 {file}")
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise UsageError(
            f"the token needs {_SHORTEST_TOKEN} plain characters or more",
            hint=f"(umask 077; openssl rand -hex 32 > {file})",
        )
    return token


_READERS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("settle", "poll", "every", "seconds", "around", "timeout"), parse_period),
    "min_change": parse_share,
    "name": _read_name,
    "folder": _read_folder,
    "digests": lambda text: text if text == BESIDE else _read_folder(text),
    "server": partial(_read_url, "http://host:8000"),
    "url": partial(_read_url, "https://host/path"),
    "store": str,
    "address": _read_address,
    "kind": partial(_read_word, KINDS),
    "sides": partial(_read_word, ("worse", "both")),
}
