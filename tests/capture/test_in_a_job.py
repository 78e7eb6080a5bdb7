"""Captures inside real two-rank gloo jobs: what they leave, and what they leave alone."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.jobs.gloo_job import run_job

import debubble
from debubble.errors import CaptureError, MissingExtra, UsageError
from debubble.timeline.build import build_timeline
from debubble.timeline.figures import measure_pipeline
from debubble.trace.run import find_run, read_run
from debubble.trace.sidecar import read_sidecar

pytestmark = pytest.mark.slow

STEPS = 3
ONCE = {"steps": STEPS, "wait": 2}
# Two waited for, three windows, one step of warm-up and one of settling.
LONG_ENOUGH = 2 + 3 * STEPS + 2


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """1F1B, which names no pass itself."""
    more = {"tokens": 256, "context_lengths": [16, 32], "split": [3, 3]}
    return run_job(
        tmp_path_factory.mktemp("labelled"),
        steps=LONG_ENOUGH,
        give="schedule",
        capture=ONCE | more,
    )


def ranks_of(job):
    return read_run(find_run([str(job.out)])).ranks


def names_in(job, rank):
    (file,) = job.out.glob(f"*/rank{rank}.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def passes_of(timeline):
    columns = ("rank", "step", "stage", "kind", "microbatch", "start_ns", "end_ns")
    return sorted(zip(*(getattr(timeline.passes, one).tolist() for one in columns), strict=True))


def test_find_reads_a_capture_as_it_lies_there(labelled):
    assert labelled.codes == [0, 0], labelled.output
    (name,) = labelled.captures()
    kinds = ("debubble.json", "json.gz")
    assert labelled.files() == [f"{name}/rank{rank}.{kind}" for rank in (0, 1) for kind in kinds]
    run = read_run(find_run([str(labelled.out)]))
    assert (run.gaps, run.found.left_alone) == ((), ())
    figures = measure_pipeline(build_timeline(run.ranks), 0)
    assert (figures.schedule, figures.microbatches) == ("1f1b", 4)
    assert len(figures.windows) == STEPS


def test_labels_name_the_very_passes_that_structure_finds_and_all_of_them(labelled):
    traces = ranks_of(labelled)
    bare = []
    for trace in traces:
        is_label = np.array([name.startswith("PP:") for name in trace.names])
        kept = ~is_label[trace.annotations.name]
        assert not kept.all()
        bare.append(replace(trace, annotations=trace.annotations.take(kept)))
    with_labels, by_structure = build_timeline(traces), build_timeline(bare)
    named, found = passes_of(with_labels), passes_of(by_structure)
    assert [one[:5] for one in named] == [one[:5] for one in found]
    # Where a pass ends differs by what the schedule does around it, such as cutting up the batch.
    assert all(
        max(one[5], other[5]) < min(one[6], other[6])
        for one, other in zip(named, found, strict=True)
    )
    assert len(with_labels.passes) == 2 * STEPS * 4 * 2  # ranks, steps, microbatches, F and B


def test_the_job_computes_the_same_to_the_last_bit_and_is_unwrapped(labelled, tmp_path):
    plain = run_job(tmp_path, steps=LONG_ENOUGH)
    assert plain.results[1]["losses"][-1]
    assert [one["losses"] for one in labelled.results] == [one["losses"] for one in plain.results]
    assert [one["wrapped"] for one in labelled.results] == [[], []]


@pytest.mark.parametrize(
    ("schedule", "chunks", "own"),
    [("ScheduleGPipe", 1, "Forward "), ("ScheduleInterleavedZeroBubble", 2, "PP:0F")],
)
def test_schedules_that_name_their_passes_are_not_named_twice(tmp_path, schedule, chunks, own):
    job = run_job(
        tmp_path,
        steps=LONG_ENOUGH,
        schedule=schedule,
        chunks=chunks,
        give="schedule",
        capture=ONCE,
    )
    assert job.codes == [0, 0], job.output
    names = names_in(job, 0)
    assert len([name for name in names if name.startswith(own)]) == STEPS * 4
    if chunks == 1:
        assert not any(name.startswith("PP:") for name in names)


def test_the_sidecar_says_what_the_profiler_cannot_see(labelled):
    for rank in (0, 1):
        (trace,) = labelled.out.glob(f"*/rank{rank}.json.gz")
        said, gap = read_sidecar(str(trace))
        assert gap is None
        assert (said.rank, said.world_size, said.capture) == (rank, 2, trace.parent.name)
        assert (said.schedule, said.microbatches, said.split) == ("1f1b", 4, (3, 3))
        assert (said.tokens, said.context_lengths) == (256, (16, 32))
        times = said.steps
        assert [len(one) for one in (times.before_s, times.profiled_s, times.after_s)] == [3] * 3
        assert said.environment["backend"] == "gloo"
        assert said.max_allocated_bytes is None


def loop(out, steps, **settings):
    """Run a loop of one rank in this process; return the names of the captures that it leaves."""
    with debubble.capture(out=out, steps=1, **settings):
        for _ in range(steps):
            torch.ones(2).sum()
            debubble.step()
    return sorted(folder.name for folder in out.iterdir())


def test_captures_come_again_and_the_oldest_go(tmp_path):
    length = 3 * 1 + 2
    names = loop(tmp_path, 1 + 4 * length, wait=1, every=length, keep=2)
    first = [1 + index * length + 2 for index in range(4)]
    assert [int(name.split("step")[1]) for name in names] == first[-2:]
    assert len(list(tmp_path.glob("*/*"))) == 2 * 2


def test_a_clock_that_was_set_back_does_not_cost_the_capture_just_taken(tmp_path):
    for name in ("29990101-000000-step000000003", "29990102-000000-step000000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank0.json.gz").touch()
    kept = loop(tmp_path, 6, wait=0, keep=2)
    assert kept[0].endswith("step000000002")


def test_two_jobs_that_capture_the_same_step_into_one_folder_do_not_mix(tmp_path):
    from debubble.capture.files import CaptureFiles  # noqa: PLC0415

    files = CaptureFiles(out=tmp_path, name="20260131-235959-step000000003", rank=0)
    files.export(lambda plain: plain.write_text("{}"))
    with pytest.raises(CaptureError, match="another job captures the same step"):
        files.export(lambda plain: plain.write_text("{}"))
    assert [file.name for file in files.folder.iterdir()] == ["rank0.json.gz"]


def test_a_full_disk_costs_one_capture_and_leaves_nothing_behind(tmp_path):
    wanted = {"steps": 1, "wait": 1, "every": 6}
    job = run_job(tmp_path, steps=13, capture=wanted, full_disk_at=2, free_disk_at=6)
    assert job.codes == [0, 0], job.output
    for result, output in zip(job.results, job.output, strict=True):
        (problem,) = result["problems"]
        assert "could not write the whole trace; look whether the disk is full" in problem
        assert problem in output
    (name,) = job.captures()
    assert name.endswith("step000000009")
    assert len(job.files()) == 4


def test_a_rank_that_dies_in_a_capture_leaves_no_trace_of_half_a_capture(tmp_path):
    job = run_job(tmp_path, steps=LONG_ENOUGH, capture=ONCE, die_at=2 + STEPS + 2)
    assert job.codes[1] == 9
    assert job.codes[0] != 0
    assert job.files() == []


def test_a_loop_that_ends_too_early_leaves_nothing_and_says_so(tmp_path):
    job = run_job(tmp_path, steps=2 + STEPS + 2, give="schedule", capture=ONCE)
    assert job.codes == [0, 0]
    assert job.results[0]["problems"] == ["the loop ended after 1 of 3 profiled steps"]
    assert job.results[0]["wrapped"] == []
    assert job.files() == []


def test_a_process_has_one_capture_at_a_time(tmp_path):
    with debubble.capture(out=tmp_path):
        with pytest.raises(CaptureError, match="inside a capture already"):
            debubble.capture(out=tmp_path).__enter__()
        debubble.step()
    with debubble.capture(out=tmp_path):
        debubble.step()


def test_another_profiler_at_work_costs_a_capture_and_not_the_job(tmp_path):
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own,
        debubble.capture(out=tmp_path, steps=1, wait=0) as session,
    ):
        for _ in range(6):
            torch.ones(2).sum()
            debubble.step()
    assert len(session.problems) == 1
    assert any(event.key == "aten::sum" for event in own.key_averages())
    assert list(tmp_path.iterdir()) == []


def test_a_torch_without_profiler_is_refused_before_the_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.profiler, "kineto_available", lambda: False)
    with pytest.raises(CaptureError, match="built without its profiler"):
        debubble.capture(out=tmp_path)


def test_no_torch_at_all_is_refused_before_the_loop(monkeypatch):
    for name in [one for one in sys.modules if one.startswith("debubble.capture.recording")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match="needs torch"):
        debubble.capture()


def test_a_folder_that_cannot_be_written_is_refused_before_the_loop(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CaptureError, match="cannot be written there"):
        debubble.capture(out=tmp_path / "file" / "out").__enter__()
    with debubble.capture(out=tmp_path / "out"):  # the failed one is not in the way
        debubble.step()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"keep": 0}, "keep is 0"),
        ({"steps": 6, "every": 19}, "one capture takes 20 steps"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, problem):
    with pytest.raises(UsageError, match=problem):
        debubble.capture(**settings)


def test_what_is_no_pipeline_is_refused():
    with pytest.raises(UsageError, match="object is no schedule"):
        debubble.capture(object())


def test_between_captures_a_step_asks_for_no_clock(tmp_path):
    from debubble.capture.recording import Session  # noqa: PLC0415
    from debubble.capture.settings import Settings  # noqa: PLC0415

    asked = []
    settings = Settings(steps=1, wait=1000, out=tmp_path)
    session = Session(settings, None, clock=lambda: asked.append(1) or 0.0)
    with session:
        for _ in range(999):
            session.step()
        assert not asked
        session.step()
        assert asked


ALONE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"click", "fsspec", "isal", "msgspec", "rich"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
import debubble
assert "torch" not in sys.modules and "debubble.capture" not in sys.modules
debubble.step()
assert "torch" not in sys.modules
import torch
"""
CAPTURES = """
with debubble.capture(out="out", steps=1, wait=0) as session:
    for _ in range(6):
        torch.ones(2).sum()
        debubble.step()
assert session.problems == []
"""
METERS = """
meter = debubble.meter(out="out", on_drift=False)
for _ in range(2):
    meter.step()
    with meter.forward(0): pass
meter.close()
assert meter.problem is None, meter.problem
assert "debubble.trace" not in sys.modules
"""


@pytest.mark.parametrize(("program", "files"), [(CAPTURES, 2), (METERS, 2)])
def test_torch_and_the_standard_library_are_enough(tmp_path, program, files):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE + program],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("out/*/rank0.*"))) == files
