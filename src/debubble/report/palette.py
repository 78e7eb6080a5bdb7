"""How passes and waits look in every picture: a colour and, for waits, a hatch of its own.

What each wait looks like is in `ledger/causes.py`, beside all else that is known of its cause.

Colours are of Okabe and Ito's set, darkened where lines would be too faint, so that people who see
colours differently tell them apart. All of them stand on light and on dark ground. Colour is never
the only sign: passes carry letters or numbers, waits differ by hatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from debubble.ledger.causes import Cause
from debubble.timeline.model import PassKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What something is called and how it is drawn."""

    word: str
    colour: str
    hatch: str = ""
    """Of a wait, in a tile of `TILE` × `TILE`, as an SVG path; empty where it is filled."""


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

KINDS = {
    PassKind.F: Look(word="forward", colour="#56b4e9"),
    PassKind.B: Look(word="backward", colour="#009e73"),
    PassKind.I: Look(word="input gradient", colour="#e69f00"),
    PassKind.W: Look(word="weight gradient", colour="#f0e442"),
}


def hatch_path(bits: Sequence[int]) -> str:
    """Write a hatch as a path, one square a bit: the first bit is the leftmost."""
    return "".join(
        f"M{x} {y}h1v1h-1z" for y, row in enumerate(bits) for x in range(TILE) if row >> x & 1
    )


CAUSES = {
    cause: Look(
        word=cause.about.word, colour=cause.about.colour, hatch=hatch_path(cause.about.bits)
    )
    for cause in Cause
}
