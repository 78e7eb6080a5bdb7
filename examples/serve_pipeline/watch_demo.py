"""A server whose traffic shifts from 512 to 2048 tokens, watched: `python watch_demo.py`.

Starts the pipelined server, clients, and `debubble watch`, which captures the server again and
again. Once the reference is gathered the requests get longer, and the service says what happened.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REFERENCE = 10

CONFIG = """
store = "sqlite:///{folder}/history.db"
[listen]
address = "127.0.0.1:{port}"
[drift]
reference = {reference}
[[source]]
name = "chat"
folder = "{folder}/traces"
settle = "0s"
poll = "200ms"
keep = 5
[source.server]
url = "{server}"
kind = "vllm"
every = "500ms"
seconds = "500ms"
"""


@contextmanager
def running(*words: str, log: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Run one of the parts; end it with the demo."""
    part = subprocess.Popen(  # noqa: S603 (our own parts)
        [sys.executable, *words],
        text=True,
        stdout=subprocess.DEVNULL if log else subprocess.PIPE,
        stderr=subprocess.PIPE if log else subprocess.DEVNULL,
    )
    try:
        yield part
    finally:
        part.terminate()
        part.communicate()


def say(words: str) -> None:
    """Print at once."""
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def load(server: str, tokens: int) -> list[str]:
    """Return the words that start clients; their answers are of one token."""
    return [str(HERE / "load.py"), server, "clients=2", f"prompt={tokens}", "output=1",
            "seconds=3600"]  # fmt: skip


def events(watch: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """Yield what the service logs."""
    for line in watch.stderr or ():
        if line.startswith("{"):
            yield json.loads(line)


def main() -> None:
    """Watch traffic shift."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=9464, help="of the status page")
    parser.add_argument("--stay", action="store_true", help="go on until interrupted")
    given = parser.parse_args()
    # Ended either way, it takes its parts with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        watch_shift(given.port, stay=given.stay)


def watch_shift(port: int, *, stay: bool) -> None:
    """Start all parts, and end them."""
    with ExitStack() as parts:
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="watch-demo-")))
        traces = folder / "traces"
        traces.mkdir()
        words = [str(HERE / "serve.py"), "--folder", str(traces), "--port", "0", "--layers", "1,1",
                 "--chunk", "4096"]  # fmt: skip
        serving = parts.enter_context(running(*words))
        server = (serving.stdout.readline() if serving.stdout else "").split()[-1]
        config = folder / "watch.toml"
        config.write_text(
            CONFIG.format(folder=folder, port=port, reference=REFERENCE, server=server)
        )
        words = ["-m", "debubble", "watch", "--config", str(config)]
        watch = parts.enter_context(running(*words, log=True))
        shift(server, watch, stay=stay)


def shift(server: str, watch: subprocess.Popen[str], *, stay: bool) -> None:
    """Let requests of 512 tokens come, and of 2048 once these are known."""
    analysed = 0
    with ExitStack() as clients:
        clients.enter_context(running(*load(server, 512)))
        for event in events(watch):
            if event["event"] == "started":
                say(f"requests of 512 tokens; the page is {event['url']}")
            analysed += event["event"] == "analysed"
            if event["event"] == "analysed":
                say(f"capture {analysed}")
            if event["event"] == "analysed" and analysed == REFERENCE + 2:
                clients.close()
                clients.enter_context(running(*load(server, 2048)))
                say("from now on requests of 2048 tokens")
            if event["event"] == "alert":
                say(f"alert: {event['message']}")
                if event["kind"] == "traffic_moved" and not stay:
                    return


if __name__ == "__main__":
    main()
