"""A run as samples: one a step, with its memory and what it ran on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.measurements import measured, sampled
from support.traces.recordings import H200

from debubble.errors import UsageError
from debubble.measure.measurement import join_measurements


def test_a_recorded_run_gives_a_sample_a_step():
    found = measured(H200 / "1f1b_p3_m7")
    assert [sample.step for sample in found.samples] == [2, 3, 4, 5]
    assert len(found.step_times_s("profiled")) == 3
    assert found.samples[-1].step_time_s is None
    assert (found.kind, found.microbatches, found.schedule) == ("training", 7, "1f1b")
    assert found.split == (3, 5, 4)
    assert all(0.15 < latency < 0.25 for latency in found.batch_latencies_s("profiled"))


def test_rates_are_microbatches_over_steps_or_over_windows():
    found = sampled([0.1, 0.2], step_times=[0.2, None], microbatches=4)
    assert found.rates_per_s(found.step_times_s("profiled")) == pytest.approx((20.0,))
    assert found.rates_per_s(found.batch_latencies_s("profiled")) == pytest.approx((40.0, 20.0))


def test_captures_of_one_setting_are_put_together_with_the_largest_memory():
    joined = join_measurements([sampled([0.1], peak=5), sampled([0.2, 0.3], peak=7)])
    assert joined.batch_latencies_s("profiled") == (0.1, 0.2, 0.3)
    assert [one.peak_bytes for one in joined.memory] == [7, 7]
    assert len(joined.captures) == 2


def test_a_capture_that_is_given_again_counts_once():
    mine, other = sampled([0.1, 0.2]), sampled([0.1, 0.3])
    elsewhere = replace(mine, samples=tuple(replace(one, capture="copy") for one in mine.samples))
    joined = join_measurements([mine, elsewhere, other, mine])
    assert joined.batch_latencies_s("profiled") == (0.1, 0.2, 0.1, 0.3)
    assert joined.repeated == 2
    alone = join_measurements([mine, mine])
    assert (alone.batch_latencies_s("profiled"), alone.repeated) == ((0.1, 0.2), 1)


def test_captures_of_different_settings_are_not_put_together():
    with pytest.raises(UsageError, match="differ in microbatches: 8 and 4"):
        join_measurements([sampled([0.1]), sampled([0.1], microbatches=4)])
