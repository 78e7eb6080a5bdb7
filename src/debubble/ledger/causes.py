"""Every cause, once: what it is called, what puts it right, how it looks and what is said of it.

Causes are members of `Cause`; the four before the last only streams have. Which stretches of a wait
are whose is cut in `account.py`, of streams in `serving/account.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from debubble.ledger.savings import Remedies, Remedy


class RootKind(IntEnum):
    """What a wait comes down to in the end: something that is not itself waiting."""

    PASS = 0
    MESSAGE = 1
    HOST = 2
    NOTHING = 3
    HOST_SYNC = 4
    """A host that had been kept until its device was done, and had yet to issue what runs next."""
    COLLECTIVE = 5
    DATA_PARALLEL = 6
    """A gather or reduction that runs beside passes, and that the next one waits for."""
    WAY_BACK = 7
    """Of a served batch: what a sampled token takes to the scheduler."""
    NO_WORK = 8
    """A server's scheduler that has had time enough, and nothing to send out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What belongs to a cause."""

    key: str
    word: str = ""
    """In pictures and their legends, where it is not the key."""
    meaning: str
    """What a rank waits for, in a few words."""
    remedy: Remedy | None = None
    """The lengths of a step without it; None where nothing can be put right by itself."""
    remedied: str = ""
    """The step with that put right, as in "balanced stages: saves 3 ms"."""
    blames: str = ""
    """Whose it mostly is: a sentence with {rank}, {hop} and, for a framework's own, {setting}."""
    bottleneck: str = ""
    """What it is called where it takes more than all waiting; empty where it is waiting itself."""
    colour: str
    """On light and dark ground; see `report/palette.py`."""
    ink: str
    """Of its hatch."""
    bits: tuple[int, ...] = ()
    """That hatch, in every picture: eight rows of eight bits; nothing for a plain ground."""
    dark: tuple[str, str] | None = None
    """Fill and ink in the dark, where those of the light would shout."""
    sign: str = ""
    """Its letter in lanes of text."""
    style: str = "dim"
    """Of that letter, on a terminal with colours."""


class Cause(StrEnum):
    """What a nanosecond was spent on. What remains is unexplained, never folded into another."""

    about: About

    def __new__(cls, about: About) -> Cause:  # noqa: PYI034 (an enum cannot be derived from)
        """Be the key, and know the rest."""
        cause = str.__new__(cls, about.key)
        cause._value_ = about.key
        cause.about = about
        return cause

    @property
    def word(self) -> str:
        """What it is called in pictures and their legends."""
        return self.about.word or self.replace("_", " ")

    COMPUTE = About(
        key="compute",
        meaning="computing",
        colour="#5f86a8",
        ink="#000000",
    )
    COLLECTIVE_WAIT = About(
        key="collective_wait",
        meaning="waiting in a collective for its last member",
        bottleneck="waiting for late ranks in collectives",
        colour="#8d6d3c",
        ink="#2a1d03",
        bits=(0xAA, 0x00, 0x55, 0x00, 0xAA, 0x00, 0x55, 0x00),
    )
    COLLECTIVE = About(
        key="collective",
        meaning="a collective inside a pass",
        remedy=Remedies.no_collectives,
        remedied="without collectives inside passes",
        blames="collectives inside passes take time, most on rank {rank}",
        bottleneck="collectives inside passes",
        colour="#b08a4e",
        ink="#3d2a05",
        bits=(0xF0, 0x00, 0x00, 0x00, 0x0F, 0x00, 0x00, 0x00),
    )
    DATA_PARALLEL = About(
        key="data_parallel",
        meaning="parameter gathers and gradient reductions",
        remedy=Remedies.no_data_parallel,
        remedied="data-parallel communication fully overlapped",
        blames="ranks wait for parameter gathers and gradient reductions, most on rank {rank}",
        bottleneck="exposed data-parallel communication",
        colour="#a05c86",
        ink="#ffe9f5",
        bits=(0x10, 0x38, 0x10, 0x00, 0x01, 0x83, 0x01, 0x00),
        sign="+",
    )
    WARM_UP = About(
        key="warm_up",
        word="warm-up",
        meaning="schedule: before the first pass",
        colour="#c9ced6",
        ink="#5c6672",
        bits=(0x88, 0x44, 0x22, 0x11, 0x88, 0x44, 0x22, 0x11),
        dark=("#3d4651", "#8b96a3"),
        sign="<",
    )
    TURNAROUND = About(
        key="turnaround",
        meaning="schedule: between passes",
        colour="#dfe3e8",
        ink="#5c6672",
        bits=(0x00, 0x22, 0x00, 0x00, 0x00, 0x88, 0x00, 0x00),
        dark=("#2b333c", "#8b96a3"),
        sign="·",
    )
    DRAIN = About(
        key="drain",
        meaning="schedule: after the last pass",
        colour="#c9ced6",
        ink="#5c6672",
        bits=(0x11, 0x22, 0x44, 0x88, 0x11, 0x22, 0x44, 0x88),
        dark=("#3d4651", "#8b96a3"),
        sign=">",
    )
    IMBALANCE = About(
        key="imbalance",
        meaning="a stage longer than the average stage",
        remedy=Remedies.equal_stages,
        remedied="balanced stages",
        colour="#d55e00",
        ink="#521f00",
        bits=(0x81, 0x42, 0x24, 0x18, 0x18, 0x24, 0x42, 0x81),
        sign="!",
        style="red",
    )
    WORKER = About(
        key="worker",
        word="slow worker",
        meaning="a device slower than its peers",
        remedy=Remedies.sound_workers,
        remedied="without slow devices",
        colour="#8f4fc4",
        ink="#2a0a45",
        bits=(0xFF, 0x81, 0xBD, 0xA5, 0xA5, 0xBD, 0x81, 0xFF),
        sign="#",
        style="bold red",
    )
    DATA = About(
        key="data",
        word="uneven data",
        meaning="a microbatch that is slow on every stage",
        remedy=Remedies.spread_data,
        remedied="sequences balanced over microbatches",
        colour="#6a8f1f",
        ink="#1e2b04",
        bits=(0x01, 0x01, 0x11, 0x11, 0x55, 0x55, 0x55, 0xFF),
        sign="$",
        style="magenta",
    )
    JITTER = About(
        key="jitter",
        meaning="a pass longer than its median",
        remedy=Remedies.no_jitter,
        remedied="without jitter",
        blames="pass times of rank {rank} vary",
        colour="#b0568c",
        ink="#2b0a1e",
        bits=(0x22,) * 8,
        sign="~",
        style="magenta",
    )
    TRANSFER = About(
        key="transfer",
        meaning="a message in transfer",
        remedy=Remedies.free_wire,
        remedied="zero-cost transfers",
        blames="ranks wait for transfers, most over {hop}",
        colour="#2a7ab8",
        ink="#04233c",
        bits=(0xFF, 0x00, 0x00, 0x00) * 2,
        sign="=",
    )
    SLOW_LINK = About(
        key="slow_link",
        meaning="a transfer slower than its peers",
        remedy=Remedies.expected_wires,
        remedied="without slow transfers",
        blames="some transfers are slow outliers, most over {hop}",
        colour="#d1342f",
        ink="#ffe3e0",
        bits=(0xCC, 0x66, 0x33, 0x99, 0xCC, 0x66, 0x33, 0x99),
        sign="%",
        style="bold red",
    )
    HOST = About(
        key="host",
        meaning="a host that launches too late",
        remedy=Remedies.no_host,
        remedied="without late launches",
        blames="the host of rank {rank} launches kernels too late",
        bottleneck="late kernel launches",
        colour="#b07000",
        ink="#3a2400",
        bits=(0xFF, 0x80, 0x80, 0x80, 0xFF, 0x08, 0x08, 0x08),
        sign="^",
        style="yellow",
    )
    HOST_SYNC = About(
        key="host_sync",
        meaning="a host blocked in a device synchronisation",
        remedy=Remedies.no_sync,
        remedied="without host synchronisation",
        blames="hosts block on device synchronisation{setting}, most on rank {rank}",
        bottleneck="host synchronisation",
        colour="#9a6a1c",
        ink="#f6e3c4",
        bits=(0x66, 0x66, 0x7E, 0x66) * 2,
        sign="&",
        style="yellow",
    )
    IN_FLIGHT = About(
        key="in_flight",
        word="too few in flight",
        meaning="too few batches in flight",
        remedied="one batch in flight per stage",
        blames="too few batches are in flight",
        colour="#7f8fa6",
        ink="#1d2733",
        bits=(0xF0, 0xF0, 0xF0, 0xF0, 0x00, 0x00, 0x00, 0x00),
        sign="o",
    )
    UNEVEN = About(
        key="uneven",
        word="uneven batches",
        meaning="a batch larger than the one before it",
        remedied="batches of equal size",
        blames="batches differ in size: small ones wait behind large ones",
        colour="#b87a2b",
        ink="#3b2304",
        bits=(0x07, 0x07, 0x07, 0x00, 0x70, 0x70, 0x70, 0x00),
        sign="u",
        style="yellow",
    )
    WAY_BACK = About(
        key="way_back",
        meaning="a sampled token returning to the scheduler",
        remedied="zero-cost way back",
        blames="stages wait for sampled tokens to return from the last stage to the scheduler",
        colour="#4f9a94",
        ink="#06302c",
        bits=(0x00, 0x7E, 0x00, 0x18, 0x00, 0x7E, 0x00, 0x18),
        sign="↩",
    )
    TOKEN_BROADCAST = About(
        key="token_broadcast",
        meaning="the broadcast of sampled tokens",
        remedied="non-blocking token broadcasts",
        blames="messages and kernels queue behind the broadcast of sampled tokens",
        colour="#3f8f6b",
        ink="#04301d",
        bits=(0x18, 0x18, 0x7E, 0x7E, 0x18, 0x18, 0x00, 0x00),
        sign="b",
    )
    NO_WORK = About(
        key="no_work",
        meaning="no request to serve",
        remedied="enough requests for every stage",
        blames="there are too few requests",
        colour="#eceff2",
        ink="#5c6672",
        bits=(0x00, 0x00, 0x10, 0x00, 0x00, 0x00, 0x01, 0x00),
        dark=("#232a31", "#8b96a3"),
        sign="_",
    )
    UNEXPLAINED = About(
        key="unexplained",
        meaning="unknown",
        colour="#7d7d7d",
        ink="#f2f2f2",
        bits=(0xCC, 0xCC, 0x33, 0x33) * 2,
        sign="?",
        style="bold",
    )


CAUSES = tuple(Cause)
CAUSE_OF = {cause.about.key: cause for cause in CAUSES}
NUMBER_OF = {cause: number for number, cause in enumerate(CAUSES)}
OF_KERNELS_AND_HOSTS = frozenset(
    {"host", "host_sync", "collective", "collective_wait", "data_parallel"}
)
"""What a job's own timers do not show: it is neither named nor priced where they are all there is.
"""
# What is put right to remove each cause; of passes themselves last.
REMEDIES: dict[Cause, Remedy] = {
    cause: cause.about.remedy
    for cause in sorted(CAUSES, key=lambda cause: cause in {"collective", "data_parallel"})
    if cause.about.remedy is not None
}
