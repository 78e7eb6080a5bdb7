"""`debubble meter -- COMMAND` around real jobs that have never heard of debubble."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs.around_a_job import SCRIPT, TORCHRUN, run_verb, run_with_a_damaged_order
from support.requirements import need_package

need_package("torch")

import debubble
from debubble.capture.settings import environment_for, read_order
from debubble.meter.settings import Settings

pytestmark = pytest.mark.slow


def test_a_pipeline_is_metered_every_verb_reads_it_and_a_file_has_all_ranks_capture_once(tmp_path):
    (tmp_path / "debubble-meter").mkdir()
    (tmp_path / "debubble-meter" / "capture-now").touch()
    words = ("--segment", "300", "--no-on-drift", "--json")
    done = run_verb(tmp_path, "meter", *words, "--", *TORCHRUN, SCRIPT, "700")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["schema"] == "debubble.meter/1"
    assert [len(segment["tables"]) for segment in said["segments"]] == [2, 2, 2]
    assert done.stderr.count("the job's own words") == 2
    second, third = (str(tmp_path / segment["folder"]) for segment in said["segments"][1:])
    found = debubble.find(second)
    assert (found.run.ranks, found.run.microbatches, found.run.schedule) == (2, 4, "1f1b")
    assert len(found.run.steps) == 300
    assert 0 < found.numbers.bubble_fraction < 1
    assert {(hop.from_stage, hop.to_stage) for hop in found.hops} == {(0, 1), (1, 0)}
    assert debubble.plan(second).baseline is not None
    assert debubble.compare(second, third).verdict
    metrics = (tmp_path / "debubble-meter" / "rank1.prom").read_text()
    assert 'debubble_meter_pass_seconds{rank="1",pipeline="0",stage="1",pass="F"}' in metrics
    (capture,) = (tmp_path / "debubble-meter" / "captures").iterdir()
    traces = sorted(file.name for file in capture.glob("*.json.gz"))
    assert traces == ["rank0.json.gz", "rank1.json.gz"]
    assert not (tmp_path / "debubble-meter" / "capture-now").exists()


def test_a_rank_that_is_killed_leaves_the_others_to_their_own_error(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import os, signal\n"
        "from torch.distributed.pipelining import schedules\n"
        "step, done = schedules.PipelineScheduleSingle.step, []\n"
        "def counted(*given, **named):\n"
        "    done.append(1)\n"
        "    if len(done) == 9 and os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return step(*given, **named)\n"
        "schedules.PipelineScheduleSingle.step = counted\n"
        + Path(SCRIPT).read_text().replace("from __future__ import annotations", "")
    )
    done = run_verb(tmp_path, "meter", "--", *TORCHRUN, str(script), "40")
    assert done.returncode == 2
    assert "the command ended with exit code 1" in done.stderr
    assert "SIGKILL" in done.stderr
    assert "meter is silent" not in done.stderr


def test_an_order_is_read_back_as_it_was_given(tmp_path):
    settings = Settings(out=tmp_path, segment=3, keep=4, on_drift=False, port=9470, split=(1, 2))
    assert read_order(Settings, environment_for(settings, {})) == settings
    assert read_order(Settings, {}) is None


def test_a_damaged_order_does_not_stop_the_job():
    done = run_with_a_damaged_order(Settings)
    assert (done.returncode, done.stdout) == (0, "runs\n")
    assert "this process is not metered" in done.stderr


def test_nothing_is_imported_but_torch_and_the_standard_library(tmp_path):
    program = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in {'msgspec', 'rich', 'click', 'fsspec', 'isal'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import debubble\n"
        "meter = debubble.meter(on_drift=False)\n"
        "meter.step()\n"
        "with meter.forward(0): pass\n"
        "meter.close()\n"
        "assert meter.problem is None, meter.problem\n"
        "print(sorted(name for name in sys.modules if name.startswith('debubble.'))[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "debubble.trace" not in done.stdout
