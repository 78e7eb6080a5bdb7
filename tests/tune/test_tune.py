"""The loop over a job that never ran: its traces are played, so every run is exact and quick."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from support.tuning import PLACEHOLDERS, bench_of, play_here, runs_of, tune

from debubble.annexes.tune.answers import TuneAnswer, answer_tune
from debubble.annexes.tune.report import tune_page
from debubble.annexes.tune.trial import Kind
from debubble.errors import TuneError
from debubble.measure.measurement import Environment

pytestmark = pytest.mark.slow

GIB = 1024**3


def kinds(tuned):
    return [run.outcome.kind for run in tuned.standing.runs]


@pytest.fixture(scope="module", autouse=True)
def _played_here():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("debubble.annexes.tune.trial.run_guarded", play_here)
        yield


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return tune(bench_of(tmp_path_factory.mktemp("usual")))


@pytest.mark.slow
def test_it_ends_with_the_best_of_all_settings_in_few_runs(usual):
    assert (usual.winner.split, usual.winner.microbatches) == ((4, 4, 4, 4), 16)
    assert len(runs_of(usual.bench)) == len(usual.standing.runs) == 4
    winner = [run for run in usual.standing.of(usual.winner) if run.expected]
    assert usual.standing.gain_of(usual.winner) == pytest.approx(winner[0].expected.gain, abs=0.05)
    assert usual.standing.gain_of(usual.winner) > 0.7


@pytest.mark.slow
def test_the_winner_and_the_first_setting_run_in_turn(usual):
    last = [run.setting for run in usual.standing.runs][-2:]
    assert last == [usual.winner, usual.standing.now]
    assert len(usual.standing.of(usual.standing.now)) == 2


@pytest.mark.slow
def test_untold_the_batch_is_held_and_a_larger_one_wins_nothing(tmp_path):
    tuned = tune(bench_of(tmp_path), hold=None, runs=6)
    larger = [run for run in tuned.standing.runs if tuned.standing.grew(run)]
    assert {run.outcome.kind for run in larger} <= {Kind.OTHER_BATCH}
    assert tuned.standing.best.microbatches == tuned.standing.now.microbatches
    text = str(tune_page(tuned, "", "").findings)
    assert "larger batch" in text
    assert "--hold microbatch tries" in text
    assert tuned.winner.split == (4, 4, 4, 4)


@pytest.mark.slow
def test_a_job_that_holds_its_batch_is_told_from_a_bad_prediction(tmp_path):
    tuned = tune(bench_of(tmp_path, "--do", "hold-batch"), runs=2)
    first, second = tuned.standing.runs
    assert first.expected is None
    assert second.expected.gain > 0.5
    assert "the job holds its batch, so that its microbatches shrank" in second.outcome.message
    assert any("holds its batch" in note for note in tune_page(tuned, "", "").notes)
    assert tuned.standing.hold == "batch"


@pytest.mark.slow
def test_a_machine_that_gets_slower_is_not_taken_for_a_bad_setting(tmp_path, usual):
    slowing = tune(bench_of(tmp_path, "--drift", "0.03"))
    assert slowing.winner == usual.winner
    gains = [one.standing.gain_of(one.winner) for one in (usual, slowing)]
    assert gains[1] == pytest.approx(gains[0], abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "kind"), [("crash", Kind.CRASHED), ("memory", Kind.OUT_OF_MEMORY)]
)
def test_a_run_that_fails_is_a_result_and_not_tried_again(tmp_path, does, kind):
    tuned = tune(bench_of(tmp_path, "--do", does, "--at", "16"), runs=4)
    assert kinds(tuned).count(kind) == 1
    assert tuned.standing.best.microbatches == 8


@pytest.mark.slow
def test_a_run_that_hangs_is_stopped_and_a_result(tmp_path):
    tuned = tune(bench_of(tmp_path, "--do", "hang", "--at", "16"), runs=2, timeout_s=60.0)
    assert kinds(tuned) == [Kind.MEASURED, Kind.HUNG]


@pytest.mark.slow
def test_a_command_that_ignores_its_split_is_told_so_and_tuned_by_the_rest(tmp_path):
    tuned = tune(bench_of(tmp_path, "--do", "ignore-split"), runs=4)
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
        tune(bench_of(tmp_path, "--do", does))
    assert "output.log" in refusal.value.hint


@pytest.mark.slow
def test_a_command_that_was_mended_goes_on(tmp_path):
    flag = tmp_path / "broken"
    flag.touch()
    words = ("-c", f'test ! -e {flag} && exec "$@"', "sh")
    bench = bench_of(tmp_path)
    template = bench.template.__class__(
        words=("sh", *words, *bench.template.words), now=bench.template.now
    )
    bench = bench.__class__(template=template, steps=6, wait=0, folder=bench.folder)
    with pytest.raises(TuneError):
        tune(bench)
    flag.unlink()
    assert kinds(tune(bench, runs=2)) == [Kind.CRASHED, Kind.MEASURED]


@pytest.mark.slow
def test_a_budget_of_runs_is_kept_to_and_more_of_it_goes_on_from_there(tmp_path):
    bench = bench_of(tmp_path)
    first = tune(bench, runs=1)
    assert first.stop.spent
    assert len(runs_of(bench)) == 1
    tuned = tune(bench, runs=3)
    assert len(runs_of(bench)) == len(tuned.standing.runs) == 3
    # Of three runs two are owed to the first setting: what was tried must be held against it.
    assert [run.why for run in tuned.standing.runs] == ["unchanged", "try", "confirm"]


@pytest.mark.slow
def test_a_memory_limit_is_never_exceeded_by_the_winner(tmp_path):
    now = ("schedule=gpipe", "split=4,4,4,4", "microbatches=4")
    bench = bench_of(tmp_path, now=now, words=(*PLACEHOLDERS, "--schedule", "{schedule}"))
    limit = int(4.8 * GIB)  # of gpipe 8 microbatches fit into it, and 16 do not
    tuned = tune(bench, schedules=frozenset({"gpipe"}), limit_bytes=limit)
    assert tuned.winner.microbatches == 8
    assert peak(tuned) <= limit
    assert all(run.setting.microbatches <= 8 for run in tuned.standing.runs)
    refused = {one.change.microbatches: one.reason for one in tuned.prospects.refused}
    assert "more memory than it has" in refused[16]


@pytest.mark.slow
def test_a_run_that_takes_more_memory_than_was_predicted_never_wins(tmp_path):
    limit = int(4.5 * GIB)
    tuned = tune(bench_of(tmp_path, "--do", "bloat", "--at", "16"), runs=4, limit_bytes=limit)
    assert Kind.OVER_MEMORY in kinds(tuned)
    assert tuned.winner.microbatches == 8
    assert peak(tuned) <= limit


def peak(tuned):
    (run, *_) = tuned.standing.of(tuned.winner)
    return max(rank.peak_bytes for rank in run.outcome.measurement.memory)


@pytest.mark.slow
def test_overlap_is_tried_where_the_command_can_be_told_it(tmp_path):
    now = ("split=4,4,4,4", "microbatches=16", "overlap=0")
    words = (*PLACEHOLDERS, "--overlap", "{overlap}")
    tuned = tune(bench_of(tmp_path, now=now, words=words), runs=2)
    assert [run.setting.overlap for run in tuned.standing.runs] == [False, True]
    assert tuned.standing.best.overlap is True


def test_what_the_command_cannot_be_told_is_mentioned_and_not_tried(tmp_path):
    now, words = ("split=4,4,4,4",), ("--microbatches", "4", "--split", "{split}")
    tuned = tune(bench_of(tmp_path, now=now, words=words))
    assert tuned.winner is None
    assert {one.lever for one in tuned.prospects.untellable} == {"microbatches", "schedule"}
    assert len(runs_of(tuned.bench)) == 1


@pytest.mark.slow
def test_the_answer_is_typed_and_says_what_came_of_every_run(usual):
    answer = answer_tune(usual)
    assert msgspec.json.decode(answer.to_json(), type=TuneAnswer, strict=True) == answer
    data = answer.to_dict()
    knobs = usual.winner.knobs()
    assert set(data["winner"]) == set(knobs)
    assert [run["run"] for run in data["runs"]] == [run.number for run in usual.standing.runs]
    assert data["sentence"].startswith(str(usual.winner)[:1].upper())


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "crowded"), [(2, True), (8, False)])
def test_ranks_that_share_cores_and_a_setting_that_varies_are_told(
    usual, monkeypatch, cores, crowded
):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    runs = []
    for run in usual.standing.runs:
        measured = run.outcome.measurement
        slower = 1.5 if run is usual.standing.runs[-1] else 1.0
        samples = tuple(
            replace(one, batch_latency_s=one.batch_latency_s * slower) for one in measured.samples
        )
        measured = replace(measured, samples=samples, environment=Environment())
        runs.append(replace(run, outcome=replace(run.outcome, measurement=measured)))
    tuned = replace(usual, standing=replace(usual.standing, runs=tuple(runs)))
    said = tune_page(tuned, "", "").findings
    assert any(
        line.startswith(f"4 ranks on {cores} cores: ranks share cores") for line in said
    ) == (crowded)
    assert any(line.startswith("The unchanged setting varied ") for line in said)
    steady = tune_page(usual, "", "").findings
    assert not any("varied" in line or "cores" in line for line in steady)
