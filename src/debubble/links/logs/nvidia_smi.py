"""What `nvidia-smi topo -m`, `nvlink -s` and `-e` print in → how devices join, and what fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from debubble.errors import Code
from debubble.links.hop_times import CLASSES, GB, Hop, LinkClass, nvlink_of
from debubble.links.logs.log import Log, LogReader, damaged, doubts_about, number
from debubble.units import counted

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"^GPU(\d+)$")
_JOIN = re.compile(r"^(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS|NVB|PSB)$")
_DEVICE = re.compile(r"^GPU (\d+):\s*(.*?)\s*(?:\(UUID:.*)?$")
_LINK = re.compile(r"^\s*Link (\d+):\s*(?:(\S+) GB/s|<inactive>)\s*$")
_COUNTER = re.compile(r"^\s*Link (\d+):\s*([A-Za-z][\w ()-]*Errors?[\w ()-]*):\s*(\d+|N/A)\s*$")
_AS_PRINTED = "give what nvidia-smi printed, as it is"
# 12 links are NVLink 3, 18 are NVLink 4 or 5: the device tells which.
_BY_LINKS = {12: "nvlink3", 8: "nvlink4-h800"}
_PCIE_5 = ("H100", "H200", "H800", "B200", "L40S")


def class_of_join(join: str, device_name: str) -> LinkClass | None:
    """Return the kind of wire of a join, as far as it and the device tell."""
    if join.startswith("NV") and join[2:].isdigit():
        known = nvlink_of(device_name)
        return known or CLASSES.get(_BY_LINKS.get(int(join[2:]), ""))
    if any(word in device_name for word in _PCIE_5):
        return CLASSES["pcie5"]
    return CLASSES["pcie4"] if "A100" in device_name else None


def _lines(text: str) -> list[str]:
    return [_STYLE.sub("", line) for line in text.splitlines()]


def _devices_of(line: str) -> list[int]:
    """Return the devices that the first line of a matrix names."""
    words = line.split()
    found = [int(match[1]) for word in words if (match := _GPU.match(word))]
    return found if found and not any(map(_JOIN.match, words)) and _GPU.match(words[0]) else []


def _read_topology(text: str, _data: Any, file: str) -> Log:
    """Read the part of the matrix that is about devices; network cards and processors stay out."""
    devices: list[int] = []
    joins: dict[Hop, str] = {}
    seen: list[int] = []
    for count, line in enumerate(_lines(text), 1):
        words = line.split()
        row = _GPU.match(words[0]) if words else None
        if not devices or row is None:
            devices = devices or _devices_of(line)
            continue
        seen.append(int(row[1]))
        cells = words[1 : len(devices) + 1]
        if len(cells) < len(devices) or not all(map(_JOIN.match, cells)):
            raise damaged(
                f"line {count}: not {len(devices)} joins, such as NV18 or SYS", file, _AS_PRINTED
            )
        joins |= {(seen[-1], other): cell for other, cell in zip(devices, cells, strict=True)}
    if not devices or seen != devices:
        raise damaged(f"{len(seen)} rows for {len(devices)} devices", file, _AS_PRINTED)
    for (here, there), how in joins.items():
        back = joins[there, here]
        if (here == there) != (how == "X") or back != how:
            raise damaged(
                f"GPU{here} to GPU{there} is {how}, and back it is {back}", file, _AS_PRINTED
            )
    joins = {pair: how for pair, how in joins.items() if how != "X"}
    return Log(
        file=file,
        program="nvidia-smi topo",
        columns=("from_device", "to_device", "join"),
        rows=tuple((*pair, how) for pair, how in joins.items()),
        joins=joins,
        of_wires=True,
    )


def _parts(
    text: str, part: re.Pattern[str], file: str
) -> Iterator[tuple[int, str, list[re.Match[str]]]]:
    """Yield each device, its name and what is printed of its links."""
    device: tuple[int, str, list[re.Match[str]]] | None = None
    for count, line in enumerate(_lines(text), 1):
        if found := _DEVICE.match(line):
            if device is not None:
                yield device
            device = int(found[1]), found[2], []
        elif found := part.match(line):
            if device is None:
                raise damaged(f"line {count}: link {found[1]} of no device", file, _AS_PRINTED)
            device[2].append(found)
        elif line.strip() and (part is _LINK or not line.lstrip().startswith("Link")):
            raise damaged(f"line {count}: neither a device nor a link", file, _AS_PRINTED)
    if device is not None:
        yield device


def _has(text: str, part: re.Pattern[str]) -> bool:
    lines = _lines(text)
    return any(map(_DEVICE.match, lines)) and any(map(part.match, lines))


def _read_status(text: str, _data: Any, file: str) -> Log:
    """Read which links of each device are up, and what they carry."""
    rows, cases = [], []
    for device, name, links in _parts(text, _LINK, file):
        if [int(link[1]) for link in links] != list(range(len(links))):
            raise damaged(f"GPU {device}: links are missing or out of turn", file, _AS_PRINTED)
        rates = [GB * number(link[2], file, f"GPU {device}") for link in links if link[2]]
        rows.append((device, name, len(rates), len(links), sum(rates)))
        down = len(links) - len(rates)
        cases.append(
            (
                0 < down < len(links),
                Code.LINKS_INACTIVE,
                f"GPU {device} ({name}): {counted(down, 'link')} of {len(links)} inactive",
                "see `nvidia-smi nvlink -e`; its hops cannot reach their rate",
            )
        )
    return Log(
        file=file,
        program="nvidia-smi nvlink",
        columns=("device", "name", "active", "links", "rate_bytes_per_s"),
        rows=tuple(rows),
        of_wires=True,
        doubts=doubts_about(file, *cases),
    )


def _read_errors(text: str, _data: Any, file: str) -> Log:
    """Read what went wrong on each link since its device was reset; counters at 0 are left out."""
    rows: list[tuple[int, str, int, int, str]] = []
    cases = []
    for device, name, counters in _parts(text, _COUNTER, file):
        risen = [
            (int(link), kind.lower(), int(errors))
            for link, kind, errors in (found.groups() for found in counters)
            if errors.strip("0").isdigit()
        ]
        rows += [(device, name, link, errors, kind) for link, kind, errors in risen]
        if risen:
            links = counted(len({counter[0] for counter in risen}), "link")
            link, kind, errors = max(risen, key=lambda counter: counter[2])
            most = f"most on link {link}: {counted(errors, kind.removesuffix('s'))}"
            cases.append(
                (
                    True,
                    Code.LINK_ERRORS,
                    f"GPU {device} ({name}): {links} with errors since the last reset, {most}",
                    "a link that sends again is slow now and then: look at its hops' tails",
                )
            )
    return Log(
        file=file,
        program="nvidia-smi nvlink -e",
        columns=("device", "name", "link", "errors", "kind"),
        rows=tuple(rows),
        of_wires=True,
        doubts=doubts_about(file, *cases),
    )


READERS = (
    LogReader(
        lambda text, data: data is None and any(map(_devices_of, _lines(text))), _read_topology
    ),
    LogReader(lambda text, data: data is None and _has(text, _COUNTER), _read_errors),
    LogReader(lambda text, data: data is None and _has(text, _LINK), _read_status),
)
