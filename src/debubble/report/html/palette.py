"""Every colour and every hatch of the report, once: for the style, the image and the charts.

Colour is never alone: kinds of passes carry a letter and a stripe, causes of waits a hatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from debubble.ledger.causes import CAUSES
from debubble.report import palette
from debubble.timeline.model import PassKind

# What text, lines and grounds look like; names are CSS variables.
LIGHT = {
    "ground": "#ffffff",
    "panel": "#f5f7f9",
    "text": "#1b2128",
    "muted": "#55606b",
    "line": "#d3dae1",
    "accent": "#0a5c96",
    "good": "#116b3c",
    "bad": "#a8320a",
    "shade0": "#e8f0f7",
    "shade1": "#cfe0ee",
    "shade2": "#b1cee4",
    "shade3": "#8fb8d6",
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
    "shade0": "#1d2c39",
    "shade1": "#24394b",
    "shade2": "#2b475f",
    "shade3": "#335675",
}
# Text stands on these grounds, in these inks; tests hold each pair against 4.5 : 1.
TEXT_ON = (
    *(("text", ground) for ground in ("ground", "panel", "shade0", "shade1", "shade2", "shade3")),
    *(
        (ink, ground)
        for ink in ("muted", "accent", "good", "bad")
        for ground in ("ground", "panel")
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How one kind of pass or one cause is drawn."""

    fill: str
    ink: str
    """Of text on it, or of its hatch."""
    words: str
    hatch: tuple[int, ...] = ()
    """Eight rows of eight bits; nothing for a plain ground."""
    dark: tuple[str, str] | None = None
    """Fill and ink in the dark, where those of the light would shout."""
    stripe: str = ""
    """Where a pass carries a stripe: top, bottom or both."""


_STRIPES = {PassKind.B: "bottom", PassKind.I: "top", PassKind.W: "both"}
KINDS = {
    kind: Look(
        fill=look.colour, ink=palette.LABEL_INK, words=look.word, stripe=_STRIPES.get(kind, "")
    )
    for kind, look in palette.KINDS.items()
}
CAUSE_LOOKS = {
    cause: Look(
        fill=cause.about.fill or cause.about.colour,
        ink=cause.about.ink,
        words=cause.about.meaning,
        hatch=cause.about.bits,
        dark=cause.about.dark,
    )
    for cause in CAUSES
}


def say_cause(cause: str) -> str:
    """Write a cause as people do."""
    return cause.replace("_", " ")


def style_variables() -> str:
    """Return the colours as CSS: as the system asks, unless the reader chose."""
    light, dark = _variables(LIGHT, in_dark=False), _variables(DARK, in_dark=True)
    fills = "".join(
        f".c-{name}{{fill:var(--fill-{name})}}.i-{name}{{fill:var(--ink-{name})}}"
        for name in _looks()
    )
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light])"
        f"{{color-scheme:dark;{dark}}}}}"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}{fills}\n"
    )


def _looks() -> dict[str, Look]:
    kinds = {kind.name: look for kind, look in KINDS.items()}
    return kinds | {str(cause): look for cause, look in CAUSE_LOOKS.items()}


def colours_of(look: Look, *, in_dark: bool) -> tuple[str, str]:
    """Return fill and ink."""
    return look.dark if in_dark and look.dark else (look.fill, look.ink)


def _variables(colours: dict[str, str], *, in_dark: bool) -> str:
    every = dict(colours)
    for name, look in _looks().items():
        every[f"fill-{name}"], every[f"ink-{name}"] = colours_of(look, in_dark=in_dark)
    return "".join(f"--{name}:{value};" for name, value in every.items())


def palette_json() -> dict[str, Any]:
    """Return kinds and causes in the order of their numbers; their colours are the style's."""
    return {
        "kinds": [
            {"letter": kind.name, "words": look.words, "stripe": look.stripe}
            for kind, look in sorted(KINDS.items())
        ],
        "causes": [
            {
                "key": cause,
                "name": say_cause(cause),
                "words": CAUSE_LOOKS[cause].words,
                "hatch": list(CAUSE_LOOKS[cause].hatch) or [0] * 8,
            }
            for cause in CAUSES
        ],
    }
