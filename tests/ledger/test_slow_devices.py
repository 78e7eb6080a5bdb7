"""A device that is slow at the same layers is told from a stage that has more of them.

Recordings run again with one device so many times as slow: launches, messages and streams stay.
"""

from __future__ import annotations

import json

import pytest
from support.traces.recordings import H200, recorded_run
from variants.resimulate import Replay, Speeds

import debubble

pytestmark = pytest.mark.slow


def run_again(recording, folder, slow, times):
    """Write a recording as it would have been with one rank's kernels so many times as long."""
    documents = Replay(recording).run(Speeds(device=lambda rank, *_: times if rank == slow else 1))
    for rank, document in documents.items():
        (folder / f"rank{rank}.json").write_text(json.dumps(document), "utf-8")
    return debubble.analyse(folder)


def long_stage(analysis):
    (named,) = (named for named in debubble.find(analysis).named if named.cause == "imbalance")
    return named


@pytest.mark.parametrize("slow", [1, 2])
def test_a_slow_device_is_named_with_both_remedies_priced(tmp_path, slow):
    analysis = run_again(recorded_run("1f1b_m8"), tmp_path, slow, 1.5)
    named = long_stage(analysis)
    assert named.rank == slow
    assert named.sentence.startswith(f"rank {slow} is a slow device: its layers take ")
    assert "; fixing that saves " in named.sentence
    (split,) = (each for each in debubble.plan(analysis).options if each.lever == "split")
    assert f"; {split.words}: " in named.sentence
    assert split.change.split[slow] < 4
    # A device as fast as the others: the recording as it was.
    whole = debubble.find(recorded_run("1f1b_m8")).numbers.batch_latency_s
    slowed = debubble.find(analysis).numbers.batch_latency_s
    assert named.culprit_saved_s == pytest.approx(slowed - whole, rel=0.35)


def test_a_stage_with_more_layers_is_no_slow_device():
    named = long_stage(debubble.analyse(H200 / "1f1b_p3_m7"))
    assert named.rank == 1
    assert "slow device" not in named.sentence
