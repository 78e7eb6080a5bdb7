"""An address in → its answer, or one kind of error: whatever is at the other end.

Every request has a deadline as a whole and a limit of size. What sends elsewhere is followed to the
same origin alone. No proxy is asked: the address that was given is the only one that is reached.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urljoin, urlsplit

from debubble.errors import CaptureError
from debubble.units import printable

# Whoever has begun to answer ends by then: a drip is no answer.
ANSWER_S = 10.0
# A server that runs begins to answer in milliseconds; the largest answer is a page of metrics.
PATIENCE_S = 5.0
_MOST_BYTES = 16 * 1024**2
_MOST_REDIRECTS = 3
_MOVED = frozenset({301, 302, 303, 307, 308})
# Those after which a request that changes something may be made again as it was.
_MOVED_AS_IT_IS = frozenset({307, 308})
_PORTS = {"http": 80, "https": 443}


class NoAnswer(CaptureError):
    """Nothing came that is an answer; `late` where it was waited for in vain."""

    late = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request."""

    url: str
    method: str = "GET"
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    patience_s: float = PATIENCE_S
    """For the answer's first byte; then it has `ANSWER_S`."""
    most_bytes: int = _MOST_BYTES
    follow: bool = True
    """Whether it may be sent elsewhere on the same origin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What was answered, whatever its status."""

    status: int
    reason: str
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether what was asked for was done; redirects that lead nowhere are refusals."""
        return 200 <= self.status < 300


def fetch(asked: Request) -> Reply:
    """Ask; raise `NoAnswer` where there is no answer, and never anything else."""
    until = time.monotonic() + asked.patience_s
    url = asked.url
    try:
        for _ in range(_MOST_REDIRECTS + 1):
            reply, location = _ask_once(asked, url, until)
            kept = _MOVED if asked.method == "GET" else _MOVED_AS_IT_IS
            if not asked.follow or reply.status not in kept or location is None:
                return reply
            target = urljoin(url, location)
            if _origin(urlsplit(target)) != _origin(urlsplit(url)):
                raise NoAnswer(f"{asked.url}: it sends to another address, which is not followed")
            url = target
    except TimeoutError as error:
        late = NoAnswer(f"{asked.url}: no answer within {asked.patience_s:g} s")
        late.late = True
        raise late from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        said = str(getattr(error, "reason", None) or error) or type(error).__name__
        raise NoAnswer(f"{asked.url}: {_short(said)}") from error
    raise NoAnswer(f"{asked.url}: it sends in circles")


def _short(said: str) -> str:
    """Show what a stranger's answer says, and cut what it made long."""
    said = printable(said)
    return said if len(said) <= 200 else f"{said[:200]}…"


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


def _ask_once(asked: Request, url: str, until: float) -> tuple[Reply, str | None]:
    parts = urlsplit(url)
    scheme, host, port = _origin(parts)
    if scheme not in _PORTS or host is None or port is None:
        raise ValueError("this is no address of a server")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {"Host": parts.netloc.rpartition("@")[2], "Connection": "close", **asked.headers}
    sock = socket.create_connection((host, port), _left(until))
    if scheme == "https":
        sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
    connection = http.client.HTTPConnection(host, port)
    with contextlib.closing(sock):
        connection.sock = _UntilDeadline(sock, until)
        connection.request(asked.method, path, body=asked.body, headers=headers)
        with connection.getresponse() as response:
            body = response.read(asked.most_bytes + 1)
            if len(body) > asked.most_bytes:
                raise ValueError(f"its answer is longer than {asked.most_bytes} bytes")
            if response.length:
                raise http.client.IncompleteRead(body, response.length)
            reply = Reply(status=response.status, reason=_short(response.reason), body=body)
            return reply, response.getheader("Location")


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _UntilDeadline(io.RawIOBase):
    """A socket, as http.client uses one, with a deadline for all that is sent and read.

    It stays open: http.client closes it before the answer's body is read.
    """

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._socket = sock
        self._until = until
        self._began = False

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return what answers are read from."""
        return io.BufferedReader(_UntilDeadline(self._socket, self._until))

    def sendall(self, data: bytes) -> None:
        """Send a request."""
        self._socket.settimeout(_left(self._until))
        self._socket.sendall(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read what is there; the first byte starts the time that the rest has."""
        self._socket.settimeout(_left(self._until))
        count = self._socket.recv_into(buffer)
        if not self._began:
            self._began = True
            self._until = min(self._until, time.monotonic() + ANSWER_S)
        return count
