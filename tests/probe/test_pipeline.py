"""Pipelines simulated from a probe: theory where it is exact, splits, memory, tables, the verb."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.services.console import type_command

from debubble.annexes.probe.pipeline import (
    Pipelines,
    Setting,
    Wire,
    read_probe,
    wire_of_messages,
)
from debubble.errors import TraceError
from debubble.report.op_table import write_table
from debubble.timeline.build import build_run
from debubble.timeline.figures import measure_pipeline
from debubble.trace.run import find_run, read_run

RECORDED = Path(__file__).parents[1] / "data" / "probe" / "h200_quarter_d3072.json"
RUNS = [
    run
    for runs in json.loads(RECORDED.with_name("h200_quarter_runs.json").read_text()).values()
    for run in runs
]
FREE = Wire(latency_ns=0.0, bytes_per_s=1e15, both_ways=1.0, told_by="as stated")


def part(name, tokens, forward_ms, **more):
    return {
        "kind": name.title(),
        "part": name,
        "count": 1,
        "tokens": tokens,
        "forward_s": forward_ms / 1e3,
        "backward_s": 2 * forward_ms / 1e3,
        "input_grad_s": forward_ms / 1e3,
        "start_s": {},
        "saved_bytes": 1000,
        "output_bytes": 100,
        "weight_bytes": 10_000,
        "spread": 0.0,
        **more,
    }


def probed(rows, **more):
    data = {
        "schema": "debubble.probe.measured/1",
        "model": "model.py:build",
        "torch": "2.13",
        "device": "cpu",
        "device_bytes": None,
        "threads": 1,
        "copies": 1,
        "trains": True,
        "layers": 16,
        "alone": rows,
        **more,
    }
    return read_probe(data, "probe.json")


def layers(**more):
    return [part("layer", tokens, tokens / 64, count=16, **more) for tokens in (64, 128)]


def test_equal_stages_and_a_free_wire_are_theory():
    pipelines = Pipelines(probe=probed(layers()), wire=FREE)
    found = pipelines.simulate(Setting(stages=4, microbatches=8, tokens=64))
    assert found.split == (4, 4, 4, 4)
    assert found.bubble_fraction == pytest.approx(3 / 11)
    assert found.window_ns == pytest.approx(11 * 4 * 3e6)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_runs_of_a_probes_own_day_are_told_within_10_percent_but_interleaved_ones(run):
    """Four ranks on one H200, real and unprofiled: 13 % too little of interleaved runs."""
    data = json.loads(RECORDED.with_name(f"h200_quarter_{run['probe']}.json").read_text("utf-8"))
    data["trains"] = run["schedule"] != "forward-only"
    probe = read_probe(data, "probe.json")
    setting = Setting(
        stages=4,
        microbatches=run["microbatches"],
        tokens=run["tokens"],
        schedule=run["schedule"],
        split=tuple(run["split"]),
    )
    wire = wire_of_messages(probe.messages, "as between copies")
    said_ms = Pipelines(probe=probe, wire=wire).simulate(setting).window_ns / 1e6
    within = 0.14 if run["schedule"] == "interleaved-1f1b" else 0.10
    assert said_ms == pytest.approx(run["ms"], rel=within)


def test_a_head_takes_layers_off_the_last_stage():
    rows = [*layers(), *(part("head", tokens, 3 * tokens / 64) for tokens in (64, 128))]
    found = Pipelines(probe=probed(rows), wire=FREE).simulate(
        Setting(stages=4, microbatches=8, tokens=64)
    )
    assert found.split[-1] < min(found.split[:-1])


def test_copies_that_slow_each_other_make_a_batch_longer():
    alone = layers()
    beside = [{**row, "forward_s": 1.3 * row["forward_s"]} for row in alone]
    shared = probed(alone, beside=beside, copies=4)
    assert shared.slope > 0
    setting = Setting(stages=4, microbatches=8, tokens=64)
    apart = Pipelines(probe=probed(alone), wire=FREE).simulate(setting)
    assert Pipelines(probe=shared, wire=FREE).simulate(setting).window_ns > apart.window_ns


def test_ranks_beyond_the_copies_are_elsewhere_and_slow_nobody_here():
    alone = layers()
    beside = [{**row, "forward_s": 1.4 * row["forward_s"]} for row in alone]
    four = probed(alone, beside=beside, copies=4)
    rows = [
        {"bytes": size, "one_way_s": [took] * 3, "both_ways_s": [took] * 3}
        for size, took in ((1_000, 1e-4), (2_000_000, 1e-3))
    ]
    wire = wire_of_messages(rows, "as between copies")

    def window(stages, wire):
        # As many layers a rank, whatever their number.
        setting = Setting(stages=stages, microbatches=64, tokens=64, split=(1,) * stages)
        probe = replace(four, layers=stages)
        return Pipelines(probe=probe, wire=wire).simulate(setting).window_ns

    # Filling and draining take longer; nothing else does.
    assert window(16, wire) < 1.4 * window(4, wire)
    assert "messages do not slow each other" in [*Pipelines(probe=four, wire=wire).assumptions()]


def test_messages_between_copies_tell_the_wire_and_its_stalls():
    rows = [
        {"bytes": size, "one_way_s": [ms / 1e3] * 9 + [stall / 1e3], "both_ways_s": both}
        for size, ms, stall, both in (
            (1_000, 0.101, 0.101, [0.101e-3] * 10),
            (1_000_000, 1.1, 12.2, [1.65e-3] * 10),
            (2_000_000, 2.1, 2.1, [3.15e-3] * 10),
        )
    ]
    wire = wire_of_messages(rows, "as between copies")
    assert wire.one_way_ns(1_500_000) == pytest.approx(1.6e6, rel=0.01)
    assert wire.both_ways == pytest.approx(1.5)
    # One of forty was held up, and took 11.1 ms more than the middle one.
    assert wire.tail_ns == pytest.approx(11.1e6 / 40)
    assert wire.body == pytest.approx(1.0)


def test_memory_is_weights_and_gradients_and_what_is_in_flight():
    found = Pipelines(probe=probed(layers()), wire=FREE).simulate(
        Setting(stages=4, microbatches=8, tokens=64)
    )
    first, last = found.peak_bytes[0], found.peak_bytes[-1]
    # Four microbatches in flight on the first rank, one on the last; each keeps four layers' and a
    # message.
    assert first - last == pytest.approx(3 * (4 * 1000 + 100))
    assert last == pytest.approx(2 * 4 * 10_000 + 4 * 1000 + 100 + 1000)


def test_a_step_is_written_as_a_table_that_every_verb_reads(tmp_path):
    wire = Wire(latency_ns=50_000.0, bytes_per_s=1e6, both_ways=1.5, told_by="as stated")
    pipelines = Pipelines(probe=probed(layers()), wire=wire)
    found = pipelines.simulate(Setting(stages=4, microbatches=8, tokens=64))
    file = tmp_path / "step.csv"
    file.write_text(write_table(found.program, found.times, found.message_bytes), "utf-8")
    figures = measure_pipeline(build_run(read_run(find_run([str(file)]))), 0)
    assert figures.batch_latency_ns == pytest.approx(found.window_ns, abs=1000)
    assert figures.bubble_fraction == pytest.approx(found.bubble_fraction, abs=1e-3)
    assert figures.schedule == "1f1b"


def test_what_is_no_probe_is_refused():
    with pytest.raises(TraceError, match="no probe"):
        read_probe({"traceEvents": []}, "trace.json")
    with pytest.raises(TraceError, match="'alone'"):
        read_probe({"schema": "debubble.probe.measured/1"}, "probe.json")


def test_pipelines_of_a_probe_are_ranked_and_say_what_they_assume(tmp_path):
    words = f"debubble probe {RECORDED} --stages 2,4 --microbatches 8 --bandwidth 6GB/s --json"
    data = json.loads(type_command(words, tmp_path).text)
    assert data["schema"] == "debubble.probe/1"
    rates = [one["tokens_per_s"] for one in data["pipelines"]]
    assert rates == sorted(rates, reverse=True)
    assert {one["stages"] for one in data["pipelines"]} == {2, 4}
    assert any("as measured" in said for said in data["assumptions"])
    assert data["pipelines"][0]["fits_memory"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--latency 20us", "a latency alone is no wire"),
        ("--links a.json --bandwidth 1GB/s", "both say what the wire does"),
        ("--bandwidth 1GB/s --stages none", "is no number of ranks"),
        ("--bandwidth 1GB/s --tokens 64,128", "comes too late"),
        ("--bandwidth 1GB/s --latency 20", "is no time"),
        ("--links nowhere.json", "is no hop test"),
    ],
)
def test_what_cannot_be_asked_is_refused(words, message, tmp_path):
    found = type_command(f"debubble probe {RECORDED} {words}", tmp_path)
    assert found.code == 2
    assert message in found.text
