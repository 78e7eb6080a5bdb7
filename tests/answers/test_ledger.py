"""What savings are called, and what they are shares of."""

from __future__ import annotations

from statistics import median

import pytest
from support.traces.read_once import build_recording
from support.traces.recordings import H200

from debubble.ledger.causes import Cause
from debubble.ledger.ledger import build_ledger
from debubble.ledger.verdict import name_causes
from debubble.report.answers.ledger import say_cause, say_remedy
from debubble.timeline.figures import measure_pipeline
from debubble.units import show_duration


@pytest.fixture(scope="module")
def ledger():
    timeline = build_recording(H200 / "1f1b_p2_m4")
    figures = measure_pipeline(timeline, 0)
    return build_ledger(timeline, 0, [window.step for window in figures.windows])


def test_only_the_healthy_part_of_transfers_is_said_to_go():
    assert say_remedy(Cause.TRANSFER) == "healthy transfers that take no time"


def test_all_savings_are_of_the_one_batch_that_was_measured(ledger):
    measured = median(one.measured_ns for one in ledger.replays)
    for one in ledger.savings:
        assert one.batch_latency_ns + one.saved_ns == round(measured)
    for named in name_causes(ledger):
        assert f" of {show_duration(measured)} (" in say_cause(ledger, named)
