"""Nothing goes but what debubble wrote: by its marker, and by the names that it writes."""

from __future__ import annotations

import fcntl
import os
import shutil

import pytest
from support.tuning import play_here, task_of, tune_task

from debubble.annexes.tune.journal import LOG, MARKER, NAME, begin_anew, clear_run
from debubble.capture.files import keep_newest
from debubble.cli.demo import prepare_folder
from debubble.errors import TuneError

CAPTURE = "20260131-120000-step000000011"
OTHERS = ("thesis.txt", "src/model.py", f"run001/{CAPTURE}/notes.txt", "run001/mine.json.gz",
          f"run777/{CAPTURE}/rank0.json.gz", "runs/a.txt")  # fmt: skip


@pytest.fixture(scope="module")
def tuning(tmp_path_factory):
    """A tuning that ran, once for all who take from it."""
    task = task_of(tmp_path_factory.mktemp("tuning"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("debubble.annexes.tune.job.run_guarded", play_here)
        tune_task(task, runs=1)
    return task.folder


@pytest.fixture
def tuned(tuning, tmp_path):
    """A folder of the user's own, in which a tuning ran."""
    return shutil.copytree(tuning, tmp_path / "tune", symlinks=True)


def put(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("dear")


def files_in(folder):
    return sorted(
        os.path.join(base, name).removeprefix(f"{folder}/")  # noqa: PTH118
        for base, _, names in os.walk(folder)
        for name in names
    )


def test_beginning_anew_removes_the_tuning_and_nothing_else(tuned):
    assert any(name.startswith("run001/") for name in files_in(tuned))
    put(tuned, *OTHERS)
    begin_anew(tuned)
    assert files_in(tuned) == sorted(OTHERS)


@pytest.mark.parametrize("text", ['{"my": "own journal"}\n', "dear diary\n", "dear diary"])
def test_a_journal_of_somebody_elses_is_neither_removed_nor_cut(tmp_path, text):
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / NAME).write_text(text)
    with pytest.raises(TuneError, match="no journal"):
        begin_anew(tmp_path / "tune")
    with pytest.raises(TuneError):
        tune_task(task_of(tmp_path), runs=1)
    assert (tmp_path / "tune" / NAME).read_text() == text


def test_a_tuning_that_runs_is_not_removed(tuned):
    with (tuned / NAME).open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TuneError, match="another tune writes here"):
            begin_anew(tuned)
    assert (tuned / NAME).exists()


def test_a_link_is_not_followed(tuned, tmp_path):
    put(tmp_path / "elsewhere", f"{CAPTURE}/rank0.json.gz", MARKER, LOG)
    (tuned / "run002").symlink_to(tmp_path / "elsewhere")
    (tuned / "run001" / CAPTURE).symlink_to(tmp_path / "elsewhere" / CAPTURE)
    with pytest.raises(TuneError, match="did not make this folder"):
        begin_anew(tuned)
    assert len(files_in(tmp_path / "elsewhere")) == 3


@pytest.mark.parametrize("name", ["before", "after"])
def test_a_forced_demo_leaves_folders_alone_that_no_demo_made(tmp_path, name):
    put(tmp_path / name, "thesis.txt", f"{CAPTURE}/rank0.json.gz")
    with pytest.raises(TuneError, match="did not make this folder"):
        prepare_folder(tmp_path, force=True)
    assert len(files_in(tmp_path)) == 2


def test_a_run_in_a_folder_that_was_not_empty_does_not_make_it_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("debubble.annexes.tune.job.run_guarded", play_here)
    task = task_of(tmp_path)
    put(task.folder / "run001", f"{CAPTURE}/rank0.json.gz")
    tune_task(task, runs=1)
    with pytest.raises(TuneError):
        clear_run(task.folder / "run001")


def test_of_old_captures_only_traces_and_sidecars_of_this_rank_go(tmp_path):
    for step in ("11", "22"):
        folder = f"20260131-120000-step0000000{step}"
        put(tmp_path, *(f"{folder}/rank0.{kind}" for kind in
            ("json.gz", "debubble.json", "debubble.npz", "notes.txt")))  # fmt: skip
    keep_newest(tmp_path, "rank0.json.gz", 1, spared=())
    left = [name for name in files_in(tmp_path) if "step000000011" in name]
    assert [name.partition("/")[2] for name in left] == ["rank0.debubble.npz", "rank0.notes.txt"]
