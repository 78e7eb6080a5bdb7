"""A file in → the log in it, told by its content.

The answer of Prometheus's `/api/v1/query_range` is read here: a matrix of counters, each with its
labels and its values over time. Of each counter of errors, replays or waits the increase is told,
and in how many of its intervals it rose: a link that is congested now and then looks otherwise than
a broken one.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import msgspec

from debubble.errors import LogError
from debubble.links.logs.messages import (
    is_flight_recorder,
    is_inspector,
    is_pickled_flight,
    read_flight_recorder,
    read_inspector,
    refuse_pickle,
)
from debubble.links.logs.model import Counter, CounterLog, Log, damaged
from debubble.links.logs.nccl import is_nccl_json, is_nccl_text, read_nccl_json, read_nccl_text
from debubble.links.logs.nvidia import (
    is_gpu_copy,
    is_nvbandwidth_json,
    is_nvbandwidth_text,
    is_nvlink_errors,
    is_nvlink_status,
    is_topology,
    read_gpu_copy,
    read_nvbandwidth_json,
    read_nvbandwidth_text,
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
    except (ValueError, RecursionError):
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


# Of NVLink (DCGM's exporter) and InfiniBand (the node exporter): counters that should not rise.
_TELLING = re.compile(
    r"NVLINK.*(?:ERROR|REPLAY|RECOVERY|CRC)|PCIE_REPLAY"
    r"|infiniband.*(?:error|discard|drop|downed|wait|retrans|out_of_sequence|timeout)"
    r"|rdma.*(?:error|retrans|out_of_sequence|timeout|cnp)",
    re.IGNORECASE,
)
_HOSTS = ("Hostname", "hostname", "node", "instance", "exported_instance")
_DEVICES = ("gpu", "device", "port", "UUID")
_WHOLE = "give what /api/v1/query_range answered, as it is"


class _Series(msgspec.Struct):
    """One counter over time."""

    metric: dict[str, str]
    values: list[tuple[float, str]]


class _Data(msgspec.Struct):
    """What a range query found."""

    result: list[_Series]
    kind: str = msgspec.field(name="resultType", default="")


class _Answer(msgspec.Struct):
    """The answer of Prometheus."""

    data: _Data
    status: str = ""


def is_prometheus(data: Any) -> bool:
    """Tell whether Prometheus answered this."""
    inner = data.get("data") if isinstance(data, dict) else None
    return isinstance(inner, dict) and {"resultType", "result"} <= inner.keys()


def read_prometheus(data: Any, file: str) -> CounterLog:
    """Read the counters that tell of links; all others are passed over."""
    try:
        said = msgspec.convert(data, _Answer, strict=False)
    except (msgspec.ValidationError, OverflowError) as error:
        raise damaged(f"no matrix of counters: {error}", file, _WHOLE) from error
    if said.data.kind != "matrix":
        raise damaged(f"a {said.data.kind or 'nameless'} and no matrix", file, _WHOLE)
    counters = []
    for series in said.data.result:
        name = series.metric.get("__name__", "")
        if not _TELLING.search(name):
            continue
        try:
            values = [float(value) for _, value in series.values]
        except ValueError as error:
            raise damaged(f"{name}: {error}", file, _WHOLE) from error
        # A counter that falls was reset: it began again at 0.
        rises = [after - before if after >= before else after for before, after in pairwise(values)]
        counters.append(
            Counter(
                name=name,
                host=next((series.metric[key] for key in _HOSTS if key in series.metric), None),
                device=next((series.metric[key] for key in _DEVICES if key in series.metric), None),
                increase=round(sum(rises)),
                intervals=len(rises),
                risen_intervals=sum(rise > 0 for rise in rises),
            )
        )
    if not counters:
        raise damaged(
            "no counter of a link's errors in it", file, "export NVLink's or InfiniBand's"
        )
    return CounterLog(file=file, counters=tuple(counters))
