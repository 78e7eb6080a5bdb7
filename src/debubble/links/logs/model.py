"""The types that logs of link tests become; words of a log in → numbers that fit together."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import msgspec

from debubble.errors import LogError
from debubble.links.hop_times import GB, Hop
from debubble.units import NS_PER_S


class Half(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of nccl-tests: out of place, or in place."""

    time_s: float
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    wrong: float | None
    """Elements that were wrong; None where that was not checked."""
    host_time: bool = False
    """The time is the host's alone (`-C 1`): it tells no bandwidth."""
    iterations: dict[str, float] = {}
    """Spread over iterations (`-I 1`), by the name of its column."""


class NcclRow(msgspec.Struct, frozen=True, kw_only=True):
    """One size of messages of nccl-tests."""

    bytes: int
    out_of_place: Half | None
    in_place: Half | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRank:
    """A rank of the test and its device."""

    rank: int
    group: int
    host: str
    device: int
    device_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLog:
    """What one program of nccl-tests printed, as text or JSON."""

    file: str
    test: str
    """Such as `sendrecv_perf`; empty where the log does not tell."""
    version: str
    ranks: tuple[LogRank, ...]
    rows: tuple[NcclRow, ...]
    average_bytes_per_s: float
    out_of_bounds: int | None

    @property
    def halves(self) -> list[Half]:
        """All measurements."""
        pairs = ((row.out_of_place, row.in_place) for row in self.rows)
        return [half for pair in pairs for half in pair if half is not None]

    @property
    def is_send_and_receive(self) -> bool:
        """Whether ranks passed messages to each other, in a ring."""
        return self.test.startswith("sendrecv")

    @property
    def pair(self) -> Hop | None:
        """The two ranks of a test that had just two; a larger ring names no hop."""
        if self.is_send_and_receive and len(self.ranks) == 2:
            return self.ranks[0].rank, self.ranks[1].rank
        return None


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """One test of nvbandwidth: a figure for each pair; None where none was taken."""

    name: str
    status: str
    unit: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    cells: tuple[tuple[float | None, ...], ...]
    sum: float | None

    @property
    def by_copy_engine(self) -> bool:
        """NCCL sends with kernels; copy engines do not, and are quicker."""
        return self.name.endswith("_ce")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixLog:
    """What nvbandwidth printed, as text or JSON."""

    file: str
    version: str
    tests: tuple[Matrix, ...]
    cut: str
    """What shows that tests may be missing; empty where it begins and ends as nvbandwidth does."""

    @property
    def by_copy_engine(self) -> bool:
        """Whether any figures are of copy engines."""
        return any(test.by_copy_engine and test.cells for test in self.tests)


class CopyLog(msgspec.Struct, frozen=True, kw_only=True, tag_field="program", tag="gpu_copy"):
    """A log of SuperBench's gpu_copy."""

    file: str
    bytes_per_s: dict[str, float]

    @property
    def by_copy_engine(self) -> bool:
        """Whether any figures are of copy engines."""
        return any("by_dma" in name for name in self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """`nvidia-smi topo -m`: how each two devices of a host are joined, in its own words."""

    file: str
    joins: dict[Hop, str]


class NvlinkDevice(msgspec.Struct, frozen=True, kw_only=True):
    """The links of a device; None where one is inactive."""

    device: int
    name: str
    links_bytes_per_s: tuple[float | None, ...]


class NvlinkStatus(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="program", tag="nvidia-smi nvlink"
):
    """What `nvidia-smi nvlink -s` printed."""

    file: str
    devices: tuple[NvlinkDevice, ...]


class LinkErrors(msgspec.Struct, frozen=True, kw_only=True):
    """One counter of one link of a device."""

    device: int
    name: str
    link: int
    kind: str
    errors: int


class NvlinkErrors(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="program", tag="nvidia-smi nvlink -e"
):
    """What `nvidia-smi nvlink -e` printed: what went wrong since each device was reset."""

    file: str
    counters: tuple[LinkErrors, ...]


class Counter(msgspec.Struct, frozen=True, kw_only=True):
    """One counter of a link's errors over some time."""

    name: str
    host: str | None
    device: str | None
    increase: int
    intervals: int
    risen_intervals: int
    """Those between two values in which it rose."""


class CounterLog(msgspec.Struct, frozen=True, kw_only=True, tag_field="program", tag="prometheus"):
    """What Prometheus answered to a range query: counters of NVLink or InfiniBand."""

    file: str
    counters: tuple[Counter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a job, as one side of it saw it."""

    hop: Hop
    sent: bool
    """Seen by its sender; else by its receiver."""
    size_bytes: int
    time_ns: float
    """What its kernel took, with what it waited for the other side."""
    alone: bool
    """The time is its own; else of all that were called together."""


class MessagesOfHop(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of one hop in a log, as one side saw them."""

    from_rank: int
    to_rank: int
    seen_by: str
    """`sender` or `receiver`."""
    messages: int
    bytes: int
    """The largest."""
    median_s: float
    """Of the largest, with what their kernels waited for the other side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLog:
    """What a recorder beside a job tells of its messages."""

    file: str
    program: str
    messages: tuple[Message, ...]

    @property
    def hops(self) -> list[MessagesOfHop]:
        """What it tells of each hop, by the side that saw it."""
        rows = []
        for hop, sent in sorted({(message.hop, message.sent) for message in self.messages}):
            mine = [m for m in self.messages if (m.hop, m.sent) == (hop, sent)]
            size = max(message.size_bytes for message in mine)
            times = [message.time_ns for message in mine if message.size_bytes == size]
            rows.append(
                MessagesOfHop(
                    from_rank=hop[0],
                    to_rank=hop[1],
                    seen_by="sender" if sent else "receiver",
                    messages=len(mine),
                    bytes=size,
                    median_s=statistics.median(times) / NS_PER_S,
                )
            )
        return rows


Log = (
    NcclLog | MatrixLog | CopyLog | Topology | NvlinkStatus | NvlinkErrors | CounterLog | MessageLog
)

_NOT_AVAILABLE = frozenset({"N/A", "n/a", "NA"})
RERUN = "run the test again, or give the whole log"
# Rates are printed with two digits after the point, times with as few as three in all.
ROUNDED_GB_S = 0.0051
_ROUNDED_SHARE = 0.006
_AVERAGE_SHARE = 0.001
# An exabyte less one has so many; longer ones are garbage that no float holds in the end.
_MOST_DIGITS = 18


def damaged(message: str, file: str, hint: str = RERUN) -> LogError:
    """Return the error of a log that cannot be read as it is."""
    return LogError(message, hint=hint, file=file)


def number(word: str, file: str, where: str) -> float:
    """Read a number."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise damaged(f"{where}: {word!r} is no number", file)
    return value


def whole(word: str, file: str, where: str) -> int:
    """Read a whole number, 0 or more."""
    if not word.isdecimal() or len(word) > _MOST_DIGITS:
        raise damaged(f"{where}: {word!r} is no whole number", file)
    return int(word)


def number_or_none(word: str, file: str, where: str) -> float | None:
    """Read a number, or nothing where the test says that it has none."""
    return None if word in _NOT_AVAILABLE else number(word, file, where)


def checked_half(size: int, half: Half, file: str, where: str) -> Half:
    """Hold the rate against size and time: columns that changed places do not fit together."""
    if min(half.time_s, half.algbw_bytes_per_s, half.busbw_bytes_per_s) < 0:
        raise damaged(f"{where}: a figure below 0", file)
    if half.wrong is not None and half.wrong != int(half.wrong):
        raise damaged(f"{where}: {half.wrong:g} is no count of elements", file)
    rate, told = size / half.time_s if half.time_s else 0.0, half.algbw_bytes_per_s
    if abs(rate - told) > ROUNDED_GB_S * GB + _ROUNDED_SHARE * max(rate, told):
        raise damaged(
            f"{where}: {size} bytes in {half.time_s * 1e6:g} us are {rate / GB:.2f} GB/s, and algbw"
            f" says {told / GB:g}",
            file,
            "columns are missing or changed places; give the log as nccl-tests wrote it",
        )
    return half


def checked_log(log: NcclLog) -> NcclLog:
    """Hold the rows against the average of the last line: rows that are missing do not add up."""
    if not log.halves:
        raise damaged("no sizes were measured", log.file)
    mean = sum(half.busbw_bytes_per_s for half in log.halves) / len(log.halves)
    told = log.average_bytes_per_s
    if abs(mean - told) > ROUNDED_GB_S * GB + _AVERAGE_SHARE * max(mean, told):
        raise damaged(
            f"the rows average {mean / GB:.3f} GB/s, and the log says {told / GB:g}",
            log.file,
            "rows are missing or altered; give the log as nccl-tests wrote it",
        )
    return log
