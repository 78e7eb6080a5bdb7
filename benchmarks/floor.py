"""The floor: inflate a trace and decode five fields of each event, in one piece, and nothing else.

`python benchmarks/floor.py FILE` prints the seconds it took.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
from isal import isal_zlib


class Event(msgspec.Struct, gc=False):
    """The five fields."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0


class Document(msgspec.Struct, gc=False):
    """The list of events."""

    traceEvents: list[Event]  # noqa: N815 (Kineto's spelling)


def main() -> None:
    began = time.perf_counter()
    data = isal_zlib.decompress(Path(sys.argv[1]).read_bytes(), wbits=31)
    document = msgspec.json.Decoder(Document).decode(data)
    seconds = time.perf_counter() - began
    print(seconds, len(document.traceEvents), len(data))


if __name__ == "__main__":
    main()
