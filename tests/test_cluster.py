"""A run read by a real Dask cluster: the same answer; a death costs the work of the dead only."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from support.jobs import worker_tasks
from support.jobs.worker_tasks import notes_of, write_orders
from support.processes import wait_until
from support.requirements import need_package
from support.services.console import type_command
from support.services.dask_cluster import count_tasks, count_workers, started_cluster
from support.traces.recordings import H200

from debubble.annexes import cluster as dask
from debubble.annexes.cluster import DaskEngine, engine_at
from debubble.errors import EngineError, MissingExtra, TraceError
from debubble.trace.engine import map_files
from debubble.trace.source import DEFAULT_LIMITS

need_package("distributed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.service,
    # Dask's own: clients leave sockets and coroutines to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def running():
    with started_cluster() as started:
        yield started


@pytest.fixture
def cluster(running):
    """Lend the cluster with two workers, new ones in place of those that a test killed."""
    alive = sum(process.poll() is None for process in running.processes[1:])
    for _ in range(2 - alive):
        running.start_worker()
    wait_until(lambda: count_workers(running.address) == 2)
    return running


def outcomes(task, files, cluster):
    found = map_files(task, files, engine_at(cluster.address), DEFAULT_LIMITS)
    return {Path(known.file).name: outcome for known, outcome in found}


@pytest.mark.parametrize("verb", ["inspect", "find"])
@pytest.mark.parametrize("name", ["1f1b_p2_m4", "fwd_closed_m4"])
def test_a_cluster_gives_the_same_answer_to_the_digit(cluster, tmp_path, verb, name):
    command = f"debubble {verb} {H200 / name} --json"
    here = type_command(command, tmp_path)
    there = type_command(f"{command} --engine {cluster.address}", tmp_path)
    assert here.code == there.code == 0
    assert json.loads(there.out) == json.loads(here.out)
    assert there.err == ""


def test_a_worker_killed_in_the_middle_costs_its_own_work_only(cluster, tmp_path):
    files = write_orders(tmp_path, ["1", "2", "3", "held", *map(str, range(4, 12))])
    found = map_files(
        worker_tasks.hold_the_first_time, files, engine_at(cluster.address), DEFAULT_LIMITS
    )
    names = [next(found)[1] for _ in range(3)]
    wait_until(lambda: notes_of(files[3]))
    killed = int(notes_of(files[3])[0].split()[1])
    os.kill(killed, signal.SIGKILL)
    names += [outcome for _, outcome in found]
    assert sorted(names) == sorted(Path(known.file).name for known in files)
    assert len(notes_of(files[3])) == 2
    for known in files:
        again = len(notes_of(known)) > 1
        assert not again or f"began {killed}" in notes_of(known)


def test_the_file_that_every_worker_dies_of_is_named_and_the_others_go_on(cluster, tmp_path):
    files = write_orders(tmp_path, ["0", "1", "bad", "3", "4", "5"])
    cluster.start_worker()  # comes when both others may be dead
    found = outcomes(worker_tasks.die_of_bad, files, cluster)
    killer = found.pop("bad")
    assert isinstance(killer, TraceError)
    assert killer.file == files[2].file
    assert "a worker process died" in killer.message
    assert found == {name: name for name in "01345"}


def test_left_early_nothing_stays_queued_on_the_cluster(cluster, tmp_path):
    names = ["0", *(f"held{number}" for number in range(1, 9))]
    files = write_orders(tmp_path, names)
    found = map_files(worker_tasks.hold, files, engine_at(cluster.address), DEFAULT_LIMITS)
    assert next(found)[1] == "0"
    found.close()
    wait_until(lambda: count_tasks(cluster.address) == 0)
    begun = [known for known in files if notes_of(known)]
    (tmp_path / "go").touch()
    assert len(begun) <= 3


def test_files_that_the_workers_do_not_see_are_refused_before_work_is_sent(cluster, tmp_path):
    files = worker_tasks.orders(tmp_path, ["nowhere"])
    with pytest.raises(EngineError, match=r"nowhere is not there for 2 workers \(tcp://"):
        outcomes(worker_tasks.name_of, files, cluster)


def test_an_address_where_nobody_answers_is_an_error_and_no_wait(monkeypatch, tmp_path):
    assert dask._CONNECT_S <= 5
    monkeypatch.setattr(dask, "_CONNECT_S", 0.2)
    files = write_orders(tmp_path, ["0"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        engine = DaskEngine(address=f"tcp://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(EngineError, match=f"^{engine.address}: no scheduler answers there"):
            list(map_files(worker_tasks.name_of, files, engine, DEFAULT_LIMITS))


def test_workers_with_another_version_or_none_are_refused(tmp_path):
    other = tmp_path / "debubble"
    other.mkdir()
    files = write_orders(tmp_path, ["0"])
    with started_cluster(0) as empty:
        with pytest.raises(EngineError, match="the scheduler has no workers"):
            outcomes(worker_tasks.name_of, files, empty)
        (other / "__init__.py").write_text('__version__ = "0.0.1"')
        empty.start_worker(PYTHONPATH=str(tmp_path))
        wait_until(lambda: count_workers(empty.address) == 1)
        with pytest.raises(EngineError, match=r"debubble is 0\.0\.1 on 1 worker .* here") as caught:
            outcomes(worker_tasks.name_of, files, empty)
        assert "pip install debubble==" in caught.value.hint
        (other / "__init__.py").write_text("raise ImportError('broken')")
        empty.start_worker(PYTHONPATH=str(tmp_path))
        wait_until(lambda: count_workers(empty.address) == 2)
        with pytest.raises(EngineError, match="debubble is not installed on 1 worker"):
            outcomes(worker_tasks.name_of, files, empty)


def test_a_scheduler_that_goes_away_is_named(tmp_path):
    files = write_orders(tmp_path, ["0", "held1", "held2"])
    with started_cluster(1) as small:
        found = map_files(worker_tasks.hold, files, engine_at(small.address), DEFAULT_LIMITS)
        next(found)
        small.processes[0].kill()
        with pytest.raises(EngineError, match="the scheduler was lost"):
            list(found)
        (tmp_path / "go").touch()


def test_without_dask_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingExtra, match="a cluster needs Dask") as caught:
        list(
            map_files(
                worker_tasks.name_of,
                write_orders(tmp_path, ["0"]),
                engine_at("tcp://127.0.0.1:1"),
                DEFAULT_LIMITS,
            )
        )
    assert "debubble[cluster]" in caught.value.hint
