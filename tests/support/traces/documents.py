"""Kineto documents of recorded ranks, for tests that change them: loaded, looked through, saved."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

Event = dict[str, Any]
Document = dict[str, Any]
Documents = dict[int, Document]

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
_FILE = re.compile(r"rank-?(\d+)([._].*)?\.json(\.gz)?")


def load(path: Path) -> Document:
    """Return the trace of a recorded rank."""
    data = path.read_bytes()
    return msgspec.json.decode(gzip.decompress(data) if path.suffix == ".gz" else data)


def load_all(folder: Path) -> Documents:
    """Return the traces of a recording by rank, not what was measured beside them."""
    files = {
        int(name[1]): file for file in folder.iterdir() if (name := _FILE.fullmatch(file.name))
    }
    return {rank: load(files[rank]) for rank in sorted(files)}


def save(documents: Documents, folder: Path) -> None:
    """Write them as another recording."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, document in documents.items():
        packed = gzip.compress(msgspec.json.encode(document), 1)
        (folder / f"rank{rank}.json.gz").write_bytes(packed)


def is_compute(event: Event) -> bool:
    """Tell a kernel that is none of NCCL's."""
    return event.get("cat") == "kernel" and "nccl" not in event["name"].lower()


def on_device(document: Document) -> list[Event]:
    """Return what ran on the device, by its start."""
    work = [e for e in document["traceEvents"] if e.get("cat") in ON_DEVICE and e["ph"] == "X"]
    return sorted(work, key=lambda e: e["ts"])


def launches_of(document: Document) -> dict[int, Event]:
    """Return the calls that launched something, by correlation."""
    return {
        event["args"]["correlation"]: event
        for event in document["traceEvents"]
        if event.get("cat") in CALLS and "correlation" in event.get("args", {})
    }


def drop(document: Document, gone: Callable[[Event], bool]) -> None:
    """Leave events out."""
    document["traceEvents"] = [e for e in document["traceEvents"] if not gone(e)]


def drop_these(document: Document, events: Iterable[Event]) -> None:
    """Leave out these very events."""
    gone = {id(event) for event in events}
    drop(document, lambda event: id(event) in gone)
