"""Files handed out to workers: each has its outcome, whatever becomes of the workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest
from support.jobs import worker_tasks
from support.jobs.worker_tasks import notes_of, orders, write_orders
from support.processes import wait_until

from debubble.annexes.cluster import engine_at
from debubble.errors import TraceError, TraceTooLarge, UsageError
from debubble.trace.engine import GivenEngine, LocalEngine, map_files
from debubble.trace.source import DEFAULT_LIMITS

pytestmark = pytest.mark.slow

POOL = LocalEngine(workers=2, worth_bytes=0)
HERE = LocalEngine(workers=2)


def outcomes(task, files, engine=POOL, **options):
    found = map_files(task, files, engine, DEFAULT_LIMITS, **options)
    return [(Path(known.file).name, outcome) for known, outcome in found]


@pytest.mark.parametrize("engine", [POOL, HERE])
def test_every_file_has_its_outcome_in_the_files_order(tmp_path, engine):
    names = [str(number) for number in range(20)]
    seen = []
    found = outcomes(
        worker_tasks.name_of,
        orders(tmp_path, names),
        engine,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert found == [(name, name) for name in names]
    assert seen == [(done, 20) for done in range(1, 21)]


@pytest.mark.parametrize("engine", [POOL, HERE])
def test_a_file_that_is_no_good_is_an_outcome_and_the_others_go_on(tmp_path, engine):
    found = dict(outcomes(worker_tasks.refuse_bad, orders(tmp_path, ["0", "bad", "2"]), engine))
    assert (found["0"], found["2"]) == ("0", "2")
    assert str(found["bad"]).endswith("bad: is no good")


@pytest.mark.parametrize("engine", [POOL, HERE])
def test_want_of_memory_is_an_outcome_too(tmp_path, engine):
    found = outcomes(worker_tasks.run_out_of_memory, orders(tmp_path, ["0", "1"]), engine)
    assert [type(outcome) for _, outcome in found] == [TraceTooLarge, TraceTooLarge]


@pytest.mark.parametrize("engine", [POOL, HERE])
def test_a_bug_is_not_swallowed(tmp_path, engine):
    with pytest.raises(KeyError, match="a bug"):
        outcomes(worker_tasks.be_wrong, orders(tmp_path, ["0", "1"]), engine)


def test_the_file_that_kills_its_worker_is_found_and_the_others_go_on(tmp_path):
    files = write_orders(tmp_path, ["0", "1", "bad", "3", "4", "5", "6"])
    found = dict(outcomes(worker_tasks.die_of_bad, files))
    killer = found.pop("bad")
    assert isinstance(killer, TraceError)
    assert "a worker process died" in killer.message
    assert killer.file == files[2].file
    assert found == {name: name for name in "013456"}
    assert len(notes_of(files[2])) == 2


def test_a_file_that_lost_its_worker_once_is_read_after_all(tmp_path):
    files = write_orders(tmp_path, ["0"])
    files += orders(tmp_path, ["1", "2"])
    for known in files[1:]:
        worker_tasks.note(known.file, "tried")
    assert dict(outcomes(worker_tasks.die_once, files)) == {name: name for name in "012"}


class Counting(Executor):
    """Threads, and how many files they were handed."""

    def __init__(self):
        self.threads = ThreadPoolExecutor(2)
        self._max_workers = 2
        self.handed_out = 0

    def submit(self, *order):
        self.handed_out += 1
        return self.threads.submit(*order)


def test_no_more_than_a_few_files_a_worker_are_on_their_way(tmp_path):
    executor = Counting()
    files = orders(tmp_path, [str(number) for number in range(200)])
    engine = GivenEngine(executor=executor)
    most = 0
    for used, _ in enumerate(map_files(worker_tasks.name_of, files, engine, DEFAULT_LIMITS)):
        most = max(most, executor.handed_out - used)
    executor.threads.shutdown()
    assert executor.handed_out == 200
    assert most <= 4


def test_left_early_it_hands_out_no_more(tmp_path):
    executor = Counting()
    files = orders(tmp_path, [str(number) for number in range(200)])
    found = map_files(worker_tasks.name_of, files, GivenEngine(executor=executor), DEFAULT_LIMITS)
    next(found)
    found.close()
    executor.threads.shutdown()
    assert executor.handed_out <= 5


INTERRUPTED = """
import sys
from pathlib import Path
from support.jobs.worker_tasks import hold, orders
from debubble.trace.engine import LocalEngine
from debubble.trace.engine import map_files
from debubble.trace.source import DEFAULT_LIMITS

if __name__ == "__main__":
    files = orders(Path(sys.argv[1]), [f"held{n}" for n in range(6)])
    try:
        list(map_files(hold, files, LocalEngine(workers=2, worth_bytes=0), DEFAULT_LIMITS))
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_ctrl_c_ends_the_workers_at_once_and_without_tracebacks(tmp_path):
    files = write_orders(tmp_path, [f"held{number}" for number in range(6)])
    (tmp_path / "main.py").write_text(INTERRUPTED)
    job = subprocess.Popen(
        [sys.executable, str(tmp_path / "main.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    wait_until(lambda: sum(bool(notes_of(known)) for known in files) == 2)
    os.killpg(job.pid, signal.SIGINT)
    _, said = job.communicate(timeout=180)
    assert job.returncode == 130
    assert said == b""
    workers = {int(line.split()[1]) for known in files for line in notes_of(known)}
    assert len(workers) == 2
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def test_an_engine_that_nobody_knows_is_refused():
    for address in ("slurm", "http://host:80", "tcp://", ""):
        with pytest.raises(UsageError, match="there is no engine") as caught:
            engine_at(address)
        assert "tcp://scheduler:8786" in caught.value.hint
