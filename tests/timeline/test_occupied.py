"""What counts as occupied: the passes' work, and not what lies outside of them."""

from __future__ import annotations

import pytest
from support.simulator.analysis import (
    EARLY,
    FUSED,
    assert_all_named,
    assert_measured,
    setup_of,
    simulated,
)
from support.simulator.host_programs import MS

from debubble.timeline.figures import measure_windows

OPTIMIZER_NS = 12 * MS


@pytest.mark.parametrize(
    ("name", "labels", "behaviour"),
    [("1f1b", "none", FUSED), ("gpipe", "simple", {}), ("zb-h2", "runtime", EARLY)],
)
def test_an_optimizer_that_runs_while_others_drain_does_not_shrink_the_bubble(
    name, labels, behaviour, tmp_path
):
    setup = setup_of(name, 4, 8, optimizer_ns=OPTIMIZER_NS, **behaviour)
    found = simulated(tmp_path / "with", setup, labels=labels)
    assert_all_named(found)
    assert_measured(found)
    # It does run inside of the window: some rank is done before the others.
    window = found.figures.windows[0]
    span = window.start_ns, window.end_ns
    ran = [dict(rank.outside)["optimizer"].inside(*span) for rank in found.timeline.ranks]
    assert max(ran) > MS
    for rank, inside in zip(found.timeline.ranks, ran, strict=True):
        # Gradients are scaled first, and that is none of the passes' work either.
        scaled = dict(rank.outside)["clipping"].inside(*span)
        assert rank.occupied.inside(*span) == rank.busy.inside(*span) - inside - scaled
    bare = simulated(tmp_path / "without", setup_of(name, 4, 8, **behaviour), labels=labels)
    (first, *_), (expected, *_) = found.figures.windows, measure_windows(bare.timeline, 0)
    assert first.length_ns == expected.length_ns
    assert first.bubble_fraction == pytest.approx(expected.bubble_fraction, abs=1e-3)
