"""With or without the profiler is decided once: no two verbs give a figure on different bases."""

from __future__ import annotations

import json
import shutil
from functools import cache
from statistics import median

import pytest
from support.services.console import type_command
from support.traces.recordings import DATA, H200, SHARED

import debubble

DEMO = DATA / "demo"
TRUTHS = [
    folder
    for home in (H200, SHARED / "h200")
    if home.is_dir()
    for folder in sorted(home.iterdir())
    if (folder / "truth0.json").is_file()
]


@cache
def step_s(folder):
    numbers = debubble.find(str(folder)).numbers
    return numbers.step_time_s or numbers.batch_latency_s


def with_sidecars(folder, copy):
    """Lay beside traces what their job timed without the profiler, as a capture would have."""
    profiled = step_s(folder)
    shutil.copytree(folder, copy)
    for truth in copy.glob("truth*.json"):
        rank = int(truth.stem.removeprefix("truth"))
        said = {
            "schema": "debubble.sidecar/1",
            "rank": rank,
            "steps": {
                "before_s": json.loads(truth.read_text())["wall_s"],
                "profiled_s": [profiled],
            },
        }
        (copy / f"rank{rank}.debubble.json").write_text(json.dumps(said))
    return copy


def answers_of(folder):
    run = debubble.analyse(str(folder))
    compared = debubble.compare(run, run)
    return (
        run,
        debubble.find(run),
        debubble.plan(run, frameworks=()),
        debubble.simulate(run),
        compared,
    )


def check(folder, tmp_path):
    run, found, plan, simulated, compared = answers_of(folder)
    words = f"history add {folder} --name kept --store sqlite:///{tmp_path}/h.db --json"
    (record,) = json.loads(type_command(f"debubble {words}", tmp_path).text)["records"]
    side = compared.before
    bases = {plan.basis, simulated.basis, compared.basis, side.basis, record["basis"]}
    assert bases == {str(run.basis.name)}
    latencies = [
        simulated.measured.batch_latency_s,
        side.numbers.batch_latency_s,
        record["numbers"]["batch_latency_s"],
    ]
    assert latencies == pytest.approx([plan.baseline.numbers.batch_latency_s] * 3, rel=1e-6)
    rate = plan.baseline.numbers.microbatches_per_s
    assert simulated.measured.microbatches_per_s == pytest.approx(rate)
    if run.basis.source == "sidecars":
        # The median of the rates of two steps is not quite the rate of their median.
        assert side.numbers.microbatches_per_s == pytest.approx(rate, rel=1e-3)
        assert found.numbers.unprofiled_batch_latency_s == pytest.approx(latencies[0])
        profiled = side.numbers.profiled_batch_latency_s
        assert found.numbers.batch_latency_s == pytest.approx(profiled, rel=1e-8)
        assert found.job.unprofiled_step_time_s == pytest.approx(side.numbers.step_time_s)
    else:
        assert found.numbers.batch_latency_s == pytest.approx(latencies[0])
        assert side.numbers.profiled_batch_latency_s is None
    assert found.basis == "profiled"
    return run


@pytest.mark.parametrize("side", ["before", "after"])
def test_every_verb_has_the_batch_of_a_real_capture_without_the_profiler(side, tmp_path):
    run = check(DEMO / side, tmp_path)
    assert (run.basis.name, run.basis.source) == ("unprofiled", "sidecars")


@pytest.mark.slow
@pytest.mark.parametrize("folder", [pytest.param(one, id=one.name) for one in TRUTHS])
def test_every_verb_has_the_batch_that_the_job_timed(folder, tmp_path):
    copy = with_sidecars(folder, tmp_path / folder.name)
    run = debubble.analyse(str(copy))
    if run.pipeline.kind == "stream" or run.pipeline.batch_latency_ns is None:
        assert run.basis.source == "traces"
        return
    run = check(copy, tmp_path)
    timed = [json.loads(file.read_text())["wall_s"] for file in sorted(copy.glob("truth*.json"))]
    unprofiled = median(map(median, zip(*timed, strict=True)))
    disturbed = step_s(folder) / unprofiled - 1 < -0.05
    assert run.basis.name == ("profiled" if disturbed else "unprofiled")
    if not disturbed:
        assert run.basis.step_time_ns == pytest.approx(unprofiled * 1e9)


PLAN = f"plan {DEMO / 'before'} --max-microbatches 8"
COMPARE = f"compare {DEMO / 'before'} {DEMO / 'after'}"
LINE = (
    "split 4,4,4,4, 8 microbatches: "
    "predicted 916 ms (850 to 987 ms), measured 871 ms: as predicted."
)


def test_compare_says_what_came_of_a_prediction_that_was_kept(tmp_path):
    store = f"--store sqlite:///{tmp_path}/h.db"
    assert LINE not in type_command(f"debubble {COMPARE} {store}", tmp_path).text
    kept = type_command(f"debubble {PLAN} --save before {store}", tmp_path).text
    assert "kept as before: after the change, debubble compare before AFTER" in kept
    for words in (COMPARE, f"compare before {DEMO / 'after'}"):
        assert LINE in type_command(f"debubble {words} {store}", tmp_path).text
    assert LINE in type_command(f"debubble {COMPARE} {store} --markdown", tmp_path).text
    page = tmp_path / "page.html"
    type_command(f"debubble {COMPARE} {store} --html {page}", tmp_path)
    assert "measured 871 ms" in page.read_text()
    data = json.loads(type_command(f"debubble {COMPARE} {store} --json", tmp_path).text)
    assert data["predicted"]["verdict"] == "as predicted"
    assert data["predicted"]["basis"] == data["basis"] == "unprofiled"
    assert data["predicted"]["measured_s"] == data["after"]["numbers"]["batch_latency_s"]
    brief = json.loads(type_command(f"debubble {COMPARE} {store} --json=brief", tmp_path).text)
    assert brief["predicted"]["verdict"] == "as predicted"


def test_a_prediction_is_taken_from_a_file_and_its_change_may_be_named(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(type_command(f"debubble {PLAN} --json", tmp_path).text)
    given = f"{COMPARE} --predicted {file}"
    assert LINE in type_command(f"debubble {given}", tmp_path).text
    named = type_command(f"debubble {given} --change '8 microbatches'", tmp_path).text
    assert "8 microbatches: predicted 1.27 s" in named
    assert "faster than predicted: compute" in named
    wrong = type_command(f"debubble {given} --change nonsense", tmp_path)
    assert (wrong.code, "nothing was predicted of 'nonsense'" in wrong.text) == (2, True)
    broken = type_command(f"debubble {COMPARE} --predicted {DEMO}", tmp_path)
    assert (broken.code, "this is no answer of debubble plan" in broken.text) == (2, True)
