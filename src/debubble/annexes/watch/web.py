"""A request in → its answer, for those who may ask: each in a thread of its own, all of it limited.

Read-only but for two things: an alert is acknowledged, a capture that failed is tried again.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import re
import socket
import socketserver
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from debubble.annexes.watch.config import Address, is_loopback
from debubble.annexes.watch.log import log
from debubble.annexes.watch.page import STYLE_POLICY
from debubble.errors import StoreError, WatchError, mask_secrets

if TYPE_CHECKING:
    from debubble.annexes.watch.service import Service

CONNECTIONS = 512
# For each part of a request, and for a client to take its answer.
_PATIENCE_S = 5.0

_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"default-src 'none'; style-src {STYLE_POLICY}; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
}
_TEXT, _HTML, _JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_CAPTURE = re.compile(r"/captures/(\d{1,9})")
_ACTION = re.compile(r"/(alerts|captures)/(\d{1,9})/(acknowledge|retry)")


class _Server(socketserver.ThreadingTCPServer):
    """Answers each client in a thread; where there are too many, whoever came first has to go."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS

    def __init__(self, address: Address, service: Service) -> None:
        self.service = service
        self._open: dict[socket.socket, None] = {}
        if ":" in address.host:
            self.address_family = socket.AF_INET6
        super().__init__((address.host, address.port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin to answer a client."""
        if len(self._open) >= CONNECTIONS:
            with contextlib.suppress(OSError):
                next(iter(self._open)).shutdown(socket.SHUT_RDWR)
        self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Let go of a client."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        """Write what was wrong in one line, not as a traceback."""
        log("bug", level="error", problem=traceback.format_exc())


@contextmanager
def listening(address: Address, service: Service) -> Iterator[str]:
    """Answer until left."""
    try:
        server = _Server(address, service)
    except OSError as error:
        raise WatchError(
            f"cannot listen on {address}: {error.strerror}",
            hint="set listen.address to one that is free",
        ) from error
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host, port = server.server_address[:2]
    try:
        yield f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"
    finally:
        server.shutdown()
        server.server_close()


class _Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """One client, and its one request."""

    server: _Server
    timeout = _PATIENCE_S
    server_version, sys_version = "debubble", ""
    default_request_version = "HTTP/1.0"

    def log_message(self, *_words: object) -> None:
        """Write nothing: what is worth it is logged as an event."""

    def handle(self) -> None:
        """Answer, and take it as it comes where a client goes away."""
        with contextlib.suppress(OSError):
            super().handle()

    def do_GET(self) -> None:
        """Answer a question."""
        self._answer(self._read)

    def do_POST(self) -> None:
        """Do what is asked for."""
        self._answer(self._act)

    def _answer(self, answer: Any) -> None:
        """Answer one request; whatever it is, it is answered."""
        try:
            self._admit()
            answer(urlsplit(self.path).path)
        except _Refused as refused:
            log("refused", level="warning", problem=str(refused), path=self.path[:100])
            self._send(f"{refused}\n".encode(), status=refused.status)
        except StoreError as error:
            log("store_away", level="error", problem=str(error))
            self._send(b"the store cannot be reached now\n", status=503)
        except OSError:
            raise
        except Exception:  # noqa: BLE001 (a request must not end more than itself)
            log("bug", level="error", problem=traceback.format_exc())
            self._send(b"this could not be answered\n", status=500)

    def _admit(self) -> None:
        """Turn away who may not ask."""
        token, path = self.server.service.config.listen.token, urlsplit(self.path).path
        if token is None and not is_loopback(_host_of(self.headers.get("host", ""))):
            # A page of somebody else's, whose name was made to point to this machine.
            raise _Refused(421, "ask by the address of this machine: 127.0.0.1")
        # Probes have no token, and get nothing that is worth one.
        if token is None or path in {"/healthz", "/readyz"}:
            return
        if not hmac.compare_digest(_token(self.headers.get("authorization", "")), token.encode()):
            raise _Refused(401, "give the token as Bearer, or as a password")

    def _read(self, path: str) -> None:
        service = self.server.service
        if path == "/healthz":
            self._send(b"ok\n")
        elif path == "/readyz":
            if service.store_problems:
                raise _Refused(503, "the store cannot be reached now")
            self._send(b"ready\n")
        elif path == "/":
            self._send(service.page, kind=_HTML)
        elif path == "/metrics":
            self._send(service.metrics, kind=_METRICS)
        elif path == "/api":
            text = msgspec.json.encode(service.board).decode()
            self._send(mask_secrets(text).encode(), kind=_JSON)
        else:
            match = _CAPTURE.fullmatch(path)
            page = service.capture_page(int(match[1])) if match else None
            if page is None:
                raise _Refused(404, "there is nothing here")
            self._send(page.encode(), kind=_HTML)

    def _act(self, path: str) -> None:
        match = _ACTION.fullmatch(path)
        actions = {
            ("alerts", "acknowledge"): self.server.service.acknowledge,
            ("captures", "retry"): self.server.service.retry,
        }
        action = actions.get((match[1], match[3])) if match else None
        if match is None or action is None:
            raise _Refused(404, "alerts are acknowledged, captures tried again, and that is all")
        # A form of somebody else's page: browsers say where a request comes from.
        origin, site = self.headers.get("origin"), self.headers.get("sec-fetch-site", "none")
        foreign = origin is not None and origin.partition("://")[2] != self.headers.get("host")
        if foreign or site not in {"same-origin", "none"}:
            raise _Refused(403, "only this page's own forms are taken")
        if not action(int(match[2])):
            raise _Refused(404, "there is no such open alert, or failed capture")
        log("asked", path=path)
        self._send(b"", status=303)

    def _send(self, body: bytes, *, status: int = 200, kind: str = _TEXT) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status == HTTPStatus.SEE_OTHER:
            self.send_header("Location", "/")
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", 'Basic realm="debubble", charset="UTF-8"')
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _token(authorization: str) -> bytes:
    """Return the token: `Bearer TOKEN`, or the password that a browser asked for."""
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return value.strip().encode("utf-8", "replace") if kind.lower() == "bearer" else b""


def _host_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # such as "["
        return ""
