"""What logs of link tests hold, whichever program wrote them."""

from __future__ import annotations

from dataclasses import dataclass

from debubble.links.expectation import Hop


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One measurement of a row: out of place, or in place."""

    time_us: float
    algbw_gb_s: float
    busbw_gb_s: float
    wrong: float | None
    """Elements that were wrong; None where that was not checked."""
    host_time: bool = False
    """The time is the host's alone (`-C 1`): it tells no bandwidth."""
    iterations: tuple[tuple[str, float], ...] = ()
    """Spread over iterations (`-I 1`), by the name of its column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclRow:
    """One message size."""

    size_bytes: int
    count: int
    kind: str
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
    average_gb_s: float
    out_of_bounds: int | None

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One test of nvbandwidth: a figure for each pair; None where none was taken."""

    name: str
    status: str
    unit: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    cells: tuple[tuple[float | None, ...], ...]
    total: float | None

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLog:
    """Copies of SuperBench's gpu_copy: GB/s by name."""

    file: str
    rates_gb_s: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """`nvidia-smi topo -m`: how each two devices of a host are joined, in its own words."""

    file: str
    joins: dict[Hop, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkStatus:
    """`nvidia-smi nvlink -s`: the links of each device in GB/s; None where inactive."""

    file: str
    devices: tuple[tuple[int, str, tuple[float | None, ...]], ...]


Log = NcclLog | MatrixLog | CopyLog | Topology | NvlinkStatus
