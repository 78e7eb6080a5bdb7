"""What the user typed after `links` in → its files, and whether they are traces or logs."""

from __future__ import annotations

from collections.abc import Sequence

from debubble.errors import DebubbleError, UsageError
from debubble.links.live.measured import is_measured
from debubble.links.logs.read import load_json, looks_like_log
from debubble.trace.formats import recognise
from debubble.trace.source import Limits, Source, expand

_PREFIX_BYTES = 64 * 1024


def sort_places(places: Sequence[str], limits: Limits) -> tuple[str, list[str]]:
    """Return `traces`, `log` or `measured`, and the files of the latter two."""
    sorted_out = [_sort(place, limits) for place in places]
    if len({kind for kind, _ in sorted_out}) > 1:
        raise UsageError("traces and logs are read apart", hint="give one kind in a command")
    return sorted_out[0][0], [file for _, files in sorted_out for file in files]


def _sort(place: str, limits: Limits) -> tuple[str, list[str]]:
    """Tell what one word means. A folder with a trace in it is of traces, whatever is beside it."""
    files, named = expand([place])
    if named:
        return _kind_of(files[0], limits) or "traces", list(files)
    kinds: dict[str, list[str]] = {}
    for file in files:
        if _is_trace(file, limits):
            return "traces", []
        if kind := _kind_of(file, limits):
            kinds.setdefault(kind, []).append(file)
    if len(kinds) > 1:
        raise UsageError(
            f"{place}: logs of others and hop tests are read apart", hint="name the files"
        )
    return next(iter(kinds.items()), ("traces", []))


def _is_trace(file: str, limits: Limits) -> bool:
    """Tell traces; what cannot be opened may be one, and reading it says why it cannot."""
    try:
        return recognise(file, limits).is_trace
    except DebubbleError:
        return False


def _kind_of(file: str, limits: Limits) -> str | None:
    """Tell a log of a link test, and what a hop test wrote, from all else."""
    try:
        start = Source(file, limits).prefix(_PREFIX_BYTES).decode("utf-8", errors="replace")
    except DebubbleError:
        return None
    if not start.lstrip().startswith("{"):
        return "log" if looks_like_log(start) else None
    if '"traceEvents"' in start or len(start) >= _PREFIX_BYTES:
        return None
    data = load_json(start)
    if is_measured(data):
        return "measured"
    return "log" if looks_like_log(start) else None
