"""A damaged rank moves no figure without a word: it is right, or it is named and what it moves."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import msgspec
import pytest
from fuzz.damages import DAMAGES
from support.traces.documents import load
from support.traces.recordings import DATA, H200

import debubble
from debubble.errors import Touch
from debubble.timeline.figures import PipelineFigures

RECORDINGS = (H200 / "1f1b_p2_m4", H200 / "fwd_closed_m4", DATA / "frameworks" / "mg_2321")


@cache
def sound(recording: Path) -> PipelineFigures:
    return debubble.analyse(str(recording)).pipeline


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda folder: folder.name)
def test_figures_stay_right_or_the_damage_is_named(tmp_path, recording, damage):
    files = sorted(recording.glob("rank*.json.gz"))
    for file in files:
        shutil.copy(file, tmp_path)
    (tmp_path / files[1].name).unlink()
    document = load(files[1])
    damage(document)
    (tmp_path / files[1].name.removesuffix(".gz")).write_bytes(msgspec.json.encode(document))
    result = debubble.analyse(str(tmp_path))
    was, now = sound(recording), result.pipeline
    if now.bubble_fraction is None or now.absent:
        assert result.warnings
        return
    doubts = [gap for gap in result.warnings if Touch.TIMES in gap.touches]
    moves_ns = [gap.moves_ns for gap in doubts]
    moved_ns = abs(now.bubble_fraction - was.bubble_fraction) * was.batch_latency_ns
    moved_ns = max(moved_ns, abs(now.batch_latency_ns - was.batch_latency_ns))
    assert moved_ns <= 0.01 * was.batch_latency_ns or None in moves_ns or moved_ns <= sum(moves_ns)
