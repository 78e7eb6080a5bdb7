"""A server that starts at once: `tiny_server.py PORT IN_FLIGHT CHUNK [WAY]`.

A token takes 8 ms over the batches in flight, up to 4 of them; with a process beside it, in a
session of its own. WAY: `crash` ends it at its start, `deaf` lets it answer nobody, `dies` ends it
under load, `refuses` lets it answer no request.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, IN_FLIGHT, CHUNK, WAY = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
TOKEN_S = 0.008 / min(IN_FLIGHT, 4) + (0.002 if CHUNK < 64 else 0.0)


class Routes(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer(json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if WAY == ["dies"]:
            os._exit(3)
        if WAY == ["refuses"]:
            self.send_error(503, "too busy")
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(body["max_tokens"]):
            time.sleep(TOKEN_S)
            event = b'data: {"choices": [{"text": " x"}]}\n\n'
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.wfile.write(b"0\r\n\r\n")

    def _answer(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    if WAY == ["crash"]:
        sys.exit("no room for the model")
    subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    if WAY == ["deaf"]:
        time.sleep(600)
    ThreadingHTTPServer(("127.0.0.1", PORT), Routes).serve_forever()
