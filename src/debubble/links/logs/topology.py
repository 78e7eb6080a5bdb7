"""Output of `nvidia-smi topo -m` or `nvlink` in → how devices of a host are joined."""

from __future__ import annotations

import re

from debubble.links.hop_times import Hop
from debubble.links.judge import CLASSES, LinkClass, nvlink_of
from debubble.links.logs.model import NvlinkErrors, NvlinkStatus, Topology, damaged, number

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"^GPU(\d+)$")
_JOIN = re.compile(r"^(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS|NVB|PSB)$")
_DEVICE = re.compile(r"^GPU (\d+):\s*(.*?)\s*(?:\(UUID:.*)?$")
_LINK = re.compile(r"^\s*Link (\d+):\s*(.+?)\s*$")
_COUNTER = re.compile(r"^\s*Link (\d+):\s*([A-Za-z][\w ()-]*Errors?[\w ()-]*):\s*(\d+|N/A)\s*$")
_RATE = re.compile(r"^(\S+) GB/s$")
_AS_PRINTED = "give what `nvidia-smi topo -m` printed, as it is"
# 12 links are NVLink 3, 18 are NVLink 4 or 5: the device tells which.
_BY_LINKS = {12: "nvlink3", 8: "nvlink4-h800"}
_PCIE_5 = ("H100", "H200", "H800", "B200", "L40S")


def is_topology(text: str) -> bool:
    """Tell whether `nvidia-smi topo -m` printed this."""
    return any(_columns(line) for line in _plain(text))


def is_nvlink_status(text: str) -> bool:
    """Tell whether `nvidia-smi nvlink -s` printed this."""
    lines = _plain(text)
    return any(map(_DEVICE.match, lines)) and any(map(_LINK.match, lines))


def read_topology(text: str, file: str) -> Topology:
    """Read the part of the matrix that is about devices; network cards and processors stay out."""
    columns: list[int] = []
    joins: dict[Hop, str] = {}
    seen: list[int] = []
    for count, line in enumerate(_plain(text), 1):
        if not columns:
            columns = _columns(line)
            continue
        words = line.split()
        row = _GPU.match(words[0]) if words else None
        if row is None:
            continue
        seen.append(int(row[1]))
        cells = words[1 : len(columns) + 1]
        if len(cells) < len(columns) or not all(map(_JOIN.match, cells)):
            raise damaged(
                f"line {count}: not {len(columns)} joins, such as NV18 or SYS", file, _AS_PRINTED
            )
        joins |= {(seen[-1], other): cell for other, cell in zip(columns, cells, strict=True)}
    if not columns or seen != columns:
        raise damaged(f"{len(seen)} rows for {len(columns)} devices", file, _AS_PRINTED)
    for (here, there), how in joins.items():
        back = joins[there, here]
        if (here == there) != (how == "X") or back != how:
            raise damaged(
                f"GPU{here} to GPU{there} is {how}, and back it is {back}",
                file,
                "cells are missing or changed places; give it as nvidia-smi printed it",
            )
    return Topology(file=file, joins={pair: how for pair, how in joins.items() if how != "X"})


def is_nvlink_errors(text: str) -> bool:
    """Tell whether `nvidia-smi nvlink -e` printed this."""
    lines = _plain(text)
    return any(map(_DEVICE.match, lines)) and any(map(_COUNTER.match, lines))


def read_nvlink_errors(text: str, file: str) -> NvlinkErrors:
    """Read the counters of each device's links; those that a device does not have are left out."""
    devices: list[tuple[int, str, list[tuple[int, str, int]]]] = []
    for count, line in enumerate(_plain(text), 1):
        if found := _DEVICE.match(line):
            devices.append((int(found[1]), found[2], []))
        elif found := _COUNTER.match(line):
            if not devices:
                raise damaged(f"line {count}: link {found[1]} of no device", file)
            if found[3].isdigit():
                devices[-1][2].append((int(found[1]), found[2].lower(), int(found[3])))
        elif line.strip() and not line.lstrip().startswith("Link"):
            raise damaged(f"line {count}: neither a device nor a counter", file)
    return NvlinkErrors(
        file=file, devices=tuple((index, name, tuple(found)) for index, name, found in devices)
    )


def read_nvlink_status(text: str, file: str) -> NvlinkStatus:
    """Read the links of each device."""
    devices: list[tuple[int, str, list[float | None]]] = []
    for count, line in enumerate(_plain(text), 1):
        where = f"line {count}"
        if found := _DEVICE.match(line):
            devices.append((int(found[1]), found[2], []))
        elif found := _LINK.match(line):
            if not devices or int(found[1]) != len(devices[-1][2]):
                raise damaged(f"{where}: link {found[1]} out of turn", file)
            rate = _RATE.match(found[2])
            if rate is None and found[2] != "<inactive>":
                raise damaged(f"{where}: {found[2]!r} is no rate", file)
            devices[-1][2].append(number(rate[1], file, where) if rate else None)
        elif line.strip():
            raise damaged(f"{where}: neither a device nor a link", file)
    if len({len(links) for _, _, links in devices}) > 1:
        raise damaged("devices with different numbers of links", file)
    return NvlinkStatus(
        file=file, devices=tuple((index, name, tuple(links)) for index, name, links in devices)
    )


def class_of_join(join: str, device_name: str) -> LinkClass | None:
    """Return the kind of wire of a join, as far as it and the device tell."""
    if join.startswith("NV") and join[2:].isdigit():
        known = nvlink_of(device_name)
        return known or CLASSES.get(_BY_LINKS.get(int(join[2:]), ""))
    if not device_name:
        return None
    newer = any(word in device_name for word in _PCIE_5)
    return CLASSES["pcie5" if newer else "pcie4"] if "A100" in device_name or newer else None


def _columns(line: str) -> list[int]:
    words = line.split()
    found = [match for word in words if (match := _GPU.match(word))]
    alone = bool(words) and _GPU.match(words[0]) and (len(words) < 2 or _GPU.match(words[1]))
    several = len(words) > 1 and not _JOIN.match(words[1])
    return [int(match[1]) for match in found] if alone and (several or len(words) == 1) else []


def _plain(text: str) -> list[str]:
    return [_STYLE.sub("", line) for line in text.splitlines()]
