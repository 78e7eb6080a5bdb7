"""One change, made and measured; captures that something else disturbed are made anew."""

from __future__ import annotations

import pytest
from support.tuning import bench_of, play_here, runs_of

from debubble.tune.once import excess, improve_once

BEFORE, AFTER = "3,3,3,7 4", "4,4,4,4 8"
AGES = 3600.0


@pytest.fixture(autouse=True)
def _played_here(monkeypatch):
    monkeypatch.setattr("debubble.tune.trial.run_guarded", play_here)


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


def test_a_disturbed_capture_is_made_anew(tmp_path):
    made, runs, said = improve(tmp_path, "--busy", "2")
    assert runs == [BEFORE, BEFORE, BEFORE, AFTER]
    assert said[1] == "this machine was busy with something else meanwhile: once more"
    assert made.gaps == ()


def test_without_time_for_another_it_is_taken_as_it_is_and_said(tmp_path):
    made, runs, _ = improve(tmp_path, "--busy", "2", seconds=0.0)
    assert runs == [BEFORE, AFTER]
    assert [gap.code.value for gap in made.gaps] == ["busy_machine", "busy_machine"]
    assert made.gaps[1].message.startswith(
        "this machine was busy during the capture of after: passes took "
    )
