"""How passes and waits look in every picture, and what they are drawn on.

What a wait looks like is in `ledger/causes.py`, beside all else that is known of its cause. Colours
of passes are of Okabe and Ito's set, so that people who see colours differently tell them apart.
Colour is never the only sign: passes carry letters or stripes, waits differ by hatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from debubble.ledger.causes import Cause
from debubble.timeline.model import PassKind

# What text, lines and grounds look like; in the report the names are CSS variables.
LIGHT = {
    "ground": "#ffffff",
    "panel": "#f5f7f9",
    "text": "#1b2128",
    "muted": "#55606b",
    "line": "#d3dae1",
    "accent": "#0a5c96",
    "good": "#116b3c",
    "bad": "#a8320a",
}
DARK = {
    "ground": "#12161b",
    "panel": "#1a2027",
    "text": "#e7ecf1",
    "muted": "#a3afba",
    "line": "#36404a",
    "accent": "#6cb8ee",
    "good": "#67cf94",
    "bad": "#ff9468",
}
# Written on passes, in light and dark alike.
LABEL_INK = "#000000"
TILE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How one kind of pass is drawn."""

    word: str
    fill: str
    stripe: str
    """Where the report draws a stripe on it: top, bottom, both or nowhere."""


KINDS = {
    PassKind.F: Look(word="forward", fill="#56b4e9", stripe=""),
    PassKind.B: Look(word="backward", fill="#009e73", stripe="bottom"),
    PassKind.I: Look(word="input gradient", fill="#e69f00", stripe="top"),
    PassKind.W: Look(word="weight gradient", fill="#f0e442", stripe="both"),
}


def colours_of(cause: Cause, *, in_dark: bool = False) -> tuple[str, str]:
    """Return the fill of a cause, and the ink of its hatch."""
    about = cause.about
    return about.dark if in_dark and about.dark else (about.colour, about.ink)


def cause_rules(causes: Iterable[Cause], *, in_dark: bool = False) -> str:
    """Write the style that `hatch_patterns` needs."""
    return "".join(
        f".c-{cause}{{fill:{fill}}}.i-{cause}{{fill:{ink}}}"
        for cause, (fill, ink) in ((cause, colours_of(cause, in_dark=in_dark)) for cause in causes)
    )


def hatch_path(cause: Cause) -> str:
    """Write the hatch of a cause as a path, one square a bit: the first bit is the leftmost."""
    rows = enumerate(cause.about.bits)
    return "".join(f"M{x} {y}h1v1h-1z" for y, row in rows for x in range(TILE) if row >> x & 1)


def hatch_patterns(causes: Iterable[Cause]) -> str:
    """Define tiles of causes, to be filled with as `url(#h-CAUSE)`."""
    tile = f'width="{TILE}" height="{TILE}"'
    return "".join(
        f'<pattern id="h-{cause}" {tile} patternUnits="userSpaceOnUse">'
        f'<rect class="c-{cause}" {tile}/>'
        f'<path class="i-{cause}" d="{hatch_path(cause)}"/></pattern>'
        for cause in causes
    )


def variables(colours: Mapping[str, str], *, in_dark: bool) -> str:
    """Write colours as CSS variables, those of passes and causes among them."""
    every = dict(colours)
    for kind, look in KINDS.items():
        every[f"fill-{kind.name}"], every[f"ink-{kind.name}"] = look.fill, LABEL_INK
    for cause in Cause:
        every[f"fill-{cause}"], every[f"ink-{cause}"] = colours_of(cause, in_dark=in_dark)
    return "".join(f"--{name}:{value};" for name, value in every.items())
