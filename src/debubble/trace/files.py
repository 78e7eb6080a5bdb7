"""Paths, folders, globs and URLs in → the files they mean out."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from typing import Any

from debubble.errors import RunNotFound
from debubble.trace.remote import locate, plain_errors
from debubble.trace.source import is_url

_GLOB_SIGNS = frozenset("*?[")
_EXTENSIONS = re.compile(
    r"(?:\.pt)?(?:\.trace)?(?:\.(?:json|gz|sqlite|csv|jsonl|parquet))*(?:\.debubble\.npz)?$"
)


def strip_extensions(name: str) -> str:
    """Return a trace's name without what only says how it is written."""
    return _EXTENSIONS.sub("", name)


def expand(places: Iterable[str]) -> tuple[tuple[str, ...], bool]:
    """Return the files meant, in order and once each, and whether the user named each of them."""
    files: dict[str, None] = {}
    named = True
    for place in places:
        found, is_file = _expand_url(place) if is_url(place) else _expand_path(place)
        if not found:
            raise RunNotFound(
                f"{place}: no files there", hint="give a trace, a folder of traces, or a glob"
            )
        named &= is_file
        files.update(dict.fromkeys(found))
    return tuple(files), named


def _expand_path(place: str) -> tuple[list[str], bool]:
    if os.path.isdir(place):  # noqa: PTH112 (plain strings serve paths and URLs alike)
        return sorted(_walk(place)), False
    if os.path.lexists(place) or not _GLOB_SIGNS & set(place):
        return [place], True
    found = []
    for path in sorted(glob.glob(place, recursive=True)):  # noqa: PTH207
        found += sorted(_walk(path)) if os.path.isdir(path) else [path]  # noqa: PTH112
    return found, False


def _walk(folder: str) -> list[str]:
    """List all files below a folder; hidden ones are nobody's traces.

    A folder that cannot be listed stands for its files, so that reading it says why.
    """
    found: list[str] = []
    closed: list[OSError] = []
    for path, folders, names in os.walk(folder, onerror=closed.append):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.join(path, name) for name in names if not name.startswith(".")]  # noqa: PTH118
    return found + [str(error.filename) for error in closed]


def _expand_url(place: str) -> tuple[list[str], bool]:
    """List a prefix or a glob. A `?` in an address that is there is no sign of a glob."""
    try:
        system, path = locate(place)
        with plain_errors():
            if _GLOB_SIGNS & set(path) and not system.exists(path):
                return _list(system, system.glob(path)), False
            if system.isdir(path):
                return _list(system, [path]), False
    except (OSError, ImportError, ValueError) as error:
        raise RunNotFound(f"{place}: {error}", hint=_what_to_do(error)) from error
    return [place], True


def _list(system: Any, paths: Iterable[str]) -> list[str]:
    """Return the URLs of objects, and of all below prefixes; hidden ones are nobody's traces."""
    found: dict[str, None] = {}
    for path in sorted(paths):
        below = system.find(path) if system.isdir(path) else [path]
        skipped = len(path.rstrip("/")) if below != [path] else 0
        found.update(dict.fromkeys(name for name in below if "/." not in name[skipped:]))
    return [system.unstrip_protocol(name) for name in sorted(found)]


def _what_to_do(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "pip install what opens such URLs: s3fs, gcsfs, adlfs, …"
    return "check the URL, the credentials of your environment, and the network"
