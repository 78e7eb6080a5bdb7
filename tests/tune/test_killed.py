"""`kill -9` in the middle: it goes on where it was, and nothing is left running."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tune.tuning import JOB, NOW, PLACEHOLDERS, bench_of, runs_of, tune

from debubble.tune.process import MARK, end_marked, run_guarded

RUNS = 4
LATE, LEFT, NONE = "late", "left", "none"
WAITS = ("sh", "-c", "setsid sleep 600 & sleep 600")


def marked(token):
    """Processes that still run with a mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={token}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def gone(token, within_s=10.0):
    deadline = time.monotonic() + within_s
    while marked(token) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not marked(token)


def test_what_takes_too_long_is_ended_with_all_it_started(tmp_path):
    ended = run_guarded(WAITS, os.environ, token=LATE, log=tmp_path / "log", timeout_s=1.0)
    assert ended.code is None
    assert not marked(LATE)


def test_what_a_command_leaves_behind_is_ended_with_it(tmp_path):
    words = ("sh", "-c", "setsid sleep 600 & exit 3")
    ended = run_guarded(words, os.environ, token=LEFT, log=tmp_path / "log", timeout_s=30.0)
    assert ended.code == 3
    assert not marked(LEFT)


def test_a_command_that_cannot_be_started_says_so(tmp_path):
    ended = run_guarded(
        ("no-such-command",), os.environ, token=NONE, log=tmp_path / "log", timeout_s=30.0
    )
    assert ended.code == 127
    assert "no-such-command cannot be started" in (tmp_path / "log").read_text()


def test_what_outlives_even_its_guard_is_found_by_its_mark():
    orphan = subprocess.Popen(["/bin/sleep", "600"], env=os.environ | {MARK: "orphan"})
    assert end_marked("orphan") == 1
    assert orphan.wait(10) == -signal.SIGKILL


def start(folder, *more):
    words = [word for pair in NOW for word in ("--now", pair)]
    program = "import sys; from debubble.cli import main; main(sys.argv[1:])"
    return subprocess.Popen(
        [
            *(sys.executable, "-c", program, "tune", *words, "--wait", "0", "--quiet", "--json"),
            *("--max-microbatches", "16", "--out", str(folder / "tune"), "--runs", "12"),
            *("--store", f"sqlite:///{folder / 'history.db'}", "--", *JOB, *PLACEHOLDERS),
            *("--log", str(folder / "log"), *more),
        ],
        stdout=subprocess.PIPE,
    )


def tokens(folder):
    journal = folder / "tune" / "journal.jsonl"
    lines = journal.read_bytes().splitlines() if journal.exists() else []
    found = [msgspec.json.decode(line) for line in lines if line.endswith(b"}")]
    return [line["began"]["token"] for line in found if "began" in line]


def kill_and_resume(folder, moments, *more):
    """Kill a tuning so long after each start, then let it end; return its answer."""
    killed = 0
    for moment in moments:
        tuning = start(folder, *more)
        try:
            tuning.communicate(timeout=moment)
            break
        except subprocess.TimeoutExpired:
            tuning.kill()
            tuning.communicate()
            killed += 1
        for token in tokens(folder):
            assert gone(token)
    output, _ = start(folder, *more).communicate(timeout=300)
    for token in tokens(folder):
        assert not marked(token)
    return killed, msgspec.json.decode(output)


def check(folder, moments, *more):
    killed, answer = kill_and_resume(folder, moments, *more)
    assert answer["winner"] == {"microbatches": 16, "split": [4, 4, 4, 4]}
    over = [run["outcome"] for run in answer["runs"]]
    assert over == ["measured"] * RUNS
    # What was under way when it was killed runs again, and nothing else does.
    assert RUNS <= len((folder / "log").read_text().splitlines()) <= RUNS + killed
    from debubble.measure.store import Store  # noqa: PLC0415

    store = Store(f"sqlite:///{folder / 'history.db'}")
    assert len(store.records()) == RUNS
    store.close()
    return killed


def test_a_tuning_that_is_killed_goes_on_and_ends_with_the_same_answer(tmp_path):
    assert check(tmp_path, (2.5,), "--seconds", "0.5") == 1


@pytest.mark.accuracy
def test_ten_random_moments_of_kill_9_change_nothing(tmp_path):
    moments = random.Random(7)  # noqa: S311
    killed = 0
    while killed < 10:
        folder = tmp_path / str(killed)
        folder.mkdir()
        wanted = [moments.uniform(0.3, 8.0) for _ in range(10 - killed)]
        killed += check(folder, wanted, "--seconds", "1")


def test_half_a_line_at_the_end_of_the_journal_is_forgotten(tmp_path):
    bench = bench_of(tmp_path)
    tune(bench, runs=1)
    with (bench.folder / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"began": {"number": 2, "tok')
    tuned = tune(bench, runs=2)
    assert [run.number for run in tuned.standing.runs] == [1, 2]
    assert len(runs_of(bench)) == 2
