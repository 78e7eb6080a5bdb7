"""Starts the ranks of a small job and gives back what they said."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SCRIPT = Path(__file__).with_name("gloo_job.py")
RANKS = 2
# A guard against hanging, far above what a busy machine needs.
PATIENCE_S = 240


@dataclass
class Job:
    codes: list[int]
    results: list[dict | None]
    output: list[str]
    out: Path

    def captures(self):
        return sorted(path.name for path in self.out.iterdir())

    def files(self):
        return sorted(
            str(path.relative_to(self.out)) for path in self.out.rglob("*") if path.is_file()
        )


@cache
def launcher():
    """Start what runs all jobs of this process; it ends when its stdin does."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def run_job(folder, **settings):
    """Run both ranks to their end; captures go to `folder/out`."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "out"
    if settings.get("capture") is not None:
        settings["capture"] = {"out": str(out), **settings["capture"]}
    process = launcher()
    process.stdin.write(f"{json.dumps([str(folder), settings])}\n")
    process.stdin.flush()
    assert select.select([process.stdout], [], [], PATIENCE_S)[0], "the job hangs"
    codes = json.loads(process.stdout.readline())
    results, output = [], []
    for rank in range(RANKS):
        said = folder / f"store.result{rank}"
        results.append(json.loads(said.read_text()) if said.exists() else None)
        output.append((folder / f"output{rank}").read_text("utf-8"))
    return Job(codes=codes, results=results, output=output, out=out)
