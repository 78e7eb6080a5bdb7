"""The demo's pipeline as a job: what its ranks leave each other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.processes import PATIENCE_S

from debubble.timeline.schedules import format_order, order_of

# Rank 0 ends at once; the others look when it is gone, and say what they see.
EARLY_END = r"""
import os, sys, time
from pathlib import Path
from debubble.annexes.demo import job, rank

def run(workload, number, rendezvous):
    note = rendezvous.parent.with_suffix(".first")
    if number == 0:
        note.write_text(str(os.getpid()))
        return
    while not (note.exists() and note.read_text()):
        time.sleep(0.01)
    while Path(f"/proc/{note.read_text()}").exists():
        time.sleep(0.01)
    seen = "there" if rendezvous.parent.exists() else "gone"
    os.write(1, f"rank {number}: {seen}\n".encode())

rank.run_rank = run
sys.exit(job.main([]))
"""


@pytest.mark.slow
def test_a_rank_that_ends_leaves_the_others_where_they_meet(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", EARLY_END],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: there" for rank in (1, 2, 3)]
    assert [left.suffix for left in tmp_path.glob("tmp*")] == [".first"]


@pytest.mark.slow
def test_ranks_run_an_order_of_passes_from_its_file(tmp_path):
    order = tmp_path / "order.csv"
    order.write_text(format_order(order_of("zb-h1", 2, 3)), "utf-8")
    words = "--ranks 2 --split 1,1 --microbatches 3 --steps 2 --forward-ms 1 --backward-ms 2"
    job = [sys.executable, "-m", "debubble.annexes.demo.job", *words.split(), "--schedule"]
    done = subprocess.run([*job, str(order)], capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    missing = subprocess.run(
        [*job, str(tmp_path / "none.csv")],
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
        check=False,
    )
    assert missing.returncode == 2
    assert "no order of passes is in" in missing.stderr
