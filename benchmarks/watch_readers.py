"""200 concurrent readers while the service analyses: `python benchmarks/watch_readers.py`.

Each reader asks for /metrics and the page in turn, once a second, each time over a new connection.
The bar is 200 ms for the slowest answer in a hundred.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

from watch_service import Watch, write_capture, write_config

READERS = 200
SECONDS = 15.0
WARM = 300
CAPTURES = 5000
BAR_S = 0.2


async def read(port: int, deadline: float, times: list[float]) -> None:
    await asyncio.sleep(random.random())  # noqa: S311 (not all at once)
    paths = ("/metrics", "/")
    number = 0
    while not number or time.monotonic() < deadline:
        began = time.monotonic()
        path = paths[number % 2]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.0 200"):
            raise SystemExit(head.decode())
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        )
        await reader.readexactly(length)
        writer.close()
        times.append(time.monotonic() - began)
        number += 1
        await asyncio.sleep(max(0.0, 1 - (time.monotonic() - began)))


async def read_all(port: int, readers: int, seconds: float) -> list[float]:
    times: list[float] = []
    deadline = time.monotonic() + seconds
    async with asyncio.TaskGroup() as tasks:
        for _ in range(readers):
            tasks.create_task(read(port, deadline, times))
    return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    if parser.parse_args().tiny:
        ask_all(captures=20, warm=2, readers=2, seconds=0.5)
        return
    late, meanwhile = ask_all(CAPTURES, WARM, READERS, SECONDS)
    raise SystemExit(0 if late < BAR_S and meanwhile else 1)


def ask_all(captures: int, warm: int, readers: int, seconds: float) -> tuple[float, int]:
    """Print how long answers took; return the slowest of a hundred, and captures meanwhile."""
    with tempfile.TemporaryDirectory(prefix="debubble-readers-") as place:
        folder = Path(place)
        config = write_config(folder)
        rng = random.Random(3)  # noqa: S311 (durations)
        for number in range(captures):
            write_capture(folder / "traces", number, rng)
        watch = Watch(config)
        watch.wait_until(warm)
        before = watch.analysed
        times = asyncio.run(read_all(int(watch.url.rpartition(":")[2]), readers, seconds))
        meanwhile = watch.analysed - before
        watch.kill()
    late = times[int(len(times) * 0.99)]
    print(f"{len(times)} answers to {readers} readers, {meanwhile} captures analysed meanwhile")
    print(f"median {1000 * times[len(times) // 2]:.1f} ms, p99 {1000 * late:.1f} ms, ", end="")
    print(f"slowest {1000 * times[-1]:.1f} ms (bar: p99 {1000 * BAR_S:.0f} ms)")
    return late, meanwhile


if __name__ == "__main__":
    main()
