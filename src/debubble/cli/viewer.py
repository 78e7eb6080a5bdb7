"""A trace on this machine in → shown in the browser, by ui.perfetto.dev.

That page opens traces from one address of the machine it is looked at on, and no other: port 9001
of 127.0.0.1. Nothing is uploaded: the page's script fetches the file from here. It is given once,
to that page alone, under a name nobody can guess.
"""

from __future__ import annotations

import secrets
import time
import webbrowser
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from shutil import copyfileobj
from urllib.parse import quote

from debubble.errors import UsageError

VIEWER = "https://ui.perfetto.dev"
ADDRESS, PORT = "127.0.0.1", 9001
# Who has not looked by then has no browser here; large traces take a while to be fetched, not to be
# asked for.
PATIENCE_S = 60.0
_LOOK_S = 0.5


class _Offer(HTTPServer):
    """A server of one file."""

    allow_reuse_address = True

    def __init__(self, file: Path, port: int) -> None:
        super().__init__((ADDRESS, port), _Answer)
        self.file = file
        self.path = f"/{secrets.token_urlsafe(16)}/{quote(file.name)}"
        self.given = False
        self.timeout = _LOOK_S

    @property
    def url(self) -> str:
        """Where the viewer is to look."""
        here = f"http://{ADDRESS}:{self.server_port}{self.path}"
        return f"{VIEWER}/#!/?url={quote(here, safe='')}"


class _Answer(BaseHTTPRequestHandler):
    """Gives the file to the viewer, and to nobody else."""

    server: _Offer
    timeout = 30

    def do_GET(self) -> None:
        """Send the file."""
        if not self._is_meant():
            return
        self.send_response(200)
        self._allow()
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(self.server.file.stat().st_size))
        self.end_headers()
        with self.server.file.open("rb") as trace:
            copyfileobj(trace, self.wfile)
        self.server.given = True

    def do_OPTIONS(self) -> None:
        """Tell a browser that asks first that the viewer may ask."""
        if self._is_meant():
            self.send_response(204)
            self._allow()
            self.send_header("Access-Control-Allow-Private-Network", "true")
            self.end_headers()

    def _is_meant(self) -> bool:
        """Refuse other names of this machine, other pages, and other files."""
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin", VIEWER)
        meant = host == f"{ADDRESS}:{self.server.server_port}" and origin == VIEWER
        if not (meant and secrets.compare_digest(self.path, self.server.path)):
            self.send_error(404)
            return False
        return True

    def _allow(self) -> None:
        self.send_header("Access-Control-Allow-Origin", VIEWER)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Vary", "Origin")

    def log_message(self, *_: object) -> None:
        """Print nothing: stderr is for people."""


def open_trace(
    file: Path,
    say: Callable[[str], None],
    *,
    port: int = PORT,
    browse: Callable[[str], bool] = webbrowser.open,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Show a trace in the user's browser; return whether it was fetched before patience ended."""
    try:
        offer = _Offer(file, port)
    except OSError as error:
        raise UsageError(
            f"port {port} of {ADDRESS} cannot be had: {error.strerror}",
            hint=f"the viewer asks at no other; open {file} in {VIEWER} yourself",
        ) from error
    with offer:
        if not browse(offer.url):
            say(f"no browser here; open {offer.url}")
        end = clock() + PATIENCE_S
        while not offer.given and clock() < end:
            offer.handle_request()
        return offer.given
