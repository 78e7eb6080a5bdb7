"""Pipelines simulated from a probe: theory where it is exact, splits, memory, tables, the verb."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.services.console import type_command

from debubble.annexes.probe.measured import KindTimes, MessageTimes, Probe
from debubble.annexes.probe.pipeline import Pipelines, Setting, Wire, read_probe
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
EIGHT = Setting(stages=4, microbatches=8, tokens=64)


def part(name, tokens, forward_ms, *, count=1, slower=1.0):
    return KindTimes(
        kind=name.title(),
        part=name,
        count=count,
        tokens=tokens,
        forward_s=slower * forward_ms / 1e3,
        backward_s=2 * forward_ms / 1e3,
        input_grad_s=forward_ms / 1e3,
        saved_bytes=1000,
        output_bytes=100,
        weight_bytes=10_000,
    )


def probed(*rows, **more):
    settled = {"copies": 1, "device_bytes": None, "trains": True, "layers": 16} | more
    return Probe(model="model.py:build", torch="2.13", device="cpu", alone=rows, **settled)


def layers(**more):
    return [part("layer", tokens, tokens / 64, count=16, **more) for tokens in (64, 128)]


def test_equal_stages_and_a_free_wire_are_theory():
    pipeline = Pipelines(probe=probed(*layers())).simulate(EIGHT).part
    assert pipeline.split == [4, 4, 4, 4]
    assert pipeline.bubble_fraction == pytest.approx(3 / 11)
    assert pipeline.batch_latency_s == pytest.approx(11 * 4 * 3e-3)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_runs_of_a_probes_own_day_are_told_within_10_percent_but_interleaved_ones(run):
    """Four ranks on one H200, real and unprofiled: 19 % too little of interleaved runs."""
    probe = read_probe(str(RECORDED.with_name(f"h200_quarter_{run['probe']}.json")))
    probe = replace(probe, trains=run["schedule"] != "forward-only")
    setting = Setting(
        stages=4,
        microbatches=run["microbatches"],
        tokens=run["tokens"],
        schedule=run["schedule"],
        split=tuple(run["split"]),
    )
    simulated_ms = 1e3 * Pipelines(probe=probe).simulate(setting).part.batch_latency_s
    within = 0.19 if run["schedule"] == "interleaved-1f1b" else 0.10
    assert simulated_ms == pytest.approx(run["ms"], rel=within)


def test_a_head_takes_layers_off_the_last_stage():
    heads = [part("head", tokens, 3 * tokens / 64) for tokens in (64, 128)]
    split = Pipelines(probe=probed(*layers(), *heads)).simulate(EIGHT).part.split
    assert split[-1] < min(split[:-1])


def test_ranks_beyond_the_copies_are_elsewhere_and_slow_nobody_here():
    four = probed(*layers(), beside=tuple(layers(slower=1.4)), copies=4)
    wire = Wire(bytes_per_s=1e9)
    alone = Pipelines(probe=probed(*layers()), wire=wire).simulate(EIGHT).part

    def window(stages):
        # As many layers a rank, whatever their number.
        setting = Setting(stages=stages, microbatches=64, tokens=64, split=(1,) * stages)
        pipelines = Pipelines(probe=replace(four, layers=stages), wire=wire)
        return pipelines.simulate(setting).part.batch_latency_s

    shared = Pipelines(probe=four, wire=wire).simulate(EIGHT).part
    assert shared.batch_latency_s > 1.1 * alone.batch_latency_s
    # Filling and draining take longer; nothing else does.
    assert window(16) < 1.4 * window(4)


def test_messages_between_copies_take_what_they_took_on_average_stalls_included():
    rows = [
        MessageTimes(bytes=size, one_way_s=(*[ms / 1e3] * 9, stall / 1e3), both_ways_s=(both,) * 10)
        for size, ms, stall, both in (
            (1_000, 0.1, 0.1, 0.1e-3),
            (1_000_000, 1.1, 12.1, 3.3e-3),
            (2_000_000, 2.1, 2.1, 3.2e-3),
        )
    ]
    one_way_s, both_ways_s = probed(*layers(), messages=rows).message_s(1_500_000)
    assert one_way_s == pytest.approx((2.2e-3 + 2.1e-3) / 2)
    assert both_ways_s == pytest.approx(3.25e-3)


def test_memory_is_weights_and_gradients_and_what_is_in_flight():
    peaks = Pipelines(probe=probed(*layers())).simulate(EIGHT).part.peak_memory_bytes
    # Four microbatches in flight on the first rank, one on the last; each keeps four layers' and a
    # message.
    assert peaks[0] - peaks[-1] == pytest.approx(3 * (4 * 1000 + 100))
    assert peaks[-1] == pytest.approx(2 * 4 * 10_000 + 4 * 1000 + 100 + 1000)


def test_a_step_is_written_as_a_table_that_every_verb_reads(tmp_path):
    wire = Wire(latency_s=50e-6, bytes_per_s=1e6)
    step = Pipelines(probe=probed(*layers()), wire=wire).simulate(EIGHT)
    file = tmp_path / "step.csv"
    file.write_text(write_table(step.program, step.times, step.message_bytes), "utf-8")
    figures = measure_pipeline(build_run(read_run(find_run([str(file)]))), 0)
    assert figures.batch_latency_ns == pytest.approx(1e9 * step.part.batch_latency_s, abs=1000)
    assert figures.bubble_fraction == pytest.approx(step.part.bubble_fraction, abs=1e-3)
    assert figures.schedule == "1f1b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"traceEvents": []}', "no probe: .*`model`"),
        ('{"schema": "debubble.probe.measured/2"}', "no probe: .*schema"),
    ],
)
def test_what_is_no_probe_is_refused(text, message, tmp_path):
    (tmp_path / "probe.json").write_text(text)
    with pytest.raises(TraceError, match=message):
        read_probe(str(tmp_path / "probe.json"))


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
        ("--stages none", "is no number of ranks"),
        ("--tokens 64,128", "come too late"),
    ],
)
def test_what_cannot_be_asked_is_refused(words, message, tmp_path):
    refusal = type_command(f"debubble probe {RECORDED} {words}", tmp_path)
    assert refusal.code == 2
    assert message in refusal.text
