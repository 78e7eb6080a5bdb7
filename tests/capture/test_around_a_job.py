"""`debubble capture -- COMMAND` around real jobs that have never heard of debubble."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs.around_a_job import SCRIPT, TORCHRUN, run_verb

from debubble.capture.settings import INJECTED, Settings, environment_for, read_order
from debubble.errors import UsageError
from debubble.timeline.build import build_timeline
from debubble.timeline.figures import measure_pipeline
from debubble.trace.run import find_run, read_run
from debubble.trace.sidecar import read_sidecar

pytestmark = pytest.mark.slow

FEW = ["--steps", "1", "--wait", "1"]
ENOUGH = "8"


def run_program(program, environment):
    return subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )


def test_a_pipeline_under_torchrun_is_captured_and_labelled(tmp_path):
    done = run_verb(tmp_path, "capture", *FEW, "--json", "--", *TORCHRUN, SCRIPT, ENOUGH)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["schema"] == "debubble.capture/1"
    assert done.stderr.count("the job's own words") == 2
    (only,) = said["captures"]
    assert [Path(one).name for one in only["traces"]] == ["rank0.json.gz", "rank1.json.gz"]
    ranks = read_run(find_run([str(tmp_path / "debubble-traces")])).ranks
    assert any(name == "PP:1F3" for name in ranks[1].names)
    figures = measure_pipeline(build_timeline(ranks), 0)
    assert (figures.schedule, figures.microbatches) == ("1f1b", 4)
    sidecar, _ = read_sidecar(str(tmp_path / only["traces"][1]))
    assert sidecar.schedule == "1f1b"
    assert len(sidecar.steps.after_s) == 1


def test_without_a_pipeline_the_first_optimizer_gives_the_beat(tmp_path):
    words = ["--out", "here", *FEW, "--every", "5", "--keep", "1"]
    done = run_verb(tmp_path, "capture", *words, "--", sys.executable, SCRIPT, "13", "optimizers")
    assert done.returncode == 0, done.stderr
    assert "the job's own words" in done.stdout
    assert "1 capture of 1 rank." in done.stdout
    (folder,) = (tmp_path / "here").iterdir()
    # Begun at the end of step 0, so one later than counted; were both counted, it came at half.
    assert folder.name.endswith("step000000008")


def test_a_job_too_short_to_capture_is_said_to_be(tmp_path):
    done = run_verb(tmp_path, "capture", *FEW, "--", sys.executable, SCRIPT, "2", "optimizers")
    assert done.returncode == 2
    assert "nothing was captured" in done.stderr
    assert "it takes 7 steps" in done.stderr


def test_a_job_that_fails_is_said_to_have_failed(tmp_path):
    done = run_verb(tmp_path, "capture", "--", sys.executable, "-c", "raise SystemExit(7)")
    assert done.returncode == 2
    assert "error: the command ended with exit code 7" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_is_not_there_is_said_not_to_be(tmp_path):
    done = run_verb(tmp_path, "capture", "--", "no-such-program")
    assert done.returncode == 2
    assert "no-such-program cannot be started" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    run_verb(tmp_path, "capture", "--out", "mine", "--", "no-such-program")
    assert (tmp_path / "mine").is_dir()


def test_the_environments_own_sitecustomize_is_run_as_ever(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.was_here = True")
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    program = (
        "import sys; assert sys.was_here; assert 'torch' not in sys.modules; "
        f"assert {str(INJECTED)!r} not in sys.path; assert 'debubble' in sys.modules"
    )
    done = run_program(program, environment_for(Settings(out=tmp_path), given))
    assert done.returncode == 0, done.stderr


def test_an_order_is_read_back_as_it_was_given(tmp_path):
    settings = Settings(out=tmp_path, steps=3, every=40, keep=2, split=(1, 2))
    environment = environment_for(settings, {})
    assert read_order(Settings, environment) == settings
    assert read_order(Settings, {}) is None
    with pytest.raises(UsageError, match="captured already"):
        environment_for(settings, environment)


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"out": "x", "color": 1}'])
def test_a_damaged_order_is_refused(damage):
    with pytest.raises(UsageError, match="is damaged"):
        read_order(Settings, {Settings.variable: damage})


def test_a_damaged_order_does_not_stop_the_job():
    order = {Settings.variable: "{", "PYTHONPATH": str(INJECTED)}
    done = run_program("print('runs')", os.environ | order)
    assert (done.returncode, done.stdout) == (0, "runs\n")
    assert "this process is not captured" in done.stderr
