"""A range export of Prometheus in → what went wrong on links, and when: DCGM's and InfiniBand's.

The answer of `/api/v1/query_range`: a matrix of counters, each with its labels and its values over
time. Of each counter of errors, replays or waits the increase is told, and in how many of its
intervals it rose: a link that is congested now and then looks otherwise than a broken one.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import msgspec

from debubble.links.logs.model import Counter, CounterLog, damaged

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
                host=next((series.metric[key] for key in _HOSTS if key in series.metric), ""),
                device=next((series.metric[key] for key in _DEVICES if key in series.metric), ""),
                increase=round(sum(rises)),
                intervals=len(rises),
                risen=sum(rise > 0 for rise in rises),
            )
        )
    if not counters:
        raise damaged(
            "no counter of a link's errors in it", file, "export NVLink's or InfiniBand's"
        )
    return CounterLog(file=file, counters=tuple(counters))
