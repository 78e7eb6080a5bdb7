"""The loop over a job that never ran: its traces are played, so every run is exact and quick."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from support.tuning import PLACEHOLDERS, play_here, runs_of, task_of, tune_task

from debubble.annexes.demo.improve import improve_once
from debubble.annexes.demo.report import answer_demo
from debubble.annexes.tune.answers import TuneAnswer, answer_tune
from debubble.annexes.tune.journal import Kind
from debubble.annexes.tune.report import tune_page
from debubble.errors import MachineBusy, TuneError
from debubble.measure.compare import Verdict, compare

pytestmark = pytest.mark.slow

GIB = 1024**3


def kinds(tuned):
    return [run.outcome.kind for run in tuned.standing.runs]


@pytest.fixture(scope="module", autouse=True)
def _played_here():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("debubble.annexes.tune.job.run_guarded", play_here)
        yield


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return tune_task(task_of(tmp_path_factory.mktemp("usual")))


def test_it_ends_with_the_best_of_all_settings_in_few_runs(usual):
    assert (usual.winner.split, usual.winner.microbatches) == ((4, 4, 4, 4), 16)
    assert len(runs_of(usual.standing.task)) == len(usual.standing.runs) == 4
    winner = [run for run in usual.standing.of(usual.winner) if run.expected]
    assert usual.standing.gain_of(usual.winner) == pytest.approx(winner[0].expected.gain, abs=0.05)
    assert usual.standing.gain_of(usual.winner) > 0.7


def test_untold_the_batch_is_held_and_a_larger_one_wins_nothing(tmp_path):
    tuned = tune_task(task_of(tmp_path), hold=None, runs=6)
    larger = [run for run in tuned.standing.runs if tuned.standing.grew(run)]
    assert {run.outcome.kind for run in larger} <= {Kind.OTHER_BATCH}
    assert tuned.standing.best.microbatches == tuned.standing.now.microbatches
    text = str(tune_page(tuned).findings)
    assert "larger batch" in text
    assert "--hold microbatch tries" in text
    assert tuned.winner.split == (4, 4, 4, 4)


def test_a_job_that_holds_its_batch_is_told_from_a_bad_prediction(tmp_path):
    tuned = tune_task(task_of(tmp_path, "--do", "hold-batch"), runs=2)
    first, second = tuned.standing.runs
    assert first.expected is None
    assert second.expected.gain > 0.5
    assert "the job holds its batch, so that its microbatches shrank" in second.outcome.message
    assert any("holds its batch" in note for note in tune_page(tuned).notes)
    assert tuned.standing.keeps == "batch"


def test_a_machine_that_gets_slower_is_not_taken_for_a_bad_setting(tmp_path, usual):
    slowing = tune_task(task_of(tmp_path, "--drift", "0.03"))
    assert slowing.winner == usual.winner
    gains = [one.standing.gain_of(one.winner) for one in (usual, slowing)]
    assert gains[1] == pytest.approx(gains[0], abs=0.03)


@pytest.mark.parametrize(
    ("does", "kind"), [("crash", Kind.CRASHED), ("memory", Kind.OUT_OF_MEMORY)]
)
def test_a_run_that_fails_is_a_result_and_not_tried_again(tmp_path, does, kind):
    tuned = tune_task(task_of(tmp_path, "--do", does, "--at", "16"), runs=4)
    assert kinds(tuned).count(kind) == 1
    assert tuned.standing.best.microbatches == 8


def test_a_run_that_hangs_is_stopped_and_a_result(tmp_path):
    tuned = tune_task(task_of(tmp_path, "--do", "hang", "--at", "16"), runs=2)
    assert kinds(tuned) == [Kind.MEASURED, Kind.HUNG]


def test_a_command_that_ignores_its_split_is_told_so_and_tuned_by_the_rest(tmp_path):
    tuned = tune_task(task_of(tmp_path, "--do", "ignore-split"), runs=4)
    assert tuned.standing.ignored_knobs == {"split"}
    ignored = next(run for run in tuned.standing.runs if run.outcome.ignored)
    assert "was asked for, and 3,3,3,7 ran" in ignored.outcome.message
    assert (tuned.winner.split, tuned.winner.microbatches) == ((3, 3, 3, 7), 16)


@pytest.mark.parametrize(
    ("does", "message"),
    [("nothing", "nothing was captured"), ("crash", "exit code 1.*not for me")],
)
def test_a_command_that_cannot_be_measured_as_it_is_is_refused(tmp_path, does, message):
    with pytest.raises(TuneError, match=message) as refusal:
        tune_task(task_of(tmp_path, "--do", does))
    assert "output.log" in refusal.value.hint


def test_a_command_that_was_mended_goes_on(tmp_path):
    flag = tmp_path / "broken"
    flag.touch()
    words = ("-c", f'test ! -e {flag} && exec "$@"', "sh")
    task = task_of(tmp_path)
    words = ("sh", *words, *task.template.words)
    task = replace(task, template=replace(task.template, words=words))
    with pytest.raises(TuneError):
        tune_task(task)
    flag.unlink()
    assert kinds(tune_task(task, runs=2)) == [Kind.CRASHED, Kind.MEASURED]


def test_a_budget_of_runs_is_kept_to_and_more_of_it_goes_on_from_there(tmp_path):
    task = task_of(tmp_path)
    first = tune_task(task, runs=1)
    assert first.stop.spent
    assert len(runs_of(task)) == 1
    tuned = tune_task(task, runs=3)
    assert len(runs_of(task)) == len(tuned.standing.runs) == 3
    # Of three runs two are owed to the first setting: what was tried must be held against it.
    assert [run.why for run in tuned.standing.runs] == ["unchanged", "try", "confirm"]


def test_a_memory_limit_is_never_exceeded_by_the_winner(tmp_path):
    now = ("schedule=gpipe", "split=4,4,4,4", "microbatches=4")
    task = task_of(tmp_path, now=now, words=(*PLACEHOLDERS, "--schedule", "gpipe"))
    limit = int(4.8 * GIB)  # of gpipe 8 microbatches fit into it, and 16 do not
    tuned = tune_task(task, limit_bytes=limit)
    assert tuned.winner.microbatches == 8
    assert peak(tuned) <= limit
    assert all(run.setting.microbatches <= 8 for run in tuned.standing.runs)
    refused = {one.change.microbatches: one.reason for one in tuned.candidates.refused}
    assert "more memory than it has" in refused[16]


def test_a_run_that_takes_more_memory_than_was_predicted_never_wins(tmp_path):
    limit = int(4.5 * GIB)
    tuned = tune_task(task_of(tmp_path, "--do", "bloat", "--at", "16"), runs=4, limit_bytes=limit)
    assert Kind.OVER_MEMORY in kinds(tuned)
    assert tuned.winner.microbatches == 8
    assert peak(tuned) <= limit


def peak(tuned):
    (run, *_) = tuned.standing.of(tuned.winner)
    return max(rank.peak_bytes for rank in run.outcome.measurement.memory)


def test_overlap_is_tried_where_the_command_can_be_told_it(tmp_path):
    now = ("split=4,4,4,4", "microbatches=16", "overlap=0")
    words = (*PLACEHOLDERS, "--overlap", "{overlap}")
    tuned = tune_task(task_of(tmp_path, now=now, words=words), runs=2)
    assert [run.setting.overlap for run in tuned.standing.runs] == [False, True]
    assert tuned.standing.best.overlap is True


def test_the_answer_is_typed_and_says_what_came_of_every_run(usual):
    answer = answer_tune(usual)
    assert msgspec.json.decode(answer.to_json(), type=TuneAnswer, strict=True) == answer
    data = answer.to_dict()
    assert set(data["winner"]) == {"split", "microbatches"}
    assert [run["run"] for run in data["runs"]] == [run.number for run in usual.standing.runs]
    assert data["sentence"].startswith(str(usual.winner)[:1].upper())


def test_one_change_is_made_of_the_demo_and_a_disturbed_capture_is_made_anew(tmp_path):
    said = []
    made = improve_once(task_of(tmp_path, "--busy", "2"), said.append, seconds=3600.0)
    before, after = "3,3,3,7 4", "4,4,4,4 16"
    lines = [" ".join(line.split()[:2]) for line in runs_of(task_of(tmp_path))]
    assert lines == [before, before, before, after]
    assert said[1] == "this machine was busy with something else meanwhile: once more"
    assert (made.compared.verdict.value, made.gaps) == ("better", ())
    found = answer_demo(made, "", tmp_path, []).found
    assert "Stage 3 on rank 3 takes 1.7 times the average stage; balanced stages" in found


def test_where_noise_hides_the_change_the_demo_says_that_the_machine_was_busy(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "debubble.annexes.demo.improve.compare",
        lambda *runs, **more: replace(compare(*runs, **more), verdict=Verdict.NO_CLEAR_CHANGE),
    )
    with pytest.raises(MachineBusy, match="this machine was busy: the effect of the change"):
        improve_once(task_of(tmp_path, "--busy", "9"), [].append, seconds=0.0)
