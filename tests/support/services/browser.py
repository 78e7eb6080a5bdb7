"""A real browser for tests: Chromium without a window, driven over its DevTools protocol.

The protocol goes over two pipes, so that neither a port nor another package is needed.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PATIENCE_S = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)


class BrowserError(Exception):
    """The browser refused a command, or did not answer."""


class Page:
    """One page, with all that it complained of and asked for."""

    def __init__(self, into: int, out: int) -> None:
        self._into, self._out, self._rest = into, out, b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(1400, 900)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._out], [], [], max(0, deadline - time.monotonic()))
            piece = os.read(self._out, 1 << 20) if ready else b""
            if not piece:
                raise BrowserError("no answer from the browser")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def resize(self, width: int, height: int, ratio: float = 1.0) -> None:
        """Make the window so large, with so many device pixels for one of CSS."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=ratio,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """Let the system be light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.settle()

    def open(self, file: Path) -> None:
        """Load a file, and wait until it is drawn."""
        self.events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.evaluate(
            "new Promise(done => document.readyState === 'complete' ? done()"
            " : addEventListener('load', done))"
        )
        self.settle()

    def settle(self) -> None:
        """Wait until two frames were drawn."""
        self.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def evaluate(self, script: str) -> Any:
        """Run a script in the page, and return what it comes to."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move, press, release or turn the wheel of the mouse."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(
        self, begin: tuple[float, float], end: tuple[float, float], modifiers: int = 0
    ) -> None:
        """Press, move and release."""
        held = {"button": "left", "buttons": 1, "modifiers": modifiers}
        self.mouse("mousePressed", *begin, clickCount=1, **held)
        self.mouse("mouseMoved", *end, **held)
        self.mouse("mouseReleased", *end, clickCount=1, **held)
        self.settle()

    def picture(self, *, whole: bool = False) -> bytes:
        """Return what is seen, or the whole page, as PNG."""
        more: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            more = {"captureBeyondViewport": True, "clip": clip}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"])

    def complaints(self) -> list[str]:
        """Return errors and warnings: of scripts, of the policy, of the console."""
        self.settle()
        found = []
        for event in self.events:
            method, said = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(said["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled":
                found.append(str(said["args"]))
            elif method == "Log.entryAdded":
                found.append(said["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Return every address that was asked for, the file itself among them."""
        self.settle()
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]


def find_chromium() -> str | None:
    """Return where the browser is now: it may be installed while tests run."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """Start a browser that keeps its files in a folder; it is gone afterwards."""
    chromium = find_chromium()
    if chromium is None:
        raise BrowserError("there is no chromium")
    theirs_in, into = os.pipe()
    out, theirs_out = os.pipe()
    # The browser reads its commands from descriptor 3 and answers on descriptor 4.
    words = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", chromium, *_FLAGS]
    started = subprocess.Popen(
        [*words, f"--user-data-dir={folder}"],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(folder)},
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(into, out)
    finally:
        os.close(into)
        os.close(out)
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
