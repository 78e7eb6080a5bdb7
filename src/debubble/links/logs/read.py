"""A file in → the log in it, told by its content."""

from __future__ import annotations

import json
from typing import Any

from debubble.errors import LogError
from debubble.links.logs import nccl_tests, nvbandwidth, nvidia_smi, prometheus, recorders
from debubble.links.logs.log import Log
from debubble.trace.source import DEFAULT_LIMITS, Source

# The largest log that we have seen is 20 KB; traces are a thousand times as large.
_MOST_BYTES = 16 * 1024**2
_KNOWN = (
    "nccl-tests and nvbandwidth (text),"
    " `nvidia-smi topo -m`, `nvidia-smi nvlink -s` and `-e`,"
    " range exports of Prometheus (DCGM's and InfiniBand's counters),"
    " JSON dumps of torch's flight recorder, lines of NCCL Inspector"
)
_READERS = (
    *recorders.READERS,
    *prometheus.READERS,
    *nccl_tests.READERS,
    *nvbandwidth.READERS,
    *nvidia_smi.READERS,
)


def read_text(file: str) -> str:
    """Return a file's text."""
    prefix = Source(file, DEFAULT_LIMITS).prefix(_MOST_BYTES + 1)
    if len(prefix) > _MOST_BYTES:
        raise LogError("larger than any log", hint=f"logs are of {_KNOWN}", file=file)
    return prefix.decode("utf-8", errors="replace")


def looks_like_log(text: str) -> bool:
    """Tell whether one of the programs wrote this."""
    data = load_json(text)
    return any(reader.tells(text, data) for reader in _READERS)


def read_log(text: str, file: str) -> Log:
    """Read a log, whichever program wrote it."""
    data = load_json(text)
    for reader in _READERS:
        if reader.tells(text, data):
            return reader.read(text, data, file)
    cut = text.lstrip().startswith("{")
    why = "JSON that is cut off or of another program" if cut else "no log of a link test"
    raise LogError(why, hint=f"logs are of {_KNOWN}", file=file)


def load_json(text: str) -> Any:
    """Return what JSON says; None for anything else."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
