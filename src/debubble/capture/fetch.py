"""An address in → its answer, or one kind of error: whatever is at the other end.

Every answer has a limit of time and of size. A page that moved is followed on the same origin
alone. No proxy is asked: the address that was given is the only one that is reached.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, IncompleteRead
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from debubble.errors import CaptureError
from debubble.units import printable

# Whoever has begun to answer ends by then: a drip is no answer.
ANSWER_S = 10.0
# A server that runs begins to answer in milliseconds; the largest answer is a page of metrics.
PATIENCE_S = 5.0
MAX_BYTES = 16 * 1024**2


class NoAnswer(CaptureError):
    """Nothing came that is an answer; `late` where it was waited for in vain."""

    late = False


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


class _SameOrigin(HTTPRedirectHandler):
    """Follows pages on their own origin; what changes something is asked of one address alone."""

    def redirect_request(  # noqa: PLR0913, PLR0917 (as urllib has it)
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        """Return the request to make instead; None to take the redirect for the answer."""
        if req.get_method() != "GET" or urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def http_error_302(self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any) -> Any:
        """Follow a page; let go of its answer where that does not end, or leads nowhere."""
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        except (HTTPException, TimeoutError, ValueError):
            fp.close()
            raise

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


_OPENER = build_opener(ProxyHandler({}), _SameOrigin())


def fetch(
    url: str,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    patience_s: float = PATIENCE_S,
) -> Reply:
    """Get a page, or post a body; raise `NoAnswer` where there is no answer, and nothing else.

    `patience_s` is for the answer's beginning; then it has `ANSWER_S`.
    """
    try:
        request = Request(url, data=body, headers=dict(headers or {}))  # noqa: S310 (checked next)
        if request.type not in {"http", "https"} or not request.host:
            raise ValueError("this is no address of a server")  # noqa: TRY301 (told as others are)
        try:
            response = _OPENER.open(request, timeout=patience_s)
        except HTTPError as refusal:
            response = refusal
        with response:
            return Reply(
                status=response.status, reason=_short(response.reason), body=_read(response)
            )
    except (OSError, HTTPException, ValueError) as error:
        cause = getattr(error, "reason", None) or error
        late = isinstance(cause, TimeoutError)
        problem = f"no answer within {patience_s:g} s" if late else _short(str(cause))
        no_answer = NoAnswer(f"{url}: {problem or type(error).__name__}")
        no_answer.late = late
        raise no_answer from error


def _read(response: Any) -> bytes:
    """Read an answer to its end."""
    until, body = time.monotonic() + ANSWER_S, b""
    while piece := response.read1(1 << 16):
        body += piece
        if len(body) > MAX_BYTES:
            raise ValueError(f"its answer is longer than {MAX_BYTES} bytes")
        if time.monotonic() > until:
            raise TimeoutError
    if response.length:
        raise IncompleteRead(body, response.length)
    return body


def _short(text: str) -> str:
    """Show what a stranger's answer says, and cut what it made long."""
    text = printable(text)
    return text if len(text) <= 200 else f"{text[:200]}…"
