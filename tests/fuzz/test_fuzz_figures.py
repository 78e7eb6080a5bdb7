"""A short run of the fuzzer of figures, and that it would see what it looks for."""

from __future__ import annotations

from random import Random

import pytest
from fuzz import fuzz_figures
from fuzz.field_damage import BAD_VALUES, Document, damage_field, move_one
from support.traces.recordings import DATA, H200

from debubble.trace import run
from debubble.trace.kineto import read_kineto


@pytest.mark.slow
def test_no_figure_moves_in_silence(capsys):
    assert fuzz_figures.main(["--cases", "80"]) == 0
    assert capsys.readouterr().out.startswith("80 cases, seed 20260202: 0 findings")


@pytest.mark.slow
def test_without_the_guard_figures_move(monkeypatch, capsys):
    monkeypatch.setattr(run, "guard", lambda trace: (trace, ()))
    assert fuzz_figures.main(["--cases", "25"]) == 1
    assert "again: python" in capsys.readouterr().out


def test_there_are_five_recordings_and_twenty_bad_values():
    assert len(fuzz_figures.RECORDINGS) >= 5
    assert all((DATA / name).is_dir() for name in fuzz_figures.RECORDINGS)
    assert len(BAD_VALUES) >= 20


def test_a_document_is_written_as_it_was_and_damaged_in_a_copy(tmp_path):
    source = H200 / "fwd_closed_m4" / "rank0.json.gz"
    document = Document.load(source)
    whole = document.bytes()
    damaged = document.copy()
    random = Random(1)  # noqa: S311 (damage is no secret)
    move_one(random, damaged)
    damage_field(random, damaged)
    assert document.bytes() == whole != damaged.bytes()
    path = tmp_path / "rank0.json"
    path.write_bytes(whole)
    ours = read_kineto(str(path))
    theirs = read_kineto(str(source))
    assert len(ours.kernels) == len(theirs.kernels)
    assert len(ours.operators) == len(theirs.operators)
