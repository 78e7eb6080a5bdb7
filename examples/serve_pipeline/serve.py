"""A small pipelined inference server: `python serve.py --kind vllm --folder traces`.

Real processes, one a stage, that pass real tensors over gloo; routes as vLLM and SGLang have them.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from engine import Engine, Request
from metrics import Metrics
from orders import Layout

MODEL = "serve_pipeline"
# As OpenAI's route has it.
_ANSWERED = 16


class Routes(BaseHTTPRequestHandler):
    """Completions, profiling and metrics."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    engine: Engine
    kind: str

    def do_GET(self) -> None:
        """Say how it goes."""
        if self.path == "/health":
            self._answer(200)
        elif self.path == "/metrics":
            self._answer(200, self.engine.metrics.text().encode(), "text/plain; version=0.0.4")
        elif self.path == "/v1/models":
            self._answer_json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
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
        routes: dict[str, Callable[[dict[str, Any]], None]] = {
            "/v1/completions": self._complete,
            "/start_profile": self._start_profile,
            "/stop_profile": self._stop_profile,
        }
        if self.path in routes:
            routes[self.path](data)
        else:
            self._answer(404)

    def _complete(self, data: dict[str, Any]) -> None:
        """Take a prompt of words, or of token numbers; a word is a token."""
        prompt = data.get("prompt", "")
        words = [len(word) for word in prompt.split()] if isinstance(prompt, str) else prompt
        wanted, longest = data.get("max_tokens", _ANSWERED), self.engine.layout.longest
        if not (words and wanted > 0 and len(words) + wanted <= longest):
            said = f"a prompt and its answer need 1 token each, and have {longest} at most"
            self._answer(400, said.encode())
            return
        request = self.engine.complete(tuple(int(word) % 256 for word in words), wanted)
        if data.get("stream"):
            self._stream(request)
            return
        text = "".join(f" {token}" for token in request.words())
        self._answer_json(_completion(text, "length") | {"usage": _usage(request)})

    def _stream(self, request: Request) -> None:
        """Send each token as it comes, as server-sent events."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for token in request.words():
                self._send_event(json.dumps(_completion(f" {token}", None)))
            last = {**_completion("", "length"), "choices": [], "usage": _usage(request)}
            self._send_event(json.dumps(last))
            self._send_event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:  # whoever asked went away
            self.close_connection = True

    def _send_event(self, text: str) -> None:
        event = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))

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


class Server(ThreadingHTTPServer):
    """One thread a connection, and room for many that come at once."""

    daemon_threads = True
    request_queue_size = 256


def _completion(text: str, ended: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": ended}
    return {"object": "text_completion", "model": MODEL, "choices": [choice]}


def _usage(request: Request) -> dict[str, int]:
    counts = {"prompt_tokens": len(request.prompt), "completion_tokens": len(request.answer)}
    return counts | {"total_tokens": sum(counts.values())}


def read_words() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--folder", type=Path, default=Path("traces"), help="for traces")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    parser.add_argument("--layers", default="2,2", help="of each stage, such as 3,3,3,7")
    parser.add_argument("--in-flight", type=int, help="batches; as many as stages without")
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a prompt in a batch")
    parser.add_argument("--requests", type=int, default=8, help="most requests in a batch")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of prompt and answer")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument(
        "--layer-us", type=int, default=0, help="a layer takes so long at least, and …"
    )
    parser.add_argument("--token-us", type=int, default=0, help="… so much longer a token")
    parser.add_argument("--labels", action="store_true", help="name batches as vLLM does")
    parser.add_argument("--log", type=Path, help="write a line of JSON for each batch")
    return parser.parse_args()


def main() -> None:
    """Serve until interrupted."""
    given = read_words()
    layers = tuple(int(count) for count in given.layers.split(","))
    layout = Layout(
        layers=layers,
        slots=given.in_flight or len(layers),
        seats=given.requests,
        longest=given.longest,
        width=given.width,
        layer_us=given.layer_us,
        token_us=given.token_us,
        labels=given.labels,
        store="",
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    engine = Engine(layout, chunk=given.chunk, folder=given.folder.resolve(), log=given.log)
    try:
        list(engine.complete((1,), 1).words())  # not before the pipeline has answered once
        engine.metrics = Metrics()  # which is nobody's request
        Routes.kind, Routes.engine = given.kind, engine
        server = Server(("127.0.0.1", given.port), Routes)
        sys.stdout.write(f"serving on http://127.0.0.1:{server.server_port}\n")
        sys.stdout.flush()
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        engine.close()


if __name__ == "__main__":
    main()
