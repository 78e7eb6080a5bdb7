"""A real gloo pipeline with one hop slow: simulated as it is, and its repair priced alike."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support.jobs import recorded_pipeline
from support.jobs.forked_ranks import environment_of_ranks
from support.jobs.recorded_pipeline import WORKLOAD, Workload

import debubble
from debubble import api
from debubble.report.answers.find import answer_find

SOURCE = Path(__file__).parents[1] / "support" / "services" / "paced_socket.c"
# 128 KiB a message: each takes 20 ms of its hop.
BYTES_PER_S = 6_500_000
SHAPE = {"tokens": 512, "width": 64, "forward_ms": 10, "backward_ms": 20, "steps": 3, "warmup": 2}
TRAINS = Workload(ranks=3, layers=(2, 2, 2), microbatches=4, **SHAPE)
SERVES = Workload(ranks=3, layers=(2, 2, 2), microbatches=6, schedule="forward-only", **SHAPE)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    built = tmp_path_factory.mktemp("paced") / "paced.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", built, SOURCE, "-ldl"], check=True)  # noqa: S607
    return built


def run_paced(workload, hop, library, folder):
    """Run a workload whose one rank reads slowly what comes from another."""
    ports, run = folder / "ports", folder / "run"
    ports.mkdir()
    run.mkdir()
    (run / WORKLOAD).write_bytes(msgspec.json.encode(workload))
    settings = {
        "LD_PRELOAD": str(library),
        "PACED_FOLDER": str(ports),
        "PACED_FROM": str(hop[0]),
        "PACED_TO": str(hop[1]),
        "PACED_BYTES_PER_S": str(BYTES_PER_S),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, recorded_pipeline.__file__, str(run), str(rank)],
            env=environment_of_ranks() | settings | {"RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank in range(workload.ranks)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=180)
            assert rank.returncode == 0, said.decode()
    finally:
        for rank in ranks:
            rank.kill()
    return api.analyse(run)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cc"), reason="cc is not installed: apt-get install gcc")
@pytest.mark.parametrize("workload", [TRAINS, SERVES], ids=["1f1b", "forward-only"])
def test_a_run_with_a_slow_hop_is_simulated_and_its_repair_has_one_price(
    workload, library, tmp_path
):
    analysis = run_paced(workload, (1, 2), library, tmp_path)
    # What else runs on this machine may slow another hop for a while, never as much.
    slow = [hop for hop in answer_find(analysis).hops if hop.verdict == "slow"]
    worst = max(slow, key=lambda hop: hop.cost_per_batch_s)
    assert (worst.from_rank, worst.to_rank) == (1, 2)
    plan = debubble.plan(analysis)
    repairs = [option for option in plan.options if option.lever == "link"]
    repair = next(option for option in repairs if option.change.repaired_hops == [[1, 2]])
    saved_s = plan.baseline.numbers.batch_latency_s - repair.numbers.batch_latency_s
    assert saved_s == pytest.approx(worst.cost_per_batch_s, rel=0.01)
    # A message takes 20 ms, and all but a few hold the step up.
    assert saved_s > 0.5 * workload.microbatches * 0.02
