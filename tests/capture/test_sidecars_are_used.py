"""What a job says beside its traces: used where they are silent, doubted where they deny it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from support.jobs.gloo_job import run_job
from support.services.console import type_command
from support.traces.recordings import H200

from debubble.timeline.build import build_run
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.job import ask_job
from debubble.trace.run import find_run, read_run

pytestmark = pytest.mark.slow

STEPS = 3
LONG_ENOUGH = 2 + 3 * STEPS + 2
TOKENS = 256


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A real capture of 1F1B over gloo."""
    job = run_job(
        tmp_path_factory.mktemp("said"),
        steps=LONG_ENOUGH,
        give="schedule",
        capture={"steps": STEPS, "wait": 2, "tokens": TOKENS, "context_lengths": [300, 500]}
        | {"split": [3, 3]},
    )
    assert job.codes == [0, 0], job.output
    (folder,) = job.out.iterdir()
    return folder


@pytest.fixture
def capture(captured, tmp_path):
    """A copy of it, to be tampered with."""
    return shutil.copytree(captured, tmp_path / "capture")


def edit(folder, change):
    """Let a function change each sidecar, given its data and its rank."""
    for file in sorted(folder.glob("*.debubble.json")):
        data = json.loads(file.read_text())
        change(data, data["rank"])
        file.write_text(json.dumps(data))


def answer(words, folder, code=0):
    found = type_command(f"debubble {words} --json", folder.parent)
    assert found.code == code, found.text
    return json.loads(found.text)


def codes(data):
    """Warnings; how well a replay of processes on a busy machine lands is not the point here."""
    return [gap["code"] for gap in data["warnings"] if gap["code"] != "replay_misses"]


def slow_down(folder, cost):
    """Let the profiler have cost so much, as a share of each step."""

    def change(data, _):
        data["steps"].update(
            before_s=[0.4, 0.5, 0.6], after_s=[0.5] * STEPS, profiled_s=[0.5 * (1 + cost)] * STEPS
        )

    edit(folder, change)


def test_find_shows_the_step_without_the_profiler_and_what_the_capture_cost(capture):
    middle, cost = 0.5, 0.1
    slow_down(capture, cost)
    data = answer(f"find {capture}", capture)
    assert data["job"]["unprofiled_step_time_s"] == pytest.approx(middle)
    assert data["job"]["overhead_fraction"] == pytest.approx(cost)
    assert data["job"]["steps_timed"] == 2 * STEPS
    assert data["numbers"]["unprofiled_batch_latency_s"] == pytest.approx(
        data["numbers"]["batch_latency_s"] / (1 + cost), rel=1e-6
    )
    assert data["numbers"]["tokens_per_s"] == pytest.approx(TOKENS / middle)
    assert (data["job"]["tokens"], data["job"]["context_lengths"]) == (TOKENS, [300, 500])
    assert "sidecar_differs" not in codes(data)
    text = type_command(f"debubble find {capture}", capture.parent).text
    assert "times: profiled; unprofiled: " in text
    assert "; profiling overhead " in text


def test_steps_that_were_quicker_under_the_profiler_are_no_measure_of_it(capture):
    slow_down(capture, -0.17)
    found = answer(f"find {capture}", capture)
    assert found["numbers"]["unprofiled_batch_latency_s"] is None
    plan = answer(f"plan {capture}", capture)["baseline"]
    assert plan["numbers"]["batch_latency_s"] == found["numbers"]["batch_latency_s"]
    assert plan["without_profiler"] is None
    text = type_command(f"debubble find {capture}", capture.parent).text
    assert "; profiled steps were 17 % faster: the unprofiled ones were disturbed" in text
    assert "overhead -" not in text


def test_simulate_knows_the_tokens_of_a_microbatch(capture):
    asked = answer(f"simulate {capture} --tokens {TOKENS // 4}", capture)
    assert asked["given"]["tokens"] == TOKENS // 4
    assert asked["given"]["changes_nothing"]
    assert asked["measured"]["tokens_per_s"] is not None


def test_a_split_that_kernels_do_not_show_is_the_jobs(capture):
    data = answer(f"find {capture}", capture)
    assert [stage["layers"] for stage in data["stages"]] == [3, 3]
    assert answer(f"plan {capture}", capture)["baseline"]["split"] == [3, 3]


def test_what_the_traces_deny_is_a_warning_and_not_believed(capture):
    edit(capture, lambda data, _: data["pipeline"].update(schedule="gpipe", microbatches=8))
    data = answer(f"find {capture}", capture)
    messages = [gap["message"] for gap in data["warnings"] if gap["code"] == "sidecar_differs"]
    assert messages == [
        "schedule: the job says gpipe, its traces show 1f1b",
        "microbatches: the job says 8, its traces show 4",
    ]
    assert (data["run"]["schedule"], data["run"]["microbatches"]) == ("1f1b", 4)


def test_ranks_that_contradict_each_other_are_not_believed(capture):
    edit(capture, lambda data, rank: data["workload"].update(tokens=TOKENS + rank))
    data = answer(f"find {capture}", capture)
    assert data["job"]["tokens"] is None
    assert "ranks say different tokens of one run: 256 and 257" in str(data["warnings"])


def test_a_sidecar_of_another_rank_is_not_used(capture):
    first, second = sorted(capture.glob("*.debubble.json"))
    second.write_text(first.read_text())
    data = answer(f"find {capture}", capture)
    assert codes(data) == ["sidecar_differs"]
    assert "was written by rank 0" in data["warnings"][0]["message"]


def test_a_schedule_that_is_not_recognised_is_the_jobs(captured):
    run = read_run(find_run([str(captured)]))
    figures = replace(measure_pipeline(build_run(run), 0), schedule=None)
    facts = ask_job(run.sidecars, figures)
    assert facts.schedule_for(figures) == "1f1b"
    assert facts.gaps == ()


GIB = 1024**3


@pytest.fixture
def on_a_gpu(tmp_path):
    """A recorded H200 run, with the memory that a sidecar would have told."""
    folder = shutil.copytree(H200 / "1f1b_p2_m4", tmp_path / "gpu")
    for rank in (0, 1):
        said = {
            "schema": "debubble.sidecar/1",
            "rank": rank,
            "memory": {
                "max_allocated_bytes": 7 * GIB,
                "max_reserved_bytes": 9 * GIB,
                "reserved_bytes": 8 * GIB,
                "free_bytes": 100 * GIB,
                "total_bytes": 140 * GIB,
            },
        }
        (folder / f"rank{rank}.debubble.json").write_text(json.dumps(said))
    return folder


def test_the_jobs_own_peak_and_what_others_hold_come_from_the_sidecar(on_a_gpu):
    data = answer(f"find {on_a_gpu}", on_a_gpu)
    for rank in data["memory"]:
        assert rank["job_peak_bytes"] == 7 * GIB
        assert rank["free_bytes"] == 100 * GIB
        assert rank["other_bytes"] == 32 * GIB
        assert rank["peak_bytes"] < 6 * GIB


def test_compare_takes_the_peak_of_the_whole_job(on_a_gpu):
    words = f"compare tests/data/h200/1f1b_p2_m4 {on_a_gpu} --memory-limit 7GiB"
    data = answer(words, on_a_gpu)
    assert [rank["after_bytes"] for rank in data["memory"]] == [7 * GIB, 7 * GIB]
    assert data["verdict"] == "unsafe_memory"
