"""A small pipelined inference server: `python serve.py --kind vllm --folder traces`.

Real processes, one a stage, that pass real tensors over gloo; routes as vLLM and SGLang have them.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from engine import Engine
from metrics import Metrics

LONGEST_PROMPT = 8192


class Routes(BaseHTTPRequestHandler):
    """Completions, profiling and metrics."""

    protocol_version = "HTTP/1.1"
    engine: Engine
    metrics: Metrics
    kind: str

    def do_GET(self) -> None:
        """Say how it goes."""
        if self.path == "/health":
            self._answer(200)
        elif self.path == "/metrics":
            self._answer(200, self.metrics.text().encode(), "text/plain; version=0.0.4")
        else:
            self._answer(404)

    def do_POST(self) -> None:
        """Serve a request, or profile."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            data = json.loads(body) if body else {}
        except ValueError:
            self._answer(400, b"the body is no JSON")
            return
        route = {
            "/v1/completions": self._complete,
            "/start_profile": self._start_profile,
            "/stop_profile": self._stop_profile,
        }.get(self.path)
        if route is None:
            self._answer(404)
        else:
            route(data)

    def _complete(self, data: dict[str, Any]) -> None:
        """Take a prompt of words, or of token numbers; a word is a token."""
        prompt = data.get("prompt", "")
        tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        if not 0 < tokens <= LONGEST_PROMPT:
            self._answer(400, b"the prompt needs 1 to 8192 tokens")
            return
        self.metrics.begin()
        self.engine.complete(tokens)
        self.metrics.add(tokens)
        usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
        self._answer_json({"object": "text_completion", "choices": [{"text": "."}], "usage": usage})

    def _start_profile(self, data: dict[str, Any]) -> None:
        """Begin; SGLang is told here where to and for how long, vLLM was told at its start."""
        if self.kind == "sglang":
            self.engine.start_profile(data.get("num_steps"), data.get("output_dir"))
        else:
            self.engine.start_profile()
        self._answer(200, b"Start profiling.\n")

    def _stop_profile(self, _data: dict[str, Any]) -> None:
        self.engine.stop_profile()
        self._answer(200, b"Stop profiling. This will take some time.\n")

    def _answer_json(self, data: dict[str, Any]) -> None:
        self._answer(200, json.dumps(data).encode(), "application/json")

    def _answer(self, code: int, text: bytes = b"", kind: str = "text/plain") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Say nothing: a line a request is too much."""


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--folder", type=Path, default=Path("traces"), help="for traces")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2, help="of each stage")
    given = parser.parse_args()
    Routes.kind, Routes.metrics = given.kind, Metrics()
    Routes.engine = Engine(ranks=given.ranks, layers=given.layers, folder=given.folder.resolve())
    Routes.engine.complete(1)  # not before the pipeline has answered once
    server = ThreadingHTTPServer(("127.0.0.1", given.port), Routes)
    server.daemon_threads = True
    sys.stdout.write(f"serving on http://127.0.0.1:{server.server_port}\n")
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        Routes.engine.close()


if __name__ == "__main__":
    main()
