"""What the user named, and the capture that is read, in → a warning of what is passed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from debubble.errors import Code, Gap
from debubble.trace.captures import Capture
from debubble.trace.files import expand
from debubble.trace.run import Found

# Many names make no message clearer.
_PLACES_SHOWN = 4


def warn_of_unread(places: Sequence[str], found: Found) -> Found:
    """Add a warning where nothing of a place is read that the user named: it is of another run.

    One place may hold many captures over time: the newest is meant, and nothing is warned of.
    """
    if len(places) < 2 or len(found.captures) < 2:
        return found
    read = _files_of(found.capture)
    others = {file for one in found.captures if one is not found.capture for file in _files_of(one)}
    below = {place: set(expand([place])[0]) for place in dict.fromkeys(places)}
    unread = [place for place, files in below.items() if files & others and not files & read]
    if not unread:
        return found
    # It says the same of captures that were named.
    kept = [gap for gap in found.gaps if gap.code is not Code.NEWER_INCOMPLETE]
    return replace(found, gaps=(*kept, _several_runs(unread, found.capture)))


def _files_of(capture: Capture) -> set[str]:
    """Return its files, and the traces that digests are read for."""
    found = {name for file in capture.files for name in (file.file, file.instead)}
    return found.union(*(files for _, files in capture.duplicates))


def _several_runs(unread: Sequence[str], read: Capture) -> Gap:
    more = ", …" if len(unread) > _PLACES_SHOWN else ""
    return Gap(
        code=Code.SEVERAL_RUNS,
        message=f"several captures were named, and one is read: {read.name}; "
        f"not read: {', '.join(unread[:_PLACES_SHOWN])}{more}",
        hint="give the traces of one run, or choose with --capture NAME; "
        "`debubble compare` holds two runs against each other",
    )
