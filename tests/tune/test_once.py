"""One change, made and measured; captures that something else disturbed are made anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.tuning import bench_of, play_here, runs_of

from debubble.annexes.tune.once import excess, improve_once
from debubble.annexes.tune.report import demo_json
from debubble.errors import MachineBusy
from debubble.measure.compare import Verdict, compare

BEFORE, AFTER = "3,3,3,7 4", "4,4,4,4 8"
AGES = 3600.0


@pytest.fixture(autouse=True)
def _played_here(monkeypatch):
    monkeypatch.setattr("debubble.annexes.tune.trial.run_guarded", play_here)


def improve(folder, *more, seconds=AGES):
    bench = bench_of(folder, *more)
    said = []
    made = improve_once(bench, most_microbatches=8, seconds=seconds, on_step=said.append)
    return made, [" ".join(line.split()[:2]) for line in runs_of(bench)], said


def test_one_change_is_captured_before_and_after(tmp_path):
    made, runs, said = improve(tmp_path)
    assert runs == [BEFORE, AFTER]
    assert said[0] == "capturing before: split 3,3,3,7, 4 microbatches"
    assert (made.compared.verdict.value, made.gaps) == ("better", ())
    assert -0.001 < excess(made.before) < 0.001
    found = demo_json(made, "", tmp_path, [])["found"]
    assert "Stage 3 on rank 3 takes 1.7 times the average stage; balanced stages" in found


def test_a_disturbed_capture_is_made_anew(tmp_path):
    made, runs, said = improve(tmp_path, "--busy", "2")
    assert runs == [BEFORE, BEFORE, BEFORE, AFTER]
    assert said[1] == "this machine was busy with something else meanwhile: once more"
    assert made.gaps == ()


def test_where_noise_hides_the_change_it_says_that_the_machine_was_busy(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "debubble.annexes.tune.once.compare",
        lambda *runs, **more: replace(compare(*runs, **more), verdict=Verdict.NO_CLEAR_CHANGE),
    )
    with pytest.raises(
        MachineBusy, match="this machine was busy: the effect of the change cannot be"
    ):
        improve(tmp_path, "--busy", "9", seconds=0.0)
