"""The answer of Prometheus's `/api/v1/query_range` in → counters of links that should not rise.

Of each counter of errors, replays or waits the increase is told, and in how many of its intervals
it rose: a link that is congested now and then looks otherwise than a broken one.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import msgspec

from debubble.errors import Code
from debubble.links.logs.log import Log, LogReader, damaged, doubts_about

# Of NVLink (DCGM's exporter) and InfiniBand (the node exporter).
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
    values: list[tuple[float, float]]


class _Data(msgspec.Struct):
    """What a range query found."""

    result: list[_Series]
    kind: str = msgspec.field(name="resultType", default="")


class _Answer(msgspec.Struct):
    """The answer of Prometheus."""

    data: _Data


def _tells(_text: str, data: Any) -> bool:
    inner = data.get("data") if data is not None else None
    return isinstance(inner, dict) and {"resultType", "result"} <= inner.keys()


def _read(_text: str, data: Any, file: str) -> Log:
    """Read the counters that tell of links; all others are passed over."""
    try:
        found = msgspec.convert(data, _Answer, strict=False).data
    except (msgspec.ValidationError, OverflowError) as error:
        raise damaged(f"no matrix of counters: {error}", file, _WHOLE) from error
    if found.kind != "matrix":
        raise damaged(f"a {found.kind or 'nameless'} and no matrix", file, _WHOLE)
    rows: list[tuple[str | int | None, ...]] = []
    cases = []
    for series in found.result:
        name, values = series.metric.get("__name__", ""), [value for _, value in series.values]
        if not _TELLING.search(name):
            continue
        # A counter that falls was reset: it began again at 0.
        rises = [after - before if after >= before else after for before, after in pairwise(values)]
        host, device = (
            next((series.metric[key] for key in keys if key in series.metric), None)
            for keys in (_HOSTS, _DEVICES)
        )
        increase, risen = round(sum(rises)), sum(rise > 0 for rise in rises)
        rows.append((device, host, name, increase, risen, len(rises)))
        where = " ".join(filter(None, (host, device and f"device {device}"))) or "a link"
        always = risen == len(rises)
        how = "all the time" if always else f"in {risen} of {len(rises)} intervals"
        comes = "congestion, or a link that comes and goes: look at its hops' tails"
        cases.append(
            (
                increase,
                Code.LINK_ERRORS,
                f"{where}: {name} rose by {increase}, {how}",
                "a link that is broken" if always else comes,
            )
        )
    if not rows:
        raise damaged(
            "no counter of a link's errors in it", file, "export NVLink's or InfiniBand's"
        )
    return Log(
        file=file,
        program="prometheus",
        columns=("device", "host", "name", "errors", "risen_intervals", "intervals"),
        rows=tuple(rows),
        of_wires=True,
        doubts=doubts_about(file, *cases),
    )


READERS = (LogReader(_tells, _read),)
