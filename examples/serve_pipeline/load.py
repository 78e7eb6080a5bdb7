"""Clients that ask without a pause: `python load.py URL --tokens 512 --clients 4 --seconds 10`."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import urllib.request


def ask(url: str, tokens: int) -> None:
    """Have one prompt completed."""
    request = urllib.request.Request(  # noqa: S310 (the user's own server)
        f"{url}/v1/completions",
        data=json.dumps({"prompt": list(range(tokens))}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        answer.read()


def main() -> None:
    """Ask, and say how long an answer took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    deadline = time.monotonic() + given.seconds
    times: list[float] = []

    def keep_asking() -> None:
        while time.monotonic() < deadline:
            began = time.monotonic()
            ask(given.url.rstrip("/"), given.tokens)
            times.append(time.monotonic() - began)

    clients = [threading.Thread(target=keep_asking) for _ in range(given.clients)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    middle = sorted(times)[len(times) // 2]
    sys.stdout.write(f"{len(times)} answers, {1000 * middle:.1f} ms in the middle\n")


if __name__ == "__main__":
    main()
