"""Traffic that moved, a bucket that got slower, a plan that is outdated: told apart."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.services.watch_service import finding, made_up

from debubble.annexes.watch.analyse import PlannedChange
from debubble.annexes.watch.config import Drift
from debubble.annexes.watch.judge import State, accept, judge

SIZE = 20


class Watched:
    """A pipeline whose captures are made up; an alert that is up is raised once."""

    def __init__(self):
        self.state = State()
        self.captured = []
        self.open = {}
        self.rng = np.random.default_rng(4)

    def capture(self, *, latency=0.1, bucket=512, **more):
        level = float(latency * np.exp(self.rng.normal(0, 0.02)))
        given = {
            "bucket": bucket,
            "requests": {bucket: 20.0},
            "metrics": {"batch_latency_s": level},
        } | more
        capture = made_up(len(self.captured) + 1, finding=finding(**given))
        self.state, up = judge(self.state, capture, self.captured, Drift(reference=SIZE))
        self.captured.append(capture)
        raised = [alert for alert in up if alert.subject not in self.open]
        self.open |= {alert.subject: alert for alert in raised}
        return [alert.kind for alert in raised]

    def captures(self, count, **given):
        return [kind for _ in range(count) for kind in self.capture(**given)]

    def acknowledge(self):
        (alert,) = self.open.values()
        self.state, self.open = accept(self.state, alert), {}
        return alert


@pytest.fixture
def watched():
    return Watched()


def test_longer_requests_are_traffic_that_moved_and_no_slower_bucket(watched):
    assert watched.captures(SIZE + 5) == []
    assert watched.captures(15, latency=0.5, bucket=2048) == ["traffic_moved"]
    alert = watched.acknowledge()
    # Captures of late hold some from before: the newest tells what traffic there is now.
    assert alert.data["after"][2048] < 0.5
    assert alert.data["newest"] == {2048: 1.0}
    assert "; 100.0 % of the newest capture's are up to 2,048 tokens" in alert.message
    change = alert.data["batch_latency_s"]
    assert change.traffic_moved == pytest.approx(change.after - change.before, rel=0.05)
    assert change.buckets_slower == pytest.approx(0.0, abs=0.01)


def test_an_alert_says_from_what_to_what_since_when_and_which_cause_grew(watched):
    """Captures were taken an hour apart, and are analysed all at once."""
    causes = {"compute": 0.8, "imbalance": 0.2}
    for hour in range(1, SIZE + 6):
        assert not watched.capture(captured_s=3600.0 * hour, batch_s=0.1, causes=causes)
    causes = {"compute": 0.4, "imbalance": 0.5, "slow_link": 0.1}
    for hour in range(SIZE + 6, SIZE + 21):
        watched.capture(captured_s=3600.0 * hour, batch_s=0.2, latency=0.2, causes=causes)
    alert = watched.acknowledge()
    assert (alert.kind, alert.subject) == ("bucket_slower", "batch_latency_s/512")
    assert re.search(r"from (9\d|10\d)(\.\d+)? ms to (19|20)\d ms", alert.message), alert.message
    assert "since 1970-01-02 02:00:00 UTC; imbalance went from 20.0 ms to 100 ms" in alert.message
    assert alert.data["since_s"] == 3600 * (SIZE + 6)
    assert alert.raised_s == 3600 * (SIZE + 10)
    assert [shift.cause for shift in alert.data["causes"]] == ["imbalance", "slow_link"]


def test_a_bubble_that_grows_while_batches_come_out_sooner_is_nobody_slower(watched):
    def metrics(bubble, latency, rate):
        noise = 1 + 0.01 * watched.rng.normal()
        return {
            "bubble_fraction": bubble * noise,
            "batch_latency_s": latency * noise,
            "microbatches_per_s": rate * noise,
        }

    for _ in range(SIZE + 5):
        assert watched.capture(metrics=metrics(0.40, 0.229, 8.7)) == []
    for _ in range(15):
        assert watched.capture(metrics=metrics(0.50, 0.183, 10.8)) == []
    for _ in range(15):  # and one that grows while they do not is
        if watched.capture(metrics=metrics(0.65, 0.26, 7.9)):
            return
    pytest.fail("nothing was raised")


def test_what_was_acknowledged_is_the_new_normal(watched):
    watched.captures(SIZE + 5)
    watched.captures(15, latency=0.12)
    watched.acknowledge()
    assert watched.captures(SIZE + 20, latency=0.12) == []
    assert watched.captures(15, latency=0.14) == ["bucket_slower"]


def test_a_plan_is_outdated_once_three_captures_agree_on_another(watched):
    assert watched.captures(4, plan=PlannedChange(change="")) == []
    other = PlannedChange(change="split 3,5", gain=0.2)
    assert watched.captures(2, plan=other) == []
    assert watched.captures(1, plan=PlannedChange(change="split 4,4", gain=0.1)) == []
    assert watched.captures(3, plan=other) == ["plan_outdated"]
    assert watched.acknowledge().data["today"] == "split 3,5"
    assert watched.captures(5, plan=other) == []
