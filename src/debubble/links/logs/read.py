"""A file in → the log in it, told by its content."""

from __future__ import annotations

import json
from typing import Any

from debubble.errors import LogError
from debubble.links.logs.messages import (
    is_flight_recorder,
    is_inspector,
    is_pickled_flight,
    read_flight_recorder,
    read_inspector,
    refuse_pickle,
)
from debubble.links.logs.model import Log
from debubble.links.logs.nccl import is_nccl_json, is_nccl_text, read_nccl_json, read_nccl_text
from debubble.links.logs.nvbandwidth import (
    is_gpu_copy,
    is_nvbandwidth_json,
    is_nvbandwidth_text,
    read_gpu_copy,
    read_nvbandwidth_json,
    read_nvbandwidth_text,
)
from debubble.links.logs.prometheus import is_prometheus, read_prometheus
from debubble.links.logs.topology import (
    is_nvlink_errors,
    is_nvlink_status,
    is_topology,
    read_nvlink_errors,
    read_nvlink_status,
    read_topology,
)
from debubble.trace.source import DEFAULT_LIMITS, Limits, Source

# The largest log that we have seen is 20 KB; traces are a thousand times as large.
MOST_BYTES = 16 * 1024**2
KNOWN = (
    "nccl-tests (text, or JSON by -J), nvbandwidth (text, or JSON by -j), SuperBench's gpu_copy,"
    " `nvidia-smi topo -m`, `nvidia-smi nvlink -s` and `-e`,"
    " range exports of Prometheus (DCGM's and InfiniBand's counters),"
    " JSON dumps of torch's flight recorder, lines of NCCL Inspector"
)


def read_text(file: str, limits: Limits = DEFAULT_LIMITS) -> str:
    """Return a file's text."""
    prefix = Source(file, limits).prefix(MOST_BYTES + 1)
    if len(prefix) > MOST_BYTES:
        raise LogError("larger than any log", hint=f"logs are of {KNOWN}", file=file)
    return prefix.decode("utf-8", errors="replace")


def looks_like_log(text: str) -> bool:
    """Tell whether one of the programs wrote this."""
    data = load_json(text)
    if data is not None:
        told = is_nccl_json(data) or is_nvbandwidth_json(data) or is_prometheus(data)
        return told or is_flight_recorder(data) or is_inspector(text)
    return any(tell(text) for tell, _ in _TEXTS)


def read_log(text: str, file: str) -> Log:
    """Read a log, whichever program wrote it."""
    data = load_json(text)
    if is_nccl_json(data):
        return read_nccl_json(data, file)
    if is_nvbandwidth_json(data):
        return read_nvbandwidth_json(data, file)
    if is_prometheus(data):
        return read_prometheus(data, file)
    if is_flight_recorder(data):
        return read_flight_recorder(data, file)
    for tell, read in _TEXTS:
        if tell(text):
            return read(text, file)
    if text.lstrip().startswith("{"):
        raise LogError(
            "JSON that is cut off or of another program", hint=f"logs are of {KNOWN}", file=file
        )
    raise LogError("no log of a link test", hint=f"logs are of {KNOWN}", file=file)


def load_json(text: str) -> Any:
    """Return what JSON says; None for anything else."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


_TEXTS = (
    (is_inspector, read_inspector),
    (is_pickled_flight, refuse_pickle),
    (is_nccl_text, read_nccl_text),
    (is_nvbandwidth_text, read_nvbandwidth_text),
    (is_topology, read_topology),
    (is_nvlink_errors, read_nvlink_errors),
    (is_nvlink_status, read_nvlink_status),
    (is_gpu_copy, read_gpu_copy),
)
