"""What Prometheus reads of links: bounded, and silent where nothing is known."""

from __future__ import annotations

from support.services.watch_service import shown_pipeline

from debubble.annexes.watch.analyse import Hop
from debubble.annexes.watch.metrics import MOST_STAGES, Counts, write_metrics

SLOW = Hop(source="1", destination="2", wire_s=0.006, bytes_per_s=1.4e9,
           slow=True, efficiency=0.2, cost_s=0.027)  # fmt: skip
HEALTHY = Hop(source="0", destination="1", wire_s=0.001, bytes_per_s=7e9,
              slow=False, efficiency=1.0, cost_s=0.0)  # fmt: skip
UNKNOWN = Hop(source="2", destination="3", wire_s=None, bytes_per_s=None)
LEARNING = {"metric": "batch_latency_s", "context_bucket": 512, "state": "learning",
            "reference_captures": 4, "score": None}  # fmt: skip


def page(*hops):
    one = shown_pipeline(hops=hops) | {"drift": [LEARNING]}
    return write_metrics({"pipelines": [one], "open_alerts": []}, Counts()).decode()


def test_a_slow_hop_shows_what_it_carries_of_what_it_should_and_what_it_costs():
    text = page(HEALTHY, SLOW, UNKNOWN)
    labels = '{dst_stage="2",pipeline="train",src_stage="1"}'
    assert f"debubble_link_slow{labels} 1.0" in text
    assert f"debubble_link_efficiency_ratio{labels} 0.2" in text
    assert f"debubble_link_attributed_bubble_seconds{labels} 0.027" in text
    assert 'debubble_link_slow{dst_stage="1",pipeline="train",src_stage="0"} 0.0' in text


def test_a_hop_of_which_nothing_is_known_is_not_shown_as_healthy():
    assert 'dst_stage="3"' not in page(HEALTHY, SLOW, UNKNOWN)


def test_a_pipeline_of_very_many_hops_shows_none_of_them():
    assert "debubble_link_slow{" in page(*[SLOW] * (2 * MOST_STAGES))
    assert "debubble_link_slow{" not in page(*[SLOW] * (2 * MOST_STAGES + 1))


def test_what_is_still_learning_says_how_far_it_is():
    text = page()
    labels = '{context_bucket="512",metric="batch_latency_s",pipeline="train"}'
    assert f"debubble_reference_captures{labels} 4.0" in text
    assert 'debubble_reference_captures_needed{pipeline="train"} 40.0' in text
    assert f"debubble_drift_score{labels}" not in text
