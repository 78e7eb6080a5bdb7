"""A service to be measured, in a process of its own, and small captures for it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

# A guard against hanging.
PATIENCE_S = 120.0


def write_capture(folder: Path, number: int, rng: random.Random) -> None:
    """Put a run of two ranks and four microbatches into place, as a table of its own timers."""
    rows = ["step,pipeline,stage,microbatch,op,start_us,duration_us,rank"]
    took = 1000 * rng.uniform(0.95, 1.05)
    for step in range(2):
        for stage in range(2):
            for batch in range(4):
                start = step * 12 * took + (stage + batch) * took
                rows.append(f"{step},0,{stage},{batch},F,{start:.1f},{took:.1f},{stage}")
                back = step * 12 * took + (6 - stage + batch) * took
                rows.append(f"{step},0,{stage},{batch},B,{back:.1f},{took:.1f},{stage}")
    partial = folder / f".capture{number:06}.partial"
    partial.write_text("\n".join(rows) + "\n")
    partial.rename(folder / f"capture{number:06}.csv")


def write_config(folder: Path) -> Path:
    """Write a configuration with one source, into which captures are moved whole."""
    (folder / "traces").mkdir(exist_ok=True)
    config = folder / "watch.toml"
    config.write_text(
        f'store = "sqlite:///{folder}/history.db"\n[listen]\naddress = "127.0.0.1:0"\n'
        f'[[source]]\nname = "soak"\nfolder = "{folder}/traces"\n'
        'settle = "0s"\npoll = "500ms"\n'
    )
    return config


class Watch:
    """One service; its log is read, so that it never waits for us."""

    def __init__(self, config: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "debubble", "watch", "--config", str(config)],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = ""
        self.analysed = 0
        self.bugs: list[str] = []
        self._started = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        if not self._started.wait(PATIENCE_S):
            raise RuntimeError("the service did not start")

    def _listen(self) -> None:
        for line in self.process.stderr or ():
            event = json.loads(line) if line.startswith("{") else {"event": "text", "text": line}
            if event["event"] == "started":
                self.url = event["url"]
                self._started.set()
            self.analysed += event["event"] == "analysed"
            if event["event"] in {"bug", "failed", "text", "not_analysed"}:
                self.bugs.append(line)

    def memory_mib(self) -> float:
        """Return what it holds now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def kill(self) -> None:
        """End it without a word."""
        self.process.kill()
        self.process.wait()

    def wait_until(self, analysed: int) -> None:
        """Wait for so many captures since its start."""
        deadline = time.monotonic() + PATIENCE_S
        while self.analysed < analysed and time.monotonic() < deadline:
            time.sleep(0.02)
