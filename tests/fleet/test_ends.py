"""What becomes of a large run that is stopped, or has nowhere to go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.services.console import type_command
from support.simulator.replicas import IN_PARTS, write_side_by_side

from debubble.annexes.cluster import engine_at
from debubble.errors import EngineError, UsageError
from debubble.timeline.fleet.shelf import Spool
from debubble.timeline.fleet.survey import survey_run
from debubble.trace.run import find_run

PATIENCE_S = 60
HELD = """
import sys, time
from pathlib import Path
import debubble.timeline.fleet.shelf as shelf
import debubble.trace.engine as engine
from debubble.cli import main

def hold(known, limits, digests=None):
    Path(sys.argv[2], "begun").touch()
    time.sleep(600)

shelf.scout_file = hold
engine._WORTH_A_POOL_BYTES = 0
main(["find", sys.argv[1], "--quiet"])
"""


def children_of(process):
    listed = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(one) for one in listed.split()]


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_find_that_is_ended_takes_its_workers_along(tmp_path, number):
    traces, temporary = tmp_path / "traces", tmp_path / "temporary"
    write_side_by_side(traces, 4, ranks=17, microbatches=2)
    temporary.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HELD, str(traces), str(tmp_path)],
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        end(job, tmp_path / "begun", number)
        if number == signal.SIGTERM:
            # Python's own exit may complain of a pipe that is gone, once in many times.
            assert job.stderr.read().strip().splitlines()[0] == "error: interrupted"
            assert list(temporary.iterdir()) == []


def end(job, begun, number):
    """Send a signal once work is in hand; wait until nobody is left."""
    until = time.monotonic() + PATIENCE_S
    while not begun.exists():
        assert job.poll() is None, job.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.05)
    workers = children_of(job.pid)
    job.send_signal(number)
    job.wait(timeout=PATIENCE_S)
    while any(is_alive(worker) for worker in workers):
        assert time.monotonic() < until, "workers are left"
        time.sleep(0.05)
    assert workers


def test_a_temporary_folder_that_is_full_is_named(tmp_path, monkeypatch):
    write_side_by_side(tmp_path, 2)

    class Full:
        def write(self, _data):
            raise OSError(28, "No space left on device")

    @contextmanager
    def full():
        yield Spool(Full(), "full")

    monkeypatch.setattr("debubble.timeline.fleet.shelf.spooling", full)
    with pytest.raises(EngineError, match="No space left on device") as why:
        survey_run(find_run([str(tmp_path)]), means=IN_PARTS)
    assert "TMPDIR" in why.value.hint


def test_no_place_for_digests_is_refused(tmp_path):
    write_side_by_side(tmp_path, 1)
    answer = type_command("debubble inspect . --digest ''", tmp_path)
    assert answer.code == 2
    assert "--digest needs a place" in answer.text


def test_an_address_without_a_port_is_refused_at_once():
    with pytest.raises(UsageError, match="no engine 'tcp://scheduler'"):
        engine_at("tcp://scheduler")
