"""A device, a topology or a word of the user in → what kind of wire a hop is, and what it can do.

Rates are one direction's, of point-to-point messages sent by kernels as NCCL does. Copy engines are
quicker, so their figures are never held against these.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from debubble.costs.passes import may_share
from debubble.errors import UsageError
from debubble.links.hop_times import Hop
from debubble.timeline.model import RankTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClass:
    """A kind of wire."""

    name: str
    words: str
    line_bytes_per_s: float
    """What the standard says."""
    bytes_per_s: float
    """What large messages of a healthy one reach."""


_GB = 1e9
# Line rates from the standards. What healthy ones reach: NCCL's own model of NVLink (20.0, 20.6 and
# 40.1 GB/s a link); acceptance limits that operators of such machines publish for PCIe and
# InfiniBand; for Ethernet and sockets, nine tenths of the line. In GB/s: the line, what is reached.
CLASSES = {
    name: LinkClass(name=name, words=words, line_bytes_per_s=line * _GB, bytes_per_s=reached * _GB)
    for name, words, line, reached in (
        ("nvlink3", "NVLink 3, 12 links (A100)", 300, 230),
        ("nvlink4", "NVLink 4, 18 links (H100, H200)", 450, 335),
        ("nvlink4-h800", "NVLink 4, 8 links (H800)", 200, 160),
        ("nvlink5", "NVLink 5, 18 links (B200)", 900, 722),
        ("pcie4", "PCIe 4, 16 lanes", 31, 21),
        ("pcie5", "PCIe 5, 16 lanes", 63, 48),
        ("ib-edr", "InfiniBand EDR, 100 Gb/s", 12.5, 12.0),
        ("ib-hdr", "InfiniBand HDR, 200 Gb/s", 25, 22.5),
        ("ib-ndr", "InfiniBand NDR, 400 Gb/s", 50, 45),
        ("ib-xdr", "InfiniBand XDR, 800 Gb/s", 100, 90),
        ("roce-100", "RoCE, 100 Gb/s", 12.5, 11.2),
        ("roce-200", "RoCE, 200 Gb/s", 25, 22.5),
        ("roce-400", "RoCE, 400 Gb/s", 50, 45),
        ("ethernet-10", "TCP over Ethernet, 10 Gb/s", 1.25, 1.1),
        ("ethernet-25", "TCP over Ethernet, 25 Gb/s", 3.125, 2.8),
        ("ethernet-100", "TCP over Ethernet, 100 Gb/s", 12.5, 5.0),
        ("sockets", "sockets on one machine", 10, 1.0),
    )
}
_NVLINK_OF = {
    "H800": "nvlink4-h800",
    "A100": "nvlink3",
    "H100": "nvlink4",
    "H200": "nvlink4",
    "B200": "nvlink5",
}
_WITHOUT_NVLINK = ("PCIe", "NVL")


def find_class(name: str) -> LinkClass:
    """Return the kind of wire of that name."""
    if name not in CLASSES:
        raise UsageError(f"no kind of wire is called {name!r}", hint=f"one of {', '.join(CLASSES)}")
    return CLASSES[name]


def nvlink_of(device_name: str) -> LinkClass | None:
    """Return the NVLink of a device, where its name tells."""
    if any(word in device_name for word in _WITHOUT_NVLINK):
        return None
    found = next((name for device, name in _NVLINK_OF.items() if device in device_name), None)
    return CLASSES[found] if found else None


def guess_class(here: RankTimeline, there: RankTimeline) -> LinkClass | None:
    """Guess a hop's wire from its devices: two of one host, of a kind that has NVLink.

    A guess names a wire, and says what it could do. It never makes a verdict: how devices are wired
    and what the transport takes is not in a trace.
    """
    if here.device[0] != there.device[0] or may_share((here, there)):
        return None
    if here.device_name != there.device_name or min(here.device[1], there.device[1]) < 0:
        return None
    return nvlink_of(here.device_name)


def wires_between(ranks: Sequence[RankTimeline]) -> dict[Hop, str]:
    """Tell hops inside a host from those between hosts; no others than these are peers."""
    if not all(rank.device[0] for rank in ranks) or len({rank.device[0] for rank in ranks}) < 2:
        return {}
    return {
        (here.rank, there.rank): "inside" if here.device[0] == there.device[0] else "between"
        for here in ranks
        for there in ranks
        if here is not there
    }


_PROGRAM = "./build/sendrecv_perf"
# Enough iterations for a steady mean, after enough to set everything up.
_ITERATIONS = "-n 50 -w 10"
_UNKNOWN_SIZE = "-b 8 -e 64M -f 2"


_DEVICES_A_HOST = 8


def nccl_command(here: RankTimeline, there: RankTimeline, message_bytes: int) -> str:
    """Write the command for two ranks: messages both ways at once, at the job's own size."""
    size = f"-b {message_bytes} -e {message_bytes}" if message_bytes > 0 else _UNKNOWN_SIZE
    out = f"-J hop_{here.rank}_{there.rank}.json"
    words = f"{size} {_ITERATIONS} {out}"
    (host, device), (other_host, other_device) = here.device, there.device
    if host != other_host:
        hosts = shlex.quote(f"{host},{other_host}")
        devices = (
            f"-x NCCL_TESTS_DEVICE={device} " if device == other_device and device >= 0 else ""
        )
        return f"mpirun -np 2 -H {hosts} {devices}{_PROGRAM} -g 1 {words}"
    if may_share((here, there)) or min(device, other_device) < 0:
        # Ranks that each see one device do not tell which of the host's it is: on a single host
        # it is mostly that of their number.
        numbers = [
            str(rank) if max(here.rank, there.rank) < _DEVICES_A_HOST else f"DEVICE_OF_RANK_{rank}"
            for rank in (here.rank, there.rank)
        ]
        return f"CUDA_VISIBLE_DEVICES={','.join(numbers)} {_PROGRAM} -g 2 {words}"
    return f"CUDA_VISIBLE_DEVICES={device},{other_device} {_PROGRAM} -g 2 {words}"
