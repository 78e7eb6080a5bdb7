"""A request in → its answer, for those who may ask: HTTP/1.1 on asyncio, all of it limited.

Read-only but for two things: an alert is acknowledged, a capture that was given up is tried again.
h11 is the strict parser under uvicorn and httpx. Below a framework, the time that a client may take
for its request can be limited, which is what slow clients exploit.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import json
import re
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from debubble.annexes.watch.config import Config, Listen, is_loopback
from debubble.annexes.watch.journal import Journal
from debubble.annexes.watch.judge import Judge
from debubble.annexes.watch.metrics import Counts, write_metrics
from debubble.annexes.watch.page import STYLE_POLICY, capture_page, status_page
from debubble.annexes.watch.supervise import PATIENCE, Patience, log
from debubble.annexes.watch.views import SCHEMA, capture_view, whole_view
from debubble.errors import MissingExtra, StoreError, WatchError, mask_secrets

try:
    import h11
except ImportError as missing:
    raise MissingExtra("the service needs h11", hint="pip install 'debubble[watch]'") from missing

HEADER_BYTES = 16 * 1024
BODY_BYTES = 4 * 1024
CONNECTIONS = 512
_READ_BYTES = 16 * 1024

_ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asked."""

    method: str
    path: str
    headers: dict[str, str]
    query: str = ""
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What it gets."""

    status: int = 200
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    headers: dict[str, str] = field(default_factory=dict)


_Answering = Callable[[Request], Awaitable[Answer]]


class _Refused(Exception):
    """A request that is not read any further."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Server:
    """Listens where it was told to."""

    def __init__(self, answer: _Answering, listen: Listen, patience: Patience) -> None:
        self._answer = answer
        self._listen = listen
        self._patience = patience
        self._open: dict[asyncio.Task[None], None] = {}

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Accept connections until left; those that are open are then cut."""
        listen = self._listen
        try:
            server = await asyncio.start_server(
                self._accept, listen.host, listen.port, limit=HEADER_BYTES, backlog=CONNECTIONS
            )
        except OSError as error:
            raise WatchError(
                f"cannot listen on {listen.host}:{listen.port}: {error.strerror}",
                hint="set listen.address to one that is free",
            ) from error
        host, port = server.sockets[0].getsockname()[:2]
        try:
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        finally:
            server.close()
            for task in tuple(self._open):
                task.cancel()
            await asyncio.gather(*tuple(self._open), return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        if len(self._open) >= CONNECTIONS:  # whoever has been here longest has had its time
            next(iter(self._open)).cancel()
        self._open[task] = None
        try:
            await _Connection(reader, writer, self._answer, self._patience).serve()
        except (OSError, TimeoutError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass
        except Exception as error:  # noqa: BLE001 (one client must not fill the log with tracebacks)
            log("bug", level="error", problem=f"{type(error).__name__}: {error}")
        finally:
            self._open.pop(task, None)
            writer.close()
            with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(writer.wait_closed(), self._patience.answer_s)


class _Connection:
    """One client, and its one request."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: _Answering,
        patience: Patience,
    ) -> None:
        self._patience = patience
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES)

    async def serve(self) -> None:
        """Read the request and answer it."""
        try:
            request = await self._request()
        except _Refused as error:
            log("refused", level="warning", why=str(error), status=error.status)
            await self._send(Answer(status=error.status, body=f"{error}\n".encode()), "GET")
            return
        if request is not None:
            await self._send(await self._answer(request), request.method)

    async def _request(self) -> Request | None:
        """Read a request; None where none comes."""
        try:
            async with asyncio.timeout(self._patience.request_s):
                return await self._whole_request()
        except TimeoutError as error:
            raise _Refused(408, "the request took too long") from error
        except h11.RemoteProtocolError as error:
            raise _Refused(error.error_status_hint, str(error)) from error

    async def _whole_request(self) -> Request | None:
        head = await self._event()
        if not isinstance(head, h11.Request):
            return None
        headers: dict[str, str] = {}
        for name, value in head.headers:
            headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        body = b""
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                return None
            body += event.data
            if len(body) > BODY_BYTES:
                raise _Refused(413, "the body is too large")
        path, _, query = head.target.decode("latin-1").partition("?")
        return Request(
            method=head.method.decode("latin-1"),
            path=path,
            query=query,
            headers=headers,
            body=body,
        )

    async def _event(self) -> h11.Event | type[h11.PAUSED]:
        while (event := self._parser.next_event()) is h11.NEED_DATA:
            if self._parser.they_are_waiting_for_100_continue:
                await self._write(h11.InformationalResponse(status_code=100, headers=[]))
            self._parser.receive_data(await self._reader.read(_READ_BYTES))
        return event  # type: ignore[return-value]

    async def _send(self, answer: Answer, method: str) -> None:
        if self._parser.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            return
        headers = {
            **_ALWAYS,
            **answer.headers,
            "Content-Type": answer.kind,
            "Content-Length": str(len(answer.body)),
            "Connection": "close",
        }
        await self._write(
            h11.Response(status_code=answer.status, headers=list(headers.items())),
            *([h11.Data(data=answer.body)] if answer.body and method != "HEAD" else []),
            h11.EndOfMessage(),
        )

    async def _write(self, *events: h11.Event) -> None:
        for event in events:
            data = self._parser.send(event)
            if data:
                self._writer.write(data)
        async with asyncio.timeout(self._patience.answer_s):
            await self._writer.drain()


_HTML = "text/html; charset=utf-8"
_JSON = "application/json"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_PIPELINE = re.compile(r"/api/pipelines/([\w.-]{1,64})/(captures|trends)")
_CAPTURE = re.compile(r"(/api)?/pipelines/([\w.-]{1,64})/captures/(\d{1,9})")
_ACKNOWLEDGE = re.compile(r"(/api)?/alerts/(\d{1,9})/acknowledge")
_RETRY = re.compile(r"(/api)?/pipelines/([\w.-]{1,64})/captures/(\d{1,9})/retry")
# Say nothing that is worth a token, and are asked by those that have none.
_OPEN = frozenset({"/healthz", "/readyz"})
_POLICY = (
    f"default-src 'none'; style-src {STYLE_POLICY}; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)


class Routes:
    """Answers from what was last seen; only single captures are looked up."""

    def __init__(
        self,
        config: Config,
        journal: Journal,
        judge: Judge,
        counts: Counts,
        patience: Patience = PATIENCE,
    ) -> None:
        self._config = config
        self._check_s = patience.store_check_s
        self._journal = journal
        self._judge = judge
        self._counts = counts
        self._view: dict[str, Any] | None = None
        self._page = self._metrics = b""
        self.store_problem = ""
        """Why the store cannot be written now; nothing where it can."""
        self._checked_s = -patience.store_check_s

    def check_store(self) -> None:
        """Write something small into the store now and then: that it can be read is not enough."""
        if time.monotonic() - self._checked_s < self._check_s:
            return
        try:
            self._journal.check_writable(now_s=time.time())
            self.store_problem = ""
        except StoreError as error:
            self.store_problem = str(error)
            log("store_away", level="error", problem=self.store_problem)
        self._checked_s = time.monotonic()

    def refresh(self) -> None:
        """Look into the store, and lay out anew what is shown."""
        view = whole_view(self._config, self._journal, self._judge, self._counts.troubles())
        self._metrics = write_metrics(view, self._counts)
        self._page = status_page(view).encode()
        self._view = view

    async def answer(self, request: Request) -> Answer:
        """Answer one request; whatever it is, it is answered."""
        try:
            refusal = self._refuse(request) or _refuse_parameters(request)
            if refusal is not None:
                return refusal
            if request.method not in {"GET", "HEAD", "POST"}:
                return _problem(
                    405, "GET and HEAD, and POST to what can be done", Allow="GET, HEAD"
                )
            if request.method == "POST":
                return await self._write(request)
            return await self._read(request.path)
        except StoreError as error:
            log("store_away", level="error", problem=str(error))
            return _problem(503, "the store cannot be reached now")
        except Exception as error:  # noqa: BLE001 (a request must not end more than itself)
            log("bug", level="error", problem="".join(traceback.format_exception(error)))
            return _problem(500, "this could not be answered")

    def _refuse(self, request: Request) -> Answer | None:
        """Turn away who may not ask."""
        listen = self._config.listen
        host = request.headers.get("host", "")
        if listen.token is None and not is_loopback(_host_of(f"//{host}")):
            # A page of somebody else's, whose name was made to point to this machine.
            log("refused", level="warning", why="host", host=host[:100])
            return _problem(421, "ask by the address of this machine: 127.0.0.1")
        if request.path in _OPEN or listen.token is None:
            return None
        if hmac.compare_digest(_token(request).encode(), listen.token.encode()):
            return None
        log("refused", level="warning", why="token", path=request.path[:100])
        challenge = 'Basic realm="debubble", charset="UTF-8"'
        return _problem(
            401, "give the token as Bearer, or as a password", **{"WWW-Authenticate": challenge}
        )

    async def _read(self, path: str) -> Answer:
        if path == "/healthz":
            return Answer(body=b"ok\n")
        if self._view is None:
            return _problem(503, "not ready yet")
        if (match := _CAPTURE.fullmatch(path)) is not None:
            return await self._capture(match[2], int(match[3]), as_data=bool(match[1]))
        return self._seen(path, self._view) or _problem(404, "there is nothing here")

    def _seen(self, path: str, view: dict[str, Any]) -> Answer | None:
        """Answer from what was last seen."""
        if path == "/readyz":
            problem = self.store_problem and "the store cannot be written now"
            return _problem(503, problem) if problem else Answer(body=b"ready\n")
        if path == "/metrics":
            return Answer(body=self._metrics, kind=_METRICS)
        if path == "/":
            return _page(self._page)
        data = {}
        if path == "/api/alerts":
            data = {"alerts": view["alerts"]}
        elif path == "/api/pipelines":
            keys = ("name", "captures", "troubles", "given_up", "latest", "drift")
            shown = [{key: pipeline[key] for key in keys} for pipeline in view["pipelines"]]
            data = {"pipelines": shown}
        elif (match := _PIPELINE.fullmatch(path)) is not None:
            key = "recent" if match[2] == "captures" else "trends"
            for pipeline in view["pipelines"]:
                if pipeline["name"] == match[1]:
                    data = {match[2]: pipeline[key]}
        return _data(data) if data else None

    async def _capture(self, name: str, number: int, *, as_data: bool) -> Answer:
        row = await asyncio.to_thread(self._journal.capture, name, number)
        if row is None:
            return _problem(404, "there is no such capture")
        data = capture_view(row, whole=True)
        return _data({"capture": data}) if as_data else _page(capture_page(name, data).encode())

    async def _write(self, request: Request) -> Answer:
        acknowledge = _ACKNOWLEDGE.fullmatch(request.path)
        retry = _RETRY.fullmatch(request.path)
        if acknowledge is None and retry is None:
            return _problem(404, "alerts are acknowledged, captures tried again, and that is all")
        if _is_cross_site(request):
            log("refused", level="warning", why="cross-site")
            return _problem(403, "only this page's own forms are taken")
        if acknowledge is not None:
            number = int(acknowledge[2])
            if not await asyncio.to_thread(self._acknowledge, number):
                return _problem(404, "there is no such open alert")
            done = {"acknowledged": number}
        elif retry is not None:
            number = int(retry[3])
            if not await asyncio.to_thread(self._retry, retry[2], number):
                return _problem(404, "there is no such capture that was given up")
            done = {"retried": number}
        log("asked", done=done)
        if request.path.startswith("/api/"):
            return _data(done)
        return Answer(status=303, headers={"Location": "/"})

    def _retry(self, name: str, number: int) -> bool:
        done = bool(self._journal.retry([name], number))
        if done:
            self.refresh()
        return done

    def _acknowledge(self, number: int) -> bool:
        done = self._journal.acknowledge(number, now_s=time.time(), follow=self._judge.accept)
        if done:
            self.refresh()
        return done


def _refuse_parameters(request: Request) -> Answer | None:
    if not (request.query and request.path.startswith("/api/")):
        return None
    return _problem(400, "nothing here takes parameters: leave out what follows the ?")


def _token(request: Request) -> str:
    """Return the token of a request: `Bearer TOKEN`, or the password that a browser asked for."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def _host_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:  # such as "["
        return ""


def _is_cross_site(request: Request) -> bool:
    """Tell a form of somebody else's page: browsers say where a request comes from."""
    site = request.headers.get("sec-fetch-site", "same-origin")
    origin = request.headers.get("origin")
    foreign = origin is not None and origin.partition("://")[2] != request.headers.get("host")
    return site not in {"same-origin", "none"} or foreign


def _page(body: bytes) -> Answer:
    return Answer(body=body, kind=_HTML, headers={"Content-Security-Policy": _POLICY})


def _data(data: dict[str, Any]) -> Answer:
    text = json.dumps({"schema": SCHEMA, **data}, allow_nan=False)
    return Answer(body=mask_secrets(text).encode() + b"\n", kind=_JSON)


def _problem(status: int, words: str, **headers: str) -> Answer:
    return Answer(status=status, body=f"{words}\n".encode(), headers=headers)
