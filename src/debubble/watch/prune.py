"""Raw captures beyond those to keep in → gone, once a digest of each rank is kept."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from debubble.errors import Code, DebubbleError
from debubble.trace.digest.place import SUFFIX, DigestPlace
from debubble.trace.run import find_run, read_run
from debubble.trace.source import Limits, is_url
from debubble.watch.config import Source
from debubble.watch.journal import Journal
from debubble.watch.log import log
from debubble.watch.sources import digest_place, remove_capture


def prune(source: Source, journal: Journal, limits: Limits) -> int:
    """Remove what is not to be kept; return how many captures went."""
    if source.keep is None:
        return 0
    count = 0
    for number, files in journal.prunable(source.name, keep=source.keep):
        problem = _see_to_digests(source, files, limits)
        if problem:
            log("not_pruned", level="warning", source=source.name, problem=problem)
            continue
        remove_capture(source, files)
        journal.forget_files(number)
        count += 1
    return count


def _see_to_digests(source: Source, files: Sequence[str], limits: Limits) -> str:
    """Make the digests that an earlier time did not keep; return what was in the way."""
    place = digest_place(source)
    if place is None:
        return ""
    missing = [file for file in files if not _has_digest(place, file)]
    if not missing:
        return ""
    try:
        run = read_run(find_run(missing, limits=limits), limits=limits, digests=place)
    except DebubbleError:
        return ""  # what cannot be read has no digest to keep
    return next((str(gap) for gap in run.gaps if gap.code is Code.DIGEST_NOT_WRITTEN), "")


def _has_digest(place: DigestPlace, file: str) -> bool:
    """Look for a digest of the file, or for those of its ranks."""
    target = place.target(file)
    if is_url(target):
        import fsspec  # noqa: PLC0415

        system, path = fsspec.core.url_to_fs(target)
        ranks = system.glob(path.removesuffix(SUFFIX) + f".rank*{SUFFIX}")
        return bool(system.exists(path) or ranks)
    path = Path(target)
    stem = glob.escape(path.name.removesuffix(SUFFIX))
    return path.exists() or any(path.parent.glob(f"{stem}.rank*{SUFFIX}"))
