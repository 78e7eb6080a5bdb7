"""Real gloo with one hop throttled: by the kernel, each rank in a network namespace of its own.

Where that is not allowed, by a preloaded library that paces what a rank reads from another.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest

from debubble.links.live.ladder import pairs_of

RANKS = 4
BYTES_PER_S = 50_000_000
THROTTLED = f"{BYTES_PER_S * 8}bit"
HOPS = [hop for pair in pairs_of(RANKS, every=False) for hop in (pair, pair[::-1])]


def allowed():
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    return subprocess.run(["unshare", "-n", "true"], check=False).returncode == 0  # noqa: S607


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)  # noqa: S607


@contextmanager
def network(throttled):
    """Join namespaces by a bridge; let one send slowly to one other."""
    tag = uuid.uuid4().hex[:6]
    hub, spaces = f"hub{tag}", [f"rank{tag}{rank}" for rank in range(RANKS)]
    try:
        for space in (hub, *spaces):
            ip("netns", "add", space)
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for rank, space in enumerate(spaces):
            end = ["peer", "name", "eth0", "netns", space]
            ip("-n", hub, "link", "add", f"v{rank}", "type", "veth", *end)
            ip("-n", hub, "link", "set", f"v{rank}", "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"10.87.0.{rank + 1}/24", "dev", "eth0")
            # A packet passes whole where tokens are left: of large ones much would go unthrottled.
            ip("-n", space, "link", "set", "eth0", "gso_max_size", "16384", "up")
            ip("-n", space, "link", "set", "lo", "up")
        throttle(spaces, throttled)
        yield spaces
    finally:
        for space in (*spaces, hub):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)  # noqa: S607


def throttle(spaces, hop):
    sender, receiver = hop
    rule = [
        "protocol",
        "ip",
        "prio",
        "1",
        "u32",
        "match",
        "ip",
        "dst",
        f"10.87.0.{receiver + 1}/32",
    ]
    for words in (
        ["qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "10"],
        ["class", "add", "dev", "eth0", "parent", "1:", "classid", "1:10", "htb", "rate", "40gbit"],
        [
            "class",
            "add",
            "dev",
            "eth0",
            "parent",
            "1:",
            "classid",
            "1:20",
            "htb",
            *("rate", THROTTLED, "burst", "16k", "cburst", "16k"),
        ],
        ["filter", "add", "dev", "eth0", "parent", "1:", *rule, "flowid", "1:20"],
    ):
        ip("netns", "exec", spaces[sender], "tc", *words)


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
    source = Path(__file__).with_name("paced_socket.c")
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
    # Of the largest messages. A line over all sizes is bent by small ones: a bucket lets these
    # pass, and on a busy machine they wait for ranks to wake up.
    assert slow[0]["one_message_bytes_per_s"] == pytest.approx(BYTES_PER_S, rel=0.25)


@pytest.mark.accuracy
@pytest.mark.parametrize("number", range(20))
def test_the_throttled_hop_is_named_with_its_rate(number, tmp_path):
    hop = HOPS[number % len(HOPS)]
    if allowed():
        with network(hop) as spaces:
            answer = measure_in(spaces, tmp_path / "links.json")
    elif shutil.which("cc"):
        answer = measure_paced(hop, tmp_path, tmp_path / "links.json")
    else:
        pytest.skip("needs network namespaces (root, ip and tc), or a compiler")
    check(answer, hop)


@pytest.mark.accuracy
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a compiler")
@pytest.mark.parametrize("hop", [(1, 2), (3, 2)])
def test_a_hop_whose_socket_is_paced_is_named_with_its_rate(hop, tmp_path):
    check(measure_paced(hop, tmp_path, tmp_path / "links.json"), hop)
