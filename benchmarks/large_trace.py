"""A recorded trace, multiplied in Kineto's own layout: as long a capture as one likes.

Each copy runs later and has its own correlations, so that kernels, launches and steps stay apart.
The recording has two ranks; ranks beyond them are further pipelines of two, as with parallel data.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path

from isal import igzip

RANKS = 2
RECORDED = Path(__file__).parents[1] / "tests" / "data" / "h200" / "1f1b_p2_m4"

_OPEN = b'"traceEvents": ['
_CLOSE = b"\n  ],"
# What a copy must not share with the copy before it.
_SHIFTED = re.compile(rb'("ts": |"correlation": |"id": |"External id": |ProfilerStep#)(\d+)')
_IDS_PER_COPY = 1_000_000
_US_PER_COPY = 1_000_000
# Metadata at the end of a file is written once, however long the capture was.
_TRAILER = b'  {\n    "name": "process_name", "ph": "M"'


def write_large_trace(path: Path, rank: int, copies: int) -> None:
    """Write `copies` recordings of a rank, one after the other, as one gzipped capture."""
    text = gzip.decompress((RECORDED / f"rank{rank % RANKS}.json.gz").read_bytes())
    text = _rename(text, rank)
    begin = text.index(_OPEN) + len(_OPEN)
    trailer = text.index(_TRAILER)
    head, events, tail = text[:begin], text[begin:trailer].rstrip(b", \n"), text[trailer:]
    path.parent.mkdir(parents=True, exist_ok=True)
    with igzip.open(path, "wb", compresslevel=2) as out:
        out.write(head)
        for copy in range(copies):
            out.write(_SHIFTED.sub(lambda match, copy=copy: _shift(match, copy), events) + b",\n")
        out.write(tail)


def _rename(text: bytes, rank: int) -> bytes:
    """Say that a recording is of another rank; peers are counted inside its group."""
    first = rank - rank % RANKS
    for said, meant in (
        (f'"rank": {rank % RANKS}, "world_size": 2', f'"rank": {rank}, "world_size": {first + 2}'),
        ('"ranks": [0, 1]', f'"ranks": [{first}, {first + 1}]'),
        ('"Process Group Ranks": "[0, 1]"', f'"Process Group Ranks": "[{first}, {first + 1}]"'),
    ):
        text = text.replace(said.encode(), meant.encode())
    return text


def _shift(match: re.Match[bytes], copy: int) -> bytes:
    what, number = match[1], int(match[2])
    step = {b'"ts": ': _US_PER_COPY, b"ProfilerStep#": 2}.get(what, _IDS_PER_COPY)
    return what + str(number + copy * step).encode()
