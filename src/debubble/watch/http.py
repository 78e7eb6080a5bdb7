"""Requests in → answers out: HTTP/1.1 on asyncio, parsed by h11, with a limit on everything.

h11 is the strict parser under uvicorn and httpx. Below a framework, the time that a client may take
for its request can be limited, which is what slow clients exploit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from debubble.errors import MissingExtra, WatchError
from debubble.watch.config import Listen
from debubble.watch.log import log

try:
    import h11
except ImportError as missing:
    raise MissingExtra("the service needs h11", hint="pip install 'debubble[watch]'") from missing

HEADER_BYTES = 16 * 1024
BODY_BYTES = 4 * 1024
CONNECTIONS = 512
# From the first byte of a request to its last; then for the client to take the answer.
REQUEST_S = 5.0
ANSWER_S = 10.0
# Between two requests of one connection: longer than Prometheus' scrapes are apart by default.
# Who has not asked anything yet, or is waited for while all places are taken, has less.
IDLE_S = 75.0
FIRST_S = 10.0
_READ_BYTES = 16 * 1024
_REFUSED = 400

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

    def __init__(self, answer: _Answering, listen: Listen) -> None:
        self._answer = answer
        self._listen = listen
        self._open: dict[asyncio.Task[None], _Connection] = {}

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
        connection = self._open[task] = _Connection(reader, writer, self._answer)
        try:
            if len(self._open) > CONNECTIONS and not self._make_place(task):
                log("refused", level="warning", why="too many connections")
                return
            await connection.serve()
        except (OSError, TimeoutError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open.pop(task, None)
            writer.close()
            with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(writer.wait_closed(), ANSWER_S)

    def _make_place(self, newcomer: asyncio.Task[None]) -> bool:
        """Cut who asks nothing, the silent before those that asked once, the oldest first."""
        silent = [
            (connection.served, number, task)
            for number, (task, connection) in enumerate(self._open.items())
            if connection.is_silent and task is not newcomer
        ]
        if not silent:
            return False
        _, _, task = min(silent, key=lambda known: known[:2])
        self._open.pop(task)
        task.cancel()
        return True


class _Connection:
    """One client."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: _Answering
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES)
        self.served = 0
        """Requests that were granted."""
        self.is_silent = True
        """Whether nothing that it asked is being answered: it could be cut."""

    async def serve(self) -> None:
        """Answer one request after the other, until one side has had enough."""
        while True:
            try:
                request = await self._request()
            except _Refused as error:
                log("refused", level="warning", why=str(error), status=error.status)
                await self._send(Answer(status=error.status, body=f"{error}\n".encode()), "GET")
                return
            if request is None:
                return
            self.is_silent = False
            answer = await self._answer(request)
            self.served += answer.status < _REFUSED
            await self._send(answer, request.method)
            if self._parser.our_state is not h11.DONE or self._parser.their_state is not h11.DONE:
                return
            self._parser.start_next_cycle()
            self.is_silent = True

    async def _request(self) -> Request | None:
        """Read a request; None at the end of the connection."""
        if not self._parser.trailing_data[0]:
            async with asyncio.timeout(IDLE_S if self.served else FIRST_S):
                first = await self._reader.read(_READ_BYTES)
            self._parser.receive_data(first)
        try:
            async with asyncio.timeout(REQUEST_S):
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
        return Request(
            method=head.method.decode("latin-1"),
            path=head.target.decode("latin-1").partition("?")[0],
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
        async with asyncio.timeout(ANSWER_S):
            await self._writer.drain()
