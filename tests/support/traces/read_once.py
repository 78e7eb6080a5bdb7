"""Recordings as tests ask for them: each read, built and analysed once a process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from debubble import api
from debubble.analysis import Analysis
from debubble.timeline.build import build_run
from debubble.timeline.model import Timeline
from debubble.trace.run import Run, find_run, read_run

# As many as are shipped, twice: what lies beside a checkout is larger, and asked for by few.
KEPT = 32


@lru_cache(maxsize=KEPT)
def read_recording(folder: Path) -> Run:
    """Return the files of a folder as they were read; nobody may change them."""
    return read_run(find_run([str(folder)]))


@lru_cache(maxsize=KEPT)
def build_recording(folder: Path) -> Timeline:
    """Return its timeline."""
    return build_run(read_recording(folder))


@lru_cache(maxsize=KEPT)
def analyse_recording(folder: Path) -> Analysis:
    """Return all that is known of it without a question of one's own."""
    return api.analyse(folder)
