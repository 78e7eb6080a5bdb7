"""Strangers' names in → the same names out, harmless on a terminal."""

from __future__ import annotations

import re

# C0 and C1 control characters, among them the escape that starts a terminal's commands.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CONTROL_BUT_BREAK = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def printable(text: str, *, breaks: bool = False) -> str:
    """Show control characters instead of obeying them; with `breaks`, lines may still end."""
    control = _CONTROL_BUT_BREAK if breaks else _CONTROL
    shown = control.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    return shown.encode("utf-8", "replace").decode()
