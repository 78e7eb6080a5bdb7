"""What a run tells of the gaps before its messages' kernels, and how unsure its middle is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.timelines.engine_runs import MS, MS_OF_A_PASS, timeline_of
from support.traces.read_once import build_recording
from support.traces.recordings import H200

from debubble.simulate.communication import Communication
from debubble.simulate.source import measure_source
from debubble.timeline.figures import measure_pipeline


def test_what_gaps_before_messages_mostly_are_is_seen():
    gap_ns = 50_000
    timeline = timeline_of(
        "1f1b",
        4,
        8,
        units=MS_OF_A_PASS,
        communication=Communication.FUSED,
        one_way=MS,
        batch_gap=gap_ns,
    )
    assert measure_source(timeline, measure_pipeline(timeline, 0)).batch_gap_ns == gap_ns


def test_the_middle_of_few_steps_is_as_unsure_as_they_differ():
    timeline = build_recording(H200 / "1f1b_p2_m4")
    figures = measure_pipeline(timeline, 0)
    lasted = [window.end_ns - window.start_ns for window in figures.windows]
    assert len(lasted) > 1
    expected = 1.25 * np.std(lasted, ddof=1) / np.mean(lasted) / len(lasted) ** 0.5
    assert measure_source(timeline, figures).window_spread == pytest.approx(expected)
    once = replace(figures, windows=figures.windows[:1])
    assert measure_source(timeline, once).window_spread == 0.0
