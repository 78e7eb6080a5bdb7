"""Output of SuperBench's gpu_copy in → GB/s by name."""

from __future__ import annotations

import re

from debubble.errors import LogError
from debubble.links.logs.model import CopyLog
from debubble.links.logs.numbers import RERUN, number

_FIGURE = re.compile(r"^((?:cpu|gpu\d+|gpu_all)_(?:to|and)_\S+)\s*(\S*)\s*(\S*)$")
_END = r"(?:cpu|gpu\d+|gpu_all)"
_NAME = re.compile(rf"^{_END}_(?:to|and)_{_END}_(?:(?:read|write)_)?by_(?:sm|dma)")


def is_gpu_copy(text: str) -> bool:
    """Tell whether this lists copies between devices."""
    return any(_FIGURE.match(line) for line in text.splitlines())


def read_gpu_copy(text: str, file: str) -> CopyLog:
    """Read a name and a figure a line."""
    rates: dict[str, float] = {}
    for count, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        found = _FIGURE.match(line.strip())
        if found is None or not _NAME.match(found[1]) or not found[2] or found[3]:
            raise LogError(
                f"line {count}: not the name of a copy and its figure", hint=RERUN, file=file
            )
        if found[1] in rates:
            raise LogError(f"line {count}: {found[1]} comes twice", hint=RERUN, file=file)
        rates[found[1]] = number(found[2], file, f"line {count}")
    return CopyLog(file=file, rates_gb_s=tuple(rates.items()))
