"""`watch.toml` in → what to watch and how; whatever is wrong in it is named by its key.

The structs are the tables of the file, key by key: msgspec holds it against them. A text that means
something else, such as a period or an address, has a type here.
"""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct, ValidationError, convert, field

from debubble.annexes import drift
from debubble.errors import UsageError, WatchError
from debubble.trace.digest import BESIDE
from debubble.trace.source import is_url
from debubble.units import parse_period, parse_share

_SHORTEST_TOKEN = 16
_SEE = "docs/reference/watch-config.md lists every key"


class Period(float):
    """Seconds, written as `30s`, `5min` or `1h`."""


class Share(float):
    """A share, written as `10%`."""


class Folder(str):
    """An absolute path, or an fsspec prefix."""

    __slots__ = ()


class DigestFolder(str):
    """The same, or `beside` the traces."""

    __slots__ = ()


class Url(str):
    """An address of HTTP, without a password."""

    __slots__ = ()


class Token(str):
    """What stands in the file that is named."""

    __slots__ = ()


class Address(str):
    """A host and a port to listen on."""

    __slots__ = ()

    @property
    def host(self) -> str:
        """The address without its port."""
        return self.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port alone."""
        return int(self.rpartition(":")[2])


def is_loopback(host: str) -> bool:
    """Tell an address that only this machine reaches."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


_Count = Annotated[int, Meta(ge=1)]
# A name is a label of metrics and stands on pages.
_Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}$")]


class Table(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of the file."""


class Server(Table, frozen=True, kw_only=True):
    """A serving engine that is captured on a schedule."""

    url: Url
    kind: Literal["vllm", "sglang"]
    every_s: Period = field(name="every", default=Period(3600))
    seconds: Period = Period(5)
    most_waiting: float = 8.0
    """More requests than these in the server's queue are pressure: the capture waits."""


class Source(Table, frozen=True, kw_only=True):
    """Where captures of one pipeline appear."""

    name: _Name
    folder: Folder
    settle_s: Period = field(name="settle", default=Period(30))
    poll_s: Period = field(name="poll", default=Period(10))
    keep: Annotated[int, Meta(ge=0)] | None = None
    """How many raw captures are kept; None for all."""
    digests: DigestFolder | None = None
    server: Server | None = None


class Listen(Table, frozen=True, kw_only=True):
    """Where the service answers."""

    address: Address = Address("127.0.0.1:9464")
    token: Token | None = field(name="token_file", default=None)

    def __post_init__(self) -> None:
        if self.token is None and not is_loopback(self.address.host):
            raise ValueError(
                f"{self.address} can be reached from elsewhere, and there is no token: "
                "add token_file, or listen on 127.0.0.1"
            )


class Drift(Table, frozen=True, kw_only=True):
    """How changes are told from noise."""

    # Of fewer captures nobody knows the noise.
    reference: Annotated[int, Meta(ge=2 * drift.STAYS)] = drift.REFERENCE
    min_change: Share = Share(drift.MIN_CHANGE)


class Config(Table, frozen=True, kw_only=True):
    """The whole file."""

    store: str | None = None
    workers: _Count = 1
    """Captures, of different sources, that are analysed at once."""
    webhooks: tuple[Url, ...] = ()
    listen: Listen = Listen()
    drift: Drift = Drift()
    sources: Annotated[tuple[Source, ...], Meta(min_length=1)] = field(name="source")

    def __post_init__(self) -> None:
        if len({source.name for source in self.sources}) < len(self.sources):
            raise ValueError("two sources have one name")


def read_config(path: Path, *, store: str | None = None) -> Config:
    """Read the file; a `--store` of the command line goes before its own."""
    try:
        with path.open("rb") as stream:
            data = tomllib.load(stream)
    except OSError as error:
        raise WatchError(
            f"cannot be read: {error.strerror}", file=str(path), hint="give --config a TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WatchError(f"is no TOML: {error}", file=str(path), hint=_SEE) from error
    data |= {"store": store} if store else {}
    # A file that is named lies beside the configuration.
    readers = _READERS | {Token: partial(_read_token, path.resolve().parent)}
    try:
        return convert(data, type=Config, dec_hook=partial(_read_text, readers))
    except ValidationError as error:
        # msgspec writes "what is wrong - at `$.source[0].keep`".
        problem, _, key = str(error).partition(" - at `$.")
        words = f"{key.rstrip('`')}: {problem}" if key else problem
        raise WatchError(words, hint=_SEE, file=str(path)) from error


def _read_text(readers: dict[type, Callable[[str], Any]], kind: type[Any], value: object) -> object:
    if not isinstance(value, str):
        raise ValueError('must be text, in "…"')  # noqa: TRY004 (msgspec adds the key to both)
    try:
        return kind(readers[kind](value))
    except UsageError as error:
        words = "; ".join(filter(None, (error.message, error.hint)))
        raise ValueError(words) from error


def _read_folder(text: str) -> str:
    if not is_url(text) and not Path(text).is_absolute():
        raise UsageError(f"{text!r} is no absolute path")
    return text.rstrip("/") or "/"


def _read_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname)
        _ = parts.port  # a port that is none is said when it is asked for
    except ValueError:
        is_address = False
    if not is_address or "@" in text:
        hint = "such as http://host:8000, without a name or a password"
        raise UsageError(f"{text!r} is no address", hint=hint)
    return text


def _read_address(text: str) -> str:
    match = re.fullmatch(r"(.+):(\d{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise UsageError(f"{text!r} is no address", hint="such as 127.0.0.1:9464")
    return text


def _read_token(folder: Path, name: str) -> str:
    file = folder / name
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


_READERS: dict[type, Callable[[str], Any]] = {
    Period: parse_period,
    Share: parse_share,
    Folder: _read_folder,
    DigestFolder: lambda text: text if text == BESIDE else _read_folder(text),
    Url: _read_url,
    Address: _read_address,
}
