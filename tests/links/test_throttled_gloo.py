"""Real gloo with one hop throttled: a preloaded library paces what a rank reads from another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import PATIENCE_S, free_port
from support.requirements import need_program

from debubble.links.live import pairs_of

RANKS = 4
BYTES_PER_S = 50_000_000
HOPS = [hop for pair in pairs_of(RANKS) for hop in (pair, pair[::-1])]


def measure_paced(hop, folder, out):
    """Start the ranks as torchrun does, with what one of them reads from another paced."""
    compiler = need_program("cc")
    library = folder / "paced.so"
    source = Path(__file__).parents[1] / "support" / "services" / "paced_socket.c"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    ports = folder / "ports"
    ports.mkdir()
    settings = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": str(library),
        "PACED_FOLDER": str(ports),
        "PACED_FROM": str(hop[0]),
        "PACED_TO": str(hop[1]),
        "PACED_BYTES_PER_S": str(BYTES_PER_S),
    }
    words = ["-m", "debubble.links", "--backend", "gloo", "--largest", "1MiB", "--out", str(out)]
    ranks = [
        subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | settings | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank in range(RANKS)
    ]
    try:
        for one in ranks:
            _, said = one.communicate(timeout=PATIENCE_S)
            assert one.returncode == 0, said.decode()
    finally:
        for one in ranks:
            one.kill()
    answer = subprocess.run(
        [sys.executable, "-m", "debubble", "links", str(out), "--json"],
        capture_output=True,
        check=True,
    )
    return json.loads(answer.stdout)


@pytest.mark.accuracy
@pytest.mark.parametrize("number", range(20))
def test_the_throttled_hop_is_named_with_its_rate(number, tmp_path):
    hop = HOPS[number % len(HOPS)]
    answer = measure_paced(hop, tmp_path, tmp_path / "links.json")
    slow = [one for one in answer["hops"] if one["verdict"] == "slow"]
    assert [(one["from_rank"], one["to_rank"]) for one in slow] == [hop]
    assert slow[0]["ill"] == "link"
    assert slow[0]["one_message_bytes_per_s"] == pytest.approx(BYTES_PER_S, rel=0.25)
    assert slow[0]["beta_bytes_per_s"] == pytest.approx(BYTES_PER_S, rel=0.25)
