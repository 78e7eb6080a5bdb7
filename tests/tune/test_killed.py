"""`kill -9` in the middle: it goes on where it was, and nothing is left running."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import msgspec
import pytest
from support.processes import processes_with, wait_until
from support.tuning import JOB, NOW, PLACEHOLDERS, runs_of, task_of, tune_task

from debubble.annexes.tune.process import MARK, end_marked, run_guarded

RUNS, KILLS = 4, 10
LATE, LEFT, NONE = "late", "left", "none"
WAITS = ("sh", "-c", "setsid sleep 600 & sleep 600")


def marked(token):
    """Processes that still run with a mark in their environment."""
    return processes_with(f"{MARK}={token}")


@pytest.mark.slow
def test_what_takes_too_long_is_ended_with_all_it_started(tmp_path):
    ended = run_guarded(WAITS, os.environ, token=LATE, log=tmp_path / "log", timeout_s=1.0)
    assert ended.code is None
    assert not marked(LATE)


@pytest.mark.slow
def test_what_a_command_leaves_behind_is_ended_with_it(tmp_path):
    words = ("sh", "-c", "setsid sleep 600 & exit 3")
    ended = run_guarded(words, os.environ, token=LEFT, log=tmp_path / "log", timeout_s=30.0)
    assert ended.code == 3
    assert not marked(LEFT)


@pytest.mark.slow
def test_a_command_that_cannot_be_started_says_so(tmp_path):
    ended = run_guarded(
        ("no-such-command",), os.environ, token=NONE, log=tmp_path / "log", timeout_s=30.0
    )
    assert ended.code == 127
    assert "no-such-command cannot be started" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_what_outlives_even_its_guard_is_found_by_its_mark():
    orphan = subprocess.Popen(["/bin/sleep", "600"], env=os.environ | {MARK: "orphan"})
    assert end_marked("orphan") == 1
    assert orphan.wait(10) == -signal.SIGKILL


def start(folder, *words):
    program = "import sys; from debubble.cli import main; main(sys.argv[1:])"
    return subprocess.Popen(
        [
            *(sys.executable, "-c", program, "tune", "--quiet", "--json", "--runs", "12"),
            *("--out", str(folder / "tune")),
            *words,
        ],
        stdout=subprocess.PIPE,
    )


def played(folder, *more):
    """What is typed to tune a job that never ran."""
    now = [word for pair in NOW for word in ("--now", pair)]
    options = (*now, "--wait", "0", "--max-microbatches", "16", "--hold", "microbatch")
    return *options, "--", *JOB, *PLACEHOLDERS, "--log", str(folder / "log"), *more


def tokens(folder):
    journal = folder / "tune" / "journal.jsonl"
    lines = journal.read_bytes().splitlines() if journal.exists() else []
    found = [msgspec.json.decode(line) for line in lines if line.endswith(b"}")]
    return list(dict.fromkeys(line["token"] for line in found if "token" in line))


def kill_and_resume(folder, moments, *words):
    """Kill a tuning so long after each start, then let it end; return its answer."""
    killed = 0
    for moment in moments:
        tuning = start(folder, *words)
        try:
            tuning.communicate(timeout=moment)
            break
        except subprocess.TimeoutExpired:
            tuning.kill()
            tuning.communicate()
            killed += 1
        wait_until(lambda: not any(map(marked, tokens(folder))), "a killed run goes on")
    output, _ = start(folder, *words).communicate(timeout=300)
    for token in tokens(folder):
        assert not marked(token)
    return killed, msgspec.json.decode(output)


def check(folder, moments, winner, *words):
    """Kill, resume, and hold what came of it against what should; return the number of kills."""
    killed, answer = kill_and_resume(folder, moments, *words)
    assert answer["winner"] == winner
    assert {run["outcome"] for run in answer["runs"]} == {"measured"}
    # What was under way when it was killed runs again, and nothing else does.
    assert len(answer["runs"]) <= len(tokens(folder)) <= len(answer["runs"]) + killed
    return killed


def check_played(folder, moments, seconds):
    killed = check(
        folder,
        moments,
        {"microbatches": 16, "split": [4, 4, 4, 4]},
        *played(folder, "--seconds", seconds),
    )
    # As the job itself wrote it down.
    assert RUNS <= len((folder / "log").read_text().splitlines()) <= RUNS + killed
    return killed


@pytest.mark.slow
def test_a_tuning_that_is_killed_goes_on_and_ends_with_the_same_answer(tmp_path):
    assert check_played(tmp_path, (2.5,), "0.5") == 1


def kill_at_random(folder, check_one, longest_s):
    """Kill at ten random moments, over as many tunings as that takes; return how many it took."""
    moments = random.Random(7)  # noqa: S311
    killed = tunings = 0
    while killed < KILLS:
        here = folder / str(tunings)
        here.mkdir()
        killed += check_one(here, [moments.uniform(0.3, longest_s) for _ in range(KILLS - killed)])
        tunings += 1
    return tunings


@pytest.mark.accuracy
def test_ten_random_moments_of_kill_9_change_nothing_of_a_real_pipeline(tmp_path):
    job = (
        *(sys.executable, "-P", "-m", "debubble.annexes.demo.job", "--steps", "9"),
        *PLACEHOLDERS,
    )
    options = (
        *("--now", "split=1,2,2,3", "--now", "microbatches=4", "--max-microbatches", "8"),
        *("--wait", "1", "--steps", "3", "--", *job),
    )
    best = {"microbatches": 8, "split": [2, 2, 2, 2]}
    tunings = kill_at_random(
        tmp_path, lambda here, moments: check(here, moments, best, *options), 15.0
    )
    sys.__stdout__.write(f"\n{KILLS} kills, tunings: {tunings}; no orphan, {best} each time\n")


@pytest.mark.slow
def test_half_a_line_at_the_end_of_the_journal_is_forgotten(tmp_path):
    task = task_of(tmp_path)
    tune_task(task, runs=1)
    with (task.folder / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"number": 2, "tok')
    tuned = tune_task(task, runs=2)
    assert [run.number for run in tuned.standing.runs] == [1, 2]
    assert len(runs_of(task)) == 2
