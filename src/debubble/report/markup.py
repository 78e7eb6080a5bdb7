"""Words and shapes in → markup of pages and pictures. Strangers' names are shown, never obeyed."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from html import escape
from importlib.resources import files

from debubble.units import printable


def safe(text: object, *, breaks: bool = False) -> str:
    """Write any text so that a browser shows it as it is."""
    return escape(printable(str(text), breaks=breaks), quote=True)


def text(  # noqa: PLR0913, PLR0917 (a place, words, and how they look)
    x: float, y: float, words: object, style: str = "", anchor: str = "", size: float = 0.0
) -> str:
    """Write words at a place of an SVG."""
    how = {"class": style, "text-anchor": anchor, "font-size": f"{size:g}" if size else ""}
    looks = "".join(f' {name}="{value}"' for name, value in how.items() if value)
    return f'<text x="{x:.5g}" y="{y:.5g}"{looks}>{safe(words)}</text>'


def rect(  # noqa: PLR0913, PLR0917 (four sides, and how it looks)
    x: float, y: float, width: float, height: float, style: str = "", fill: str = ""
) -> str:
    """Write a rectangle of an SVG."""
    how = (f' class="{style}"' if style else "") + (f' fill="{fill}"' if fill else "")
    return f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}"{how}/>'


def svg(width: float, height: float, parts: str, label: str) -> str:
    """Write an SVG inside a page."""
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{safe(label)}">{parts}</svg>'
    )


@cache
def asset(name: str) -> str:
    """Return a script or a style that pages are made of."""
    return (files("debubble.report.html") / "assets" / name).read_text("utf-8")


def digest(content: str) -> str:
    """Name a script or a style as a Content-Security-Policy does."""
    digested = hashlib.sha256(content.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digested).decode('ascii')}"
