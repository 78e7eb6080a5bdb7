"""Real gloo with one hop throttled: by the kernel, each rank in a network namespace of its own.

Where that is not allowed, by a preloaded library that paces what a rank reads from another.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.requirements import lack_program
from support.services.throttled_network import allowed, network

from debubble.links.live import pairs_of

RANKS = 4
BYTES_PER_S = 50_000_000
HOPS = [hop for pair in pairs_of(RANKS, every=False) for hop in (pair, pair[::-1])]


def measure_in(spaces, out):
    """Start each rank in its namespace."""
    return measure(
        [["ip", "netns", "exec", space] for space in spaces],
        {"MASTER_ADDR": "10.87.0.1", "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0"},
        out,
    )


def measure_paced(hop, folder, out):
    """Start all ranks on this host, with what one of them reads from another paced."""
    library = folder / "paced.so"
    source = Path(__file__).parents[1] / "support" / "services" / "paced_socket.c"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)  # noqa: S607
    ports = folder / "ports"
    ports.mkdir()
    return measure(
        [[]] * RANKS,
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
            "LD_PRELOAD": str(library),
            "PACED_FOLDER": str(ports),
            "PACED_FROM": str(hop[0]),
            "PACED_TO": str(hop[1]),
            "PACED_BYTES_PER_S": str(BYTES_PER_S),
        },
        out,
    )


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def measure(prefixes, settings, out):
    """Start the ranks as torchrun does."""
    words = ["-m", "debubble.links", "--backend", "gloo", "--largest", "1MiB", "--out", str(out)]
    shared = {"WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*prefix, sys.executable, *words],
            env=os.environ | shared | settings | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank, prefix in enumerate(prefixes)
    ]
    try:
        for one in ranks:
            _, said = one.communicate(timeout=180)
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


def check(answer, hop):
    slow = [one for one in answer["hops"] if one["verdict"] == "slow"]
    assert [(one["from_rank"], one["to_rank"]) for one in slow] == [hop]
    assert slow[0]["ill"] == "link"
    assert slow[0]["one_message_bytes_per_s"] == pytest.approx(BYTES_PER_S, rel=0.25)
    assert slow[0]["beta_bytes_per_s"] == pytest.approx(BYTES_PER_S, rel=0.25)


@pytest.mark.accuracy
@pytest.mark.parametrize("number", range(20))
def test_the_throttled_hop_is_named_with_its_rate(number, tmp_path):
    hop = HOPS[number % len(HOPS)]
    if allowed():
        with network(RANKS, hop, BYTES_PER_S * 8) as spaces:
            answer = measure_in(spaces, tmp_path / "links.json")
    elif shutil.which("cc"):
        answer = measure_paced(hop, tmp_path, tmp_path / "links.json")
    else:
        lack_program("cc")
    check(answer, hop)


@pytest.mark.accuracy
@pytest.mark.skipif(not shutil.which("cc"), reason="cc is not installed: apt-get install gcc")
@pytest.mark.parametrize("hop", [(1, 2), (3, 2)])
def test_a_hop_whose_socket_is_paced_is_named_with_its_rate(hop, tmp_path):
    check(measure_paced(hop, tmp_path, tmp_path / "links.json"), hop)


KILLED = """
import os, signal, sys
from support.services.throttled_network import network
with network(2, (0, 1), 8_000_000) as spaces:
    print(*spaces, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.accuracy
@pytest.mark.skipif(
    not allowed(),
    reason="network namespaces need root, ip and tc",
)
def test_a_test_that_is_killed_leaves_no_namespace_behind():
    # What it prints ends when the guard has ended, which holds the same output.
    killed = subprocess.run(
        [sys.executable, "-c", KILLED],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    spaces = killed.stdout.split()
    assert len(spaces) == 2
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)  # noqa: S607
    assert not set(spaces) & set(left.stdout.split())
