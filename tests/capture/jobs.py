"""Starts the ranks of a small job and gives back what they said."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).parent / "small_job.py"
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


def run_job(folder, **settings):
    """Run both ranks to their end; captures go to `folder/out`."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "out"
    if settings.get("capture") is not None:
        settings["capture"] = {"out": str(out), **settings["capture"]}
    store = folder / "store"
    words = json.dumps(settings)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(store), str(rank), words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    output = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    results = []
    for rank in range(RANKS):
        said = Path(f"{store}.result{rank}")
        results.append(json.loads(said.read_text()) if said.exists() else None)
    return Job(codes=[rank.returncode for rank in ranks], results=results, output=output, out=out)
