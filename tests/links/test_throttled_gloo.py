"""Real gloo, each rank in a network namespace of its own, one hop throttled by the kernel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from contextlib import contextmanager

import pytest

from debubble.links.live.ladder import pairs_of

RANKS = 4
THROTTLED = "400mbit"
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
            ip("-n", space, "link", "set", "eth0", "up")
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
            "rate",
            THROTTLED,
        ],
        ["filter", "add", "dev", "eth0", "parent", "1:", *rule, "flowid", "1:20"],
    ):
        ip("netns", "exec", spaces[sender], "tc", *words)


def measure(spaces, out):
    """Start the ranks as torchrun does, each in its namespace."""
    settings = {
        "MASTER_ADDR": "10.87.0.1",
        "MASTER_PORT": "29511",
        "WORLD_SIZE": str(RANKS),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    words = ["-m", "debubble.links", "--backend", "gloo", "--largest", "1MiB", "--out", str(out)]
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", space, sys.executable, *words],  # noqa: S607
            env=os.environ | settings | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank, space in enumerate(spaces)
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


@pytest.mark.accuracy
@pytest.mark.parametrize("number", range(20))
def test_the_throttled_hop_is_named_with_its_rate(number, tmp_path):
    if not allowed():
        pytest.skip("network namespaces need root, ip and tc")
    hop = HOPS[number % len(HOPS)]
    with network(hop) as spaces:
        answer = measure(spaces, tmp_path / "links.json")
    slow = [one for one in answer["hops"] if one["verdict"] == "slow"]
    assert [(one["from_rank"], one["to_rank"]) for one in slow] == [hop]
    # Of the largest messages: the kernel lets small ones through in a burst.
    assert slow[0]["one_message_bytes_per_s"] == pytest.approx(400e6 / 8, rel=0.25)
