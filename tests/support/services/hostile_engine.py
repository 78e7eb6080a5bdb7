"""Engines that answer badly, each in its own way, to whatever they are asked."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

OK = b"HTTP/1.1 200 OK\r\n"
HISTOGRAM = 'vllm:request_prompt_tokens_bucket{{le="{}"}} {}\n'


def page(text):
    return OK + b"Content-Length: %d\r\n\r\n" % len(text.encode()) + text.encode()


def moved(where, status=b"302 Found"):
    return b"HTTP/1.1 " + status + b"\r\nLocation: " + where + b"\r\nContent-Length: 0\r\n\r\n"


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
WAITING = "vllm:num_requests_waiting 1e999\n"
ANSWERS = {
    "not HTTP": b"\x00\x01\x02SSH-2.0-OpenSSH_9.6\r\n",
    "nothing at all": b"",
    "cut in its body": OK + b"Content-Length: 1000\r\n\r\nvllm:num",
    "cut in its headers": OK + b"Content-Le",
    "a chunk of no size": CHUNKED + b"xyz\r\nhello\r\n",
    "a chunk of a negative size": CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    "cut in a chunk": CHUNKED + b"ff\r\nhello",
    "a long status line": b"HTTP/1.1 200 " + b"O" * 200_000 + b"\r\n\r\n",
    "a thousand headers": OK + b"".join(b"X-%d: y\r\n" % n for n in range(1000)) + b"\r\n",
    "a length that is no number": OK + b"Content-Length: many\r\n\r\nvllm:x 1\n",
    "a redirect to no address": moved(b"http://["),
    "a redirect to a file": moved(b"file:///etc/passwd"),
    "a redirect to somebody else": moved(b"http://127.0.0.1:1/metrics", b"307 Moved"),
    "a redirect in circles": moved(b"/metrics", b"308 Moved"),
    "a bound of 1e308": page(HISTOGRAM.format("1e308", 5) + HISTOGRAM.format("+Inf", 9)),
    "counts below nothing": page(HISTOGRAM.format("-inf", "-inf") + HISTOGRAM.format("8", "-3")),
    "figures beyond all": page(WAITING + HISTOGRAM.format("inf", 1e999)),
    "no UTF-8": OK + b'\r\nvllm:request_prompt_tokens_bucket{le="\xff\xfe"} \xff\n',
    "without an end": OK + b"\r\n",
    "a byte a second": OK + b"Content-Length: 100000\r\n\r\n",
}  # fmt: skip


class Engine:
    """One of them."""

    def __init__(self, answer):
        self.asked = 0
        self.url = ""
        self._answer = answer
        self._over = threading.Event()

    def serve(self, listener):
        while True:
            try:
                client = listener.accept()[0]
            except OSError:
                return
            self.asked += 1
            threading.Thread(target=self.talk, args=(client,), daemon=True).start()

    def talk(self, client):
        with client:
            try:
                client.recv(65536)
                client.sendall(ANSWERS[self._answer])
                while self._answer == "a byte a second" and not self._over.wait(1):
                    client.sendall(b"x")
                while self._answer == "without an end" and not self._over.is_set():
                    client.sendall(b"x" * 65536)
                client.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def stop(self):
        self._over.set()


@contextmanager
def hostile_engine(answer):
    """Lend an engine of that kind."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = Engine(answer)
        one.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=one.serve, args=(listener,), daemon=True).start()
        try:
            yield one
        finally:
            one.stop()
            listener.shutdown(socket.SHUT_RDWR)
