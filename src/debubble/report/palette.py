"""How passes and waits look in every picture: a colour and, for waits, a hatch of its own.

Colours are of Okabe and Ito's set, darkened where lines would be too faint, so that people who see
colours differently tell them apart. All of them stand on light and on dark ground. Colour is never
the only sign: passes carry letters or numbers, waits differ by hatch.
"""

from __future__ import annotations

from dataclasses import dataclass

from debubble.ledger.model import Cause
from debubble.timeline.model import PassKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What something is called and how it is drawn."""

    word: str
    colour: str
    hatch: str = ""
    """Strokes in a tile of `TILE` × `TILE`, as an SVG path; empty where it is filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a picture is drawn on, and what its words are written with."""

    page: str
    ink: str
    muted: str
    line: str


TILE = 8
LIGHT = Ground(page="#ffffff", ink="#1f2328", muted="#59636e", line="#d1d9e0")
DARK = Ground(page="#0d1117", ink="#f0f6fc", muted="#9198a1", line="#3d444d")
# Written on passes, in light and dark alike.
LABEL_INK = "#000000"

_GREY = "#767b82"

KINDS = {
    PassKind.F: Look(word="forward", colour="#56b4e9"),
    PassKind.B: Look(word="backward", colour="#009e73"),
    PassKind.I: Look(word="input gradient", colour="#e69f00"),
    PassKind.W: Look(word="weight gradient", colour="#f0e442"),
}
CAUSES = {
    Cause.COMPUTE: Look(word="compute", colour="#56b4e9"),
    Cause.COLLECTIVE: Look(word="collective", colour="#cc79a7"),
    Cause.DATA_PARALLEL: Look(word="data parallel", colour="#a05c86", hatch="M0 4h8M4 0v8"),
    Cause.WARM_UP: Look(word="warm-up", colour=_GREY, hatch="M-1 9L9 -1M-1 1L1 -1M7 9L9 7"),
    Cause.TURNAROUND: Look(word="turnaround", colour=_GREY, hatch="M1 2h2M5 6h2"),
    Cause.DRAIN: Look(word="drain", colour=_GREY, hatch="M-1 -1L9 9M-1 7L1 9M7 -1L9 1"),
    Cause.IMBALANCE: Look(word="imbalance", colour="#d55e00", hatch="M-1 -1L9 9M-1 9L9 -1"),
    Cause.JITTER: Look(word="jitter", colour="#b0568c", hatch="M0 6L2 2L6 6L8 2M0 6L-2 2"),
    Cause.TRANSFER: Look(word="transfer", colour="#2a7ab8", hatch="M0 2h8M0 6h8"),
    Cause.SLOW_LINK: Look(word="slow link", colour="#d1342f", hatch="M0 1h8M0 2h8M0 5h8M0 6h8"),
    Cause.HOST: Look(word="host", colour="#b07000", hatch="M2 0v8M6 0v8"),
    Cause.HOST_SYNC: Look(word="host sync", colour="#9a6a1c", hatch="M2 0v8M6 0v8M0 4h8"),
    Cause.UNEXPLAINED: Look(word="unexplained", colour=_GREY, hatch="M4 0v8M0 4h8"),
}
