"""One capture, as a worker sees it."""

from __future__ import annotations

import json
import threading

import pytest
from support.processes import PATIENCE_S
from support.simulator.analysis import setup_of
from support.simulator.devices import Play
from support.simulator.written_traces import Writing, write_run
from support.traces.recordings import H200

from debubble.annexes.watch.analyse import Task, Worker, analyse
from debubble.links.hop_times import SLOW


def analysed(files, **given):
    return analyse(Task(files=tuple(map(str, files)), **given))


def recorded(name):
    return sorted((H200 / name).glob("rank*.json.gz"))


def test_a_capture_gives_its_numbers_causes_stages_hops_and_plan():
    outcome = analysed(recorded("1f1b_p2_m4"))
    finding = outcome.finding
    assert finding.metrics["bubble_fraction"] == pytest.approx(0.252, abs=0.001)
    assert sum(finding.causes.values()) == pytest.approx(1.0)
    assert [one.stage for one in finding.stages] == ["0", "1"]
    assert {(one.source, one.destination) for one in finding.hops} == {("0", "1"), ("1", "0")}
    assert finding.plan is not None
    assert outcome.report.startswith("The bubble") or "%" in outcome.report


@pytest.mark.slow
def test_the_context_length_is_the_labels_then_the_servers_then_unknown(tmp_path):
    for file in recorded("1f1b_p2_m4"):
        (tmp_path / file.name).symlink_to(file)
    files = sorted(tmp_path.glob("rank*.json.gz"))
    plain = analysed(files).finding
    assert (plain.bucket, plain.context_source, plain.requests) == (0, None, {})
    served = analysed(files, traffic={512: 9.0, 2048: 20.0}).finding
    assert (served.bucket, served.context_source) == (2048, "server")
    for rank in range(2):
        said = {"schema": "debubble.sidecar/1", "rank": rank}
        said["workload"] = {"context_lengths": [300, 300, 900]}
        (tmp_path / f"rank{rank}.debubble.json").write_text(json.dumps(said))
    labelled = analysed(files, traffic={2048: 20.0}).finding
    assert (labelled.bucket, labelled.context_source) == (1024, "label")
    assert labelled.requests == {512: 2.0, 1024: 1.0}


def test_what_cannot_be_read_is_said(tmp_path):
    (tmp_path / "rank0.json.gz").write_bytes(b"")
    assert "is empty" in analysed([tmp_path / "rank0.json.gz"]).problem


def test_a_worker_that_takes_too_long_or_dies_is_replaced():
    worker, stop = Worker(), threading.Event()
    task = Task(files=tuple(map(str, recorded("1f1b_p2_m4"))))
    try:
        assert "longer than 0.01 s" in worker.analyse(task, 0.01, stop).problem
        assert worker.analyse(task, PATIENCE_S, stop).finding.bucket == 0
        threading.Timer(0.1, worker._process.kill).start()
        bomb = Task(files=tuple(map(str, recorded("1f1b_p3_m7"))) * 50)
        assert "was killed" in worker.analyse(bomb, PATIENCE_S, stop).problem
        stop.set()
        assert worker.analyse(task, PATIENCE_S, stop) is None
    finally:
        worker.end()


def test_a_slow_hop_is_told_with_what_it_carries_and_costs(recorded_data):
    files = sorted((recorded_data / "fwd_closed_m8_slow12").glob("rank*.json.gz"))
    hops = {(one.source, one.destination): one for one in analysed(files).finding.hops}
    slow = hops.pop(("1", "2"))
    assert slow.slow
    assert slow.efficiency < 1 / SLOW
    assert all(1 / SLOW < one.efficiency <= 1 for one in hops.values())
    assert slow.cost_s > 0
    assert {one.slow for one in hops.values()} == {False}
    assert {one.cost_s for one in hops.values()} == {0.0}


def test_a_stream_is_measured_and_says_why_it_has_no_plan(tmp_path):
    """Six requests, one microbatch each, one after the other and no step marked: a server."""
    play = Play(setup_of("forward-only", 3, 1, steps=6))
    write_run(play, tmp_path, Writing(marks=False))
    finding = analysed(sorted(tmp_path.glob("*rank*"))).finding
    assert "bubble_fraction" in finding.metrics
    assert finding.plan is None
    assert "prompts only" in finding.no_plan
    assert analysed(recorded("fwd_closed_m4")).finding.no_plan == ""
