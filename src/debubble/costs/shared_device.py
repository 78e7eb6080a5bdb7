"""Ranks in → whether they share a device: surely, as parts of one (MPS, MIG), or maybe."""

from __future__ import annotations

from collections.abc import Sequence

from debubble.timeline.model import RankTimeline

# Multiprocessors of whole devices. A process that was given a part of one (MPS, MIG) sees fewer.
_MULTIPROCESSORS = {
    "V100": 80, "A100": 108, "A800": 108, "H100 PCIe": 114, "H100": 132, "H800": 132,
    "H200": 132, "GH200": 132, "B200": 148, "B300": 148, "L40S": 142,
}  # fmt: skip


def may_share(ranks: Sequence[RankTimeline]) -> bool:
    """Tell whether all ranks may be on one device: same host as far as known, same number."""
    places = {rank.device for rank in ranks}
    return len(ranks) > 1 and len(places) == 1 and all(number >= 0 for _, number in places)


def surely_share(ranks: Sequence[RankTimeline]) -> bool:
    """Tell whether each rank was given a part of a device, and all may be of the same one."""
    return may_share(ranks) and all(_is_part(rank) for rank in ranks)


def ranks_a_device(ranks: Sequence[RankTimeline]) -> int:
    """Return how many of these ranks divide the memory of one device: 1 unless it is sure."""
    return len(ranks) if surely_share(ranks) else 1


def _is_part(rank: RankTimeline) -> bool:
    whole = [count for name, count in _MULTIPROCESSORS.items() if name in rank.device_name]
    return bool(whole and rank.multiprocessors and rank.multiprocessors < whole[0])
