"""A device, a topology or a word of the user in → what kind of wire a hop is, and what it can do.

Rates are one direction's, of point-to-point messages sent by kernels as NCCL does. Copy engines are
quicker, so their figures are never held against these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from debubble.costs.passes import may_share
from debubble.errors import UsageError
from debubble.links.expectation import Hop
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
# InfiniBand; for Ethernet and sockets, nine tenths of the line.
CLASSES = {
    one.name: one
    for one in (
        LinkClass(
            name="nvlink3",
            words="NVLink 3, 12 links (A100)",
            line_bytes_per_s=300 * _GB,
            bytes_per_s=230 * _GB,
        ),
        LinkClass(
            name="nvlink4",
            words="NVLink 4, 18 links (H100, H200)",
            line_bytes_per_s=450 * _GB,
            bytes_per_s=335 * _GB,
        ),
        LinkClass(
            name="nvlink4-h800",
            words="NVLink 4, 8 links (H800)",
            line_bytes_per_s=200 * _GB,
            bytes_per_s=160 * _GB,
        ),
        LinkClass(
            name="nvlink5",
            words="NVLink 5, 18 links (B200)",
            line_bytes_per_s=900 * _GB,
            bytes_per_s=722 * _GB,
        ),
        LinkClass(
            name="pcie4",
            words="PCIe 4, 16 lanes",
            line_bytes_per_s=31 * _GB,
            bytes_per_s=21 * _GB,
        ),
        LinkClass(
            name="pcie5",
            words="PCIe 5, 16 lanes",
            line_bytes_per_s=63 * _GB,
            bytes_per_s=48 * _GB,
        ),
        LinkClass(
            name="ib-edr",
            words="InfiniBand EDR, 100 Gb/s",
            line_bytes_per_s=12.5 * _GB,
            bytes_per_s=12.0 * _GB,
        ),
        LinkClass(
            name="ib-hdr",
            words="InfiniBand HDR, 200 Gb/s",
            line_bytes_per_s=25 * _GB,
            bytes_per_s=22.5 * _GB,
        ),
        LinkClass(
            name="ib-ndr",
            words="InfiniBand NDR, 400 Gb/s",
            line_bytes_per_s=50 * _GB,
            bytes_per_s=45 * _GB,
        ),
        LinkClass(
            name="ib-xdr",
            words="InfiniBand XDR, 800 Gb/s",
            line_bytes_per_s=100 * _GB,
            bytes_per_s=90 * _GB,
        ),
        LinkClass(
            name="roce-100",
            words="RoCE, 100 Gb/s",
            line_bytes_per_s=12.5 * _GB,
            bytes_per_s=11.2 * _GB,
        ),
        LinkClass(
            name="roce-200",
            words="RoCE, 200 Gb/s",
            line_bytes_per_s=25 * _GB,
            bytes_per_s=22.5 * _GB,
        ),
        LinkClass(
            name="roce-400",
            words="RoCE, 400 Gb/s",
            line_bytes_per_s=50 * _GB,
            bytes_per_s=45 * _GB,
        ),
        LinkClass(
            name="ethernet-10",
            words="TCP over Ethernet, 10 Gb/s",
            line_bytes_per_s=1.25 * _GB,
            bytes_per_s=1.1 * _GB,
        ),
        LinkClass(
            name="ethernet-25",
            words="TCP over Ethernet, 25 Gb/s",
            line_bytes_per_s=3.125 * _GB,
            bytes_per_s=2.8 * _GB,
        ),
        LinkClass(
            name="ethernet-100",
            words="TCP over Ethernet, 100 Gb/s",
            line_bytes_per_s=12.5 * _GB,
            bytes_per_s=5.0 * _GB,
        ),
        LinkClass(
            name="sockets",
            words="sockets on one machine",
            line_bytes_per_s=10 * _GB,
            bytes_per_s=1.0 * _GB,
        ),
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
