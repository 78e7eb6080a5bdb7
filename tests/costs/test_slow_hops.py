"""A hop that is slower than the others is found where it was planted, and nowhere else."""

from __future__ import annotations

import pytest
from support.traces.read_once import build_recording

from debubble.plan.baseline import measure_baseline
from debubble.timeline.figures import measure_pipeline


@pytest.mark.parametrize(
    ("name", "slow"),
    [
        ("1f1b_m8_slow23", [(2, 3)]),
        ("fwd_closed_m8_slow12", [(1, 2)]),
        ("1f1b_m8", []),
        ("gpipe_m8", []),
        ("zbv_m8", []),
        ("fwd_closed_m8_t512", []),
    ],
)
def test_slow_hops_are_those_that_were_paced(name, slow, recorded_data):
    timeline = build_recording(recorded_data / name)
    source = measure_baseline(timeline, measure_pipeline(timeline, 0)).source
    assert sorted(source.wires.slow) == slow
    # They are paced to a fifth.
    assert all(hop.times > 3 for hop in source.wires.slow.values())
