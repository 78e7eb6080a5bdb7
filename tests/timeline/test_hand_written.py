"""Real gloo ranks that somebody wrote by hand: receives posted long ahead, nothing labelled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.jobs import hand_written_pipelines as hand_written

from debubble.errors import NoPipeline
from debubble.timeline.build import build_timeline
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.model import PassKind
from debubble.trace.run import find_run, read_run

pytestmark = pytest.mark.slow

TIMEOUT_S = 120
LENGTHS_S = {PassKind.F: hand_written.FORWARD_S, PassKind.B: hand_written.BACKWARD_S}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("hand_written")
    program = Path(hand_written.__file__)
    processes = [
        subprocess.Popen([sys.executable, "-P", str(program), str(rank), str(folder)])
        for rank in range(hand_written.RANKS)
    ]
    try:
        assert [process.wait(TIMEOUT_S) for process in processes] == [0] * hand_written.RANKS
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return lambda kind: read_run(find_run([str(folder / kind)])).ranks


@pytest.mark.parametrize(
    ("kind", "name", "kinds"),
    [("forward", "forward-only", "F"), ("training", "gpipe", "FB")],
)
def test_receives_posted_ahead_do_not_merge_passes(traces, kind, name, kinds):
    timeline = build_timeline(traces(kind))
    figures = measure_pipeline(timeline, 0)
    assert [rank.rank for rank in figures.ranks] == list(range(hand_written.RANKS))
    assert (figures.schedule, figures.microbatches) == (name, hand_written.MICROBATCHES)
    passes = timeline.passes
    count = len(kinds) * hand_written.RANKS * hand_written.STEPS * hand_written.MICROBATCHES
    assert len(passes) == count
    for number, length_s in LENGTHS_S.items():
        lengths = (passes.end_ns - passes.start_ns)[passes.kind == number] / 1e9
        assert (lengths > 0.9 * length_s).all()
        # Passes that had merged would last several times as long.
        assert not len(lengths) or np.median(lengths) < 1.9 * length_s
    assert timeline.gaps == ()


def test_a_ring_over_gloo_is_no_pipeline(traces):
    with pytest.raises(NoPipeline, match="around a ring"):
        build_timeline(traces("ring"))
