"""Network namespaces with one hop throttled; gone even where a test is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from contextlib import contextmanager

# Its input ends when the test does, however that comes about: then it ends what runs in the
# namespaces and removes them.
GUARD = """
read -r _
for space in "$@"; do
  for process in $(ip netns pids "$space"); do kill -9 "$process"; done
  ip netns del "$space"
done
"""


def allowed():
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    return subprocess.run(["unshare", "-n", "true"], check=False).returncode == 0  # noqa: S607


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)  # noqa: S607


@contextmanager
def network(ranks, throttled, bits_per_s):
    """Join namespaces by a bridge; let one send slowly to one other."""
    tag = uuid.uuid4().hex[:6]
    hub, spaces = f"hub{tag}", [f"rank{tag}{rank}" for rank in range(ranks)]
    guard = subprocess.Popen(
        ["sh", "-c", GUARD, "guard", *spaces, hub],  # noqa: S607
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
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
        throttle(spaces, throttled, bits_per_s)
        yield spaces
    finally:
        guard.communicate()


def throttle(spaces, hop, bits_per_s):
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
            *("rate", f"{bits_per_s}bit", "burst", "16k", "cburst", "16k"),
        ],
        ["filter", "add", "dev", "eth0", "parent", "1:", *rule, "flowid", "1:20"],
    ):
        ip("netns", "exec", spaces[sender], "tc", *words)
