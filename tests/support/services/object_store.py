"""A real S3 server on loopback, and a proxy before it that counts, and cuts answers halfway."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


class Handler(BaseHTTPRequestHandler):
    """Passes a request on, and its answer back: whole, or cut."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self):
        self.server.before(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        behind = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=30)
        behind.request(self.command, self.path, body=body, headers=dict(self.headers))
        with behind.getresponse() as answer:
            content = answer.read()
        behind.close()
        self.send_response(answer.status)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(content)
        for name, value in answer.getheaders():
            if name.lower() not in {"content-length", "transfer-encoding", "connection", "date"}:
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD":
            return
        handed_out = content[: len(content) // 2] if self.server.cuts(self.path) else content
        self.server.note(self.path, len(handed_out))
        self.wfile.write(handed_out)
        if len(handed_out) < len(content):
            self.close_connection = True

    do_HEAD = do_GET  # noqa: N815 (the name is http.server's)

    def log_message(self, *_):
        pass


class Proxy(ThreadingHTTPServer):
    """Stands before the server, so that what goes over the wire is known and can be cut."""

    daemon_threads = True

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = upstream
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Begin to count anew, and cut nothing."""
        self.bytes_out: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self._cuts: dict[str, int] = {}
        self._spared: dict[str, int] = {}
        self.on_request = lambda _key: None

    def cut(self, key: str, *, times: int, spare: int = 0) -> None:
        """Cut so many answers about an object, after some that are whole."""
        self._cuts[key] = times
        self._spared[key] = spare

    def cuts(self, path: str) -> bool:
        """Tell whether this answer is to be cut."""
        key = _key(path)
        with self._lock:
            if self._spared.get(key, 0) > 0:
                self._spared[key] -= 1
                return False
            if self._cuts.get(key, 0) <= 0:
                return False
            self._cuts[key] -= 1
            return True

    def before(self, path: str) -> None:
        """Let a test do something before an answer is fetched."""
        self.on_request(_key(path))

    def note(self, path: str, size: int) -> None:
        """Count what was handed out."""
        with self._lock:
            self.requests[_key(path)] += 1
            self.bytes_out[_key(path)] += size


def _key(path: str) -> str:
    return path.partition("?")[0].strip("/").partition("/")[2]


class Store:
    """A bucket of the server, filled past the proxy and read through it."""

    def __init__(self, port: int, proxy: Proxy) -> None:
        self.port = port
        self.proxy = proxy
        self._client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",  # noqa: S106
        )
        self._client.create_bucket(Bucket="bucket")

    def put(self, key: str, content: bytes | dict[str, Any]) -> str:
        """Write an object; return its URL."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self._client.put_object(Bucket="bucket", Key=key, Body=body)
        return f"s3://bucket/{key}"

    def put_folder(self, folder: Path, prefix: str) -> str:
        """Write all files of a folder under a prefix; return its URL."""
        for file in sorted(folder.iterdir()):
            self.put(f"{prefix}/{file.name}", file.read_bytes())
        return f"s3://bucket/{prefix}"

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs to find the store."""
        region = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": self.proxy.url}
        return CREDENTIALS | region


@contextmanager
def started_store() -> Iterator[Store]:
    """Lend a store: moto's server in a process of its own, the proxy in a thread of this one."""
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        env=os.environ | CREDENTIALS,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        port = _port_of(server)
        threading.Thread(target=server.stderr.read, daemon=True).start()
        with Proxy(port) as proxy:
            serving = threading.Thread(target=proxy.serve_forever, daemon=True)
            serving.start()
            yield Store(port, proxy)
            proxy.shutdown()
            serving.join()
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def _port_of(server: subprocess.Popen[bytes]) -> int:
    for line in server.stderr:
        found = re.search(rb"Running on http://127\.0\.0\.1:(\d+)", line)
        if found:
            return int(found[1])
    raise AssertionError("moto's server did not start")
