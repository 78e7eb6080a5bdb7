"""`debubble meter -- COMMAND` around real jobs that have never heard of debubble."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.jobs.around_a_job import (
    QUIET,
    SCRIPT,
    TORCHRUN,
    run_verb,
)
from support.requirements import need_package

need_package("torch")

import debubble
from debubble.errors import Code

pytestmark = pytest.mark.slow


def test_a_pipeline_is_metered_every_verb_reads_it_and_a_file_has_all_ranks_capture_once(tmp_path):
    (tmp_path / "debubble-meter").mkdir()
    (tmp_path / "debubble-meter" / "capture-now").touch()
    words = ("--segment", "60", "--no-on-drift", "--json")
    done = run_verb(tmp_path, "meter", *words, "--", *TORCHRUN, SCRIPT, "150", "schedule", "0.02")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["schema"] == "debubble.meter/1"
    assert [len(segment["tables"]) for segment in said["segments"]] == [2, 2, 2]
    assert done.stderr.count("the job's own words") == 2
    first, second, _ = (str(tmp_path / segment["folder"]) for segment in said["segments"])
    found = debubble.find(first)
    assert (found.run.ranks, found.run.microbatches, found.run.schedule) == (2, 4, "1f1b")
    # The first step sets communicators up: where that shows, it is left out.
    assert {*found.run.steps, *(part.step for part in found.run.steps_left_out)} == {*range(60)}
    assert 0 < found.numbers.bubble_fraction < 1
    assert {(hop.from_stage, hop.to_stage) for hop in found.hops} == {(0, 1), (1, 0)}
    assert debubble.plan(first).baseline is not None
    assert debubble.compare(first, second).verdict
    metrics = (tmp_path / "debubble-meter" / "rank1.prom").read_text()
    assert 'debubble_meter_pass_seconds{rank="1",pipeline="0",stage="1",pass="F"}' in metrics
    (capture,) = (tmp_path / "debubble-meter" / "captures").iterdir()
    traces = sorted(file.name for file in capture.glob("*.json.gz"))
    assert traces == ["rank0.json.gz", "rank1.json.gz"]
    assert not (tmp_path / "debubble-meter" / "capture-now").exists()
    # The segment whose steps were captured: on a slow machine the first.
    captured = max(name for name in (first, second) if Path(name).name <= capture.name)
    whole = debubble.analyse(str(tmp_path / "debubble-meter"), capture=Path(captured).name)
    assert [gap.message for gap in whole.warnings if gap.code is Code.GAPS_FROM_CAPTURE]
    bubble = debubble.find(captured).numbers.bubble_fraction
    assert whole.pipeline.bubble_fraction > bubble


DRIFTING = """
import json, os, random, sys, time
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
import debubble
from debubble.annexes.meter import figures, record, running
from debubble.capture import recording

out, steps, planted_at, pass_s, is_even = sys.argv[1], *map(float, sys.argv[2:])
MOST_STEPS = 20_000
rank, step, noise = int(os.environ["RANK"]), 0, random.Random(0)
seen = {"alarms": [], "begun": [], "ended": 0}

def slower():
    return 1.05 if rank == 1 and step >= planted_at else 1.0

class EvenClock(record.HostClock):
    # Each mark is a millisecond after the one before, give or take a hundredth.
    now_ns = 0
    def mark(self):
        self.now_ns += int(1e6 * slower() * noise.gauss(1, 0.01))
        return self.now_ns

class Work(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        time.sleep(pass_s * slower())
        return x * 1
    @staticmethod
    def backward(context, gradient):
        time.sleep(pass_s * slower())
        return gradient

class Layer(torch.nn.Linear):
    def forward(self, x):
        return super().forward(Work.apply(x))

take = figures.RankFigures.take
def noted(self, told, **named):
    alarm = take(self, told, **named)
    seen["alarms"] += [told.number] if alarm else []
    return alarm
figures.RankFigures.take = noted

class Capture(running.Session):
    def close(self):
        super().close()
        seen["ended"] = 1
recording.Session = Capture
begin = running.begin
def noted_begin(settings, pipeline, *, done):
    seen["begun"].append(done)
    return begin(settings, pipeline, done=done)
running.begin = noted_begin
if is_even:
    record._choose_clock = EvenClock

dist.init_process_group("gloo")
stage = PipelineStage(Layer(32, 32), rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, 2, loss_fn=torch.nn.functional.mse_loss)
meter = debubble.meter(out=out)
batch = torch.ones(4, 32, requires_grad=True)
captured = torch.zeros(1)
while step < steps or (not captured and step < MOST_STEPS):
    schedule.step(batch) if rank == 0 else schedule.step(target=batch.detach())
    step += 1
    if step >= steps:  # on, until all ranks have captured
        captured.fill_(seen["ended"])
        dist.all_reduce(captured, dist.ReduceOp.MIN)
meter.close()
seen["problem"] = meter.problem
with open(f"{out}/seen{rank}.json", "w") as file:
    json.dump(seen, file)
dist.destroy_process_group()
"""
PLANTED_AT = 190


@pytest.mark.parametrize(
    ("pass_s", "is_even"),
    [
        pytest.param(0.002, 1, id="by-a-clock-that-is-even"),
        pytest.param(0.02, 0, id="by-the-hosts-own", marks=pytest.mark.accuracy),
    ],
)
def test_a_rank_that_gets_5_percent_slower_has_all_ranks_capture_the_same_steps_once(
    tmp_path, pass_s, is_even
):
    script = tmp_path / "drifting.py"
    script.write_text(DRIFTING)
    words = map(str, (tmp_path / "meter", PLANTED_AT + 30, PLANTED_AT, pass_s, is_even))
    done = subprocess.run(
        [*TORCHRUN, "--standalone", str(script), *words],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | QUIET,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    quiet, slow = (
        json.loads((tmp_path / "meter" / f"seen{rank}.json").read_text()) for rank in range(2)
    )
    assert quiet["problem"] is None
    assert slow["problem"] is None
    assert quiet["alarms"] == []
    (alarm,) = slow["alarms"]
    assert PLANTED_AT < alarm <= PLANTED_AT + 20
    assert len(slow["begun"]) == 1
    assert quiet["begun"] == slow["begun"]
    (capture,) = (tmp_path / "meter" / "captures").iterdir()
    assert sorted(file.name for file in capture.glob("*.json.gz")) == [
        "rank0.json.gz",
        "rank1.json.gz",
    ]
