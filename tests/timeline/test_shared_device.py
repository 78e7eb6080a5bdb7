"""Whether ranks share a device, by its name, its number and how much of it each sees."""

from __future__ import annotations

from dataclasses import replace

from support.timelines.by_hand import a_rank

from debubble.timeline.model import may_share, ranks_a_device, surely_share


def on_devices(*devices, name="NVIDIA H200", seen=33):
    return [
        replace(a_rank(n, (n,)), device=device, device_name=name, multiprocessors=seen)
        for n, device in enumerate(devices)
    ]


def test_ranks_with_one_number_on_one_host_may_share_a_device():
    assert may_share(on_devices(("a", 0), ("a", 0)))
    assert not may_share(on_devices(("a", 0), ("b", 0)))
    assert not may_share(on_devices(("a", 0), ("a", 1)))
    assert not may_share(on_devices(("a", 0)))
    assert not may_share(on_devices(("a", -1), ("a", -1)))


def test_they_surely_do_where_each_sees_a_part_of_a_known_device():
    both = ("a", 0), ("a", 0)
    assert surely_share(on_devices(*both))
    assert ranks_a_device(on_devices(*both)) == 2
    for whole in (on_devices(*both, seen=132), on_devices(*both, seen=None)):
        assert not surely_share(whole)
        assert ranks_a_device(whole) == 1
    assert not surely_share(on_devices(*both, name="NVIDIA Unheard-of"))


def test_a_whole_h100_on_pcie_is_no_part_of_a_larger_one():
    both = ("a", 0), ("a", 0)
    assert not surely_share(on_devices(*both, name="NVIDIA H100 PCIe", seen=114))
    assert surely_share(on_devices(*both, name="NVIDIA H100 80GB HBM3", seen=114))
