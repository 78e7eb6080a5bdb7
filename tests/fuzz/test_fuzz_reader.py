"""A short run of the fuzzer, and that it would see what it looks for."""

from __future__ import annotations

import os
import sys
import time

import pytest
from fuzz import fuzz_reader
from fuzz.cases import make_case

from debubble.errors import RunNotFound

# The workers are forked, and other tests may have left threads of pyarrow behind.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def run(tmp_path, *arguments):
    keep = tmp_path / "findings"
    code = fuzz_reader.main([*arguments, "--keep", str(keep)])
    return code, sorted(path.name for path in keep.iterdir()) if keep.exists() else []


@pytest.mark.slow
def test_three_hundred_damaged_traces_are_read_or_refused(tmp_path, capsys):
    assert run(tmp_path, "--cases", "300") == (0, [])
    assert capsys.readouterr().out.startswith("300 cases, seed 20260101: 0 findings")


def test_a_case_is_the_same_every_time(tmp_path):
    for number in range(5):
        first, second = (make_case(1, number, tmp_path / name) for name in "ab")
        assert (first.piece_bytes, first.rank) == (second.piece_bytes, second.rank)
        assert contents(tmp_path / "a") == contents(tmp_path / "b")


def contents(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path.relative_to(folder), path.read_bytes()) for path in files]


def crash(_places):
    os.abort()


def hang(_places):
    time.sleep(60)


def speak(_places):
    sys.stderr.write("hello")
    raise RunNotFound("nothing")


def stumble(_places):
    raise KeyError("no such thing")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "seen"), [(crash, "died"), (hang, "hung"), (speak, "printed"), (stumble, "KeyError")]
)
def test_bugs_of_every_kind_are_found_and_blamed_on_their_case(
    tmp_path, monkeypatch, capsys, bug, seen
):
    monkeypatch.setattr(fuzz_reader, "HANG_S", 1)
    monkeypatch.setattr(fuzz_reader, "find_run", bug)
    code, kept = run(tmp_path, "--cases", "1", "--first", "7", "--workers", "1")
    assert (code, kept) == (1, ["20260101-7", "20260101-7.txt"])
    out = capsys.readouterr().out
    assert "case 7: " in out
    assert seen in out
    assert "--seed 20260101 --first 7 --cases 1" in out
