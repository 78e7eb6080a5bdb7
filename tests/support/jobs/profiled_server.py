"""A real HTTP server with a real model and profiler: `profiled_server.py FOLDER`."""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

FOLDER = Path(sys.argv[1])
FEW_MS = 0.005


class Engine(threading.Thread):
    """Runs the model all the time, and the profiler when it is told to; one thread has both."""

    def __init__(self):
        super().__init__(daemon=True)
        self.wanted = None
        self.stopping = threading.Event()
        self.idle = threading.Event()
        self.idle.set()

    def run(self):
        model = torch.nn.Linear(16, 16)
        while True:
            wanted, self.wanted = self.wanted, None
            if wanted is None:
                self._infer(model)
                continue
            steps = wanted.get("num_steps")
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU],
                record_shapes=wanted.get("record_shapes", False),
            ) as profiler:
                self._infer(model)
                while steps is None and not self.stopping.is_set():
                    self._infer(model)
                for _ in range((steps or 1) - 1):
                    if self.stopping.is_set():
                        break
                    self._infer(model)
            folder = Path(wanted.get("output_dir", FOLDER))
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"{time.time()}-TP-0.trace.json.gz"))
            self.idle.set()

    def _infer(self, model):
        model(torch.ones(4, 16))
        time.sleep(FEW_MS)


ENGINE = Engine()


class Routes(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path not in {"/start_profile", "/stop_profile"}:
            self._answer(404)
        elif self.path == "/start_profile":
            ENGINE.stopping.clear()
            ENGINE.idle.clear()
            ENGINE.wanted = json.loads(body) if body else {}
            self._answer(200)
        else:
            ENGINE.stopping.set()
            ENGINE.idle.wait()
            self._answer(200)

    def _answer(self, code):
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        """Say nothing: stdout is for the port."""


if __name__ == "__main__":
    torch.set_num_threads(1)
    ENGINE.start()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    server.daemon_threads = True
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
