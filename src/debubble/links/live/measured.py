"""What the ranks of a hop test measured, as a file: written by its first rank, read by `links`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

from debubble.errors import LogError
from debubble.links.expectation import Hop

SCHEMA = "debubble.links.measured/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of some messages."""

    alone_s: float
    """A tenth of them are quicker, as in traces: what the wire takes with nothing beside it."""
    quick_s: float
    """A quarter of them are quicker."""
    median_s: float
    p95_s: float
    n: int


def times_of(seconds: Sequence[float]) -> Times:
    """Sum up the seconds of some messages, two or more."""
    quick, middle, _ = quantiles(seconds, n=4, method="inclusive")
    return Times(
        alone_s=quantiles(seconds, n=10, method="inclusive")[0],
        quick_s=quick,
        median_s=middle,
        p95_s=quantiles(seconds, n=20, method="inclusive")[-1],
        n=len(seconds),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """Messages of one size over one hop."""

    source: int
    destination: int
    size_bytes: int
    one_way: Times
    both_ways: Times | None
    """None where only one way was measured."""

    @property
    def hop(self) -> Hop:
        """The rank that sends and the rank that receives."""
        return self.source, self.destination


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank runs."""

    rank: int
    host: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A hop test."""

    backend: str
    job_bytes: int | None
    """The size that the job itself sends."""
    places: tuple[Place, ...]
    rungs: tuple[Rung, ...]
    second: tuple[Rung, ...]
    """Slow hops once more, and their ends with other partners."""


def write_measured(measured: Measured) -> str:
    """Write a test as JSON."""
    return json.dumps({"schema": SCHEMA, **asdict(measured)}, indent=1)


def is_measured(data: Any) -> bool:
    """Tell whether a hop test wrote this."""
    return isinstance(data, dict) and data.get("schema") == SCHEMA


def read_measured(data: dict[str, Any], file: str) -> Measured:
    """Read a test."""
    try:
        return Measured(
            backend=str(data["backend"]),
            job_bytes=None if data["job_bytes"] is None else int(data["job_bytes"]),
            places=tuple(
                Place(rank=int(one["rank"]), host=str(one["host"]), device=str(one["device"]))
                for one in data["places"]
            ),
            rungs=tuple(_rungs(data["rungs"])),
            second=tuple(_rungs(data["second"])),
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise LogError(
            f"a hop test that is damaged ({type(error).__name__}: {error})",
            hint="run it again: torchrun … -m debubble.links",
            file=file,
        ) from error


def _rungs(rows: Iterable[dict[str, Any]]) -> Iterable[Rung]:
    for row in rows:
        yield Rung(
            source=int(row["source"]),
            destination=int(row["destination"]),
            size_bytes=int(row["size_bytes"]),
            one_way=_times(row["one_way"]),
            both_ways=None if row["both_ways"] is None else _times(row["both_ways"]),
        )


def _times(row: dict[str, Any]) -> Times:
    return Times(
        alone_s=float(row.get("alone_s", row["quick_s"])),
        quick_s=float(row["quick_s"]),
        median_s=float(row["median_s"]),
        p95_s=float(row["p95_s"]),
        n=int(row["n"]),
    )
