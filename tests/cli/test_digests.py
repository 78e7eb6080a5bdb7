"""Every verb answers from digests as it does from traces, to the digit."""

from __future__ import annotations

import importlib
import json
import shutil

import pytest
from click.testing import CliRunner
from support.traces.recordings import H200, PUBLIC, SHARED

from debubble.errors import DebubbleError

RUNS = sorted(path.name for path in H200.iterdir())
RECORDED = sorted(path.name for path in (SHARED / "h200").glob("*_m*"))
OTHERS = [
    *("nsys-ai", "bytedance-straggler-ST", "sglang-tp8"),
    *(f"{place.parent.name}/{place.name}" for place in sorted(PUBLIC.glob("[ht]*/*.gz"))),
]
# The files read, and what else lies beside them: a digest has another name.
ABOUT_FILES = ("capture", "captures", "left_alone")


def ask(verb, *words):
    """Return the answer of a verb, or the error that it ends with."""
    command = importlib.import_module(f"debubble.cli.{verb}").command
    answer = CliRunner().invoke(command, [*map(str, words), "--json"])
    if isinstance(answer.exception, DebubbleError):
        return {"error": str(answer.exception)}
    assert answer.exception is None, answer.exception
    data = json.loads(answer.stdout)
    if isinstance(data.get("run"), dict):
        data["run"] = {key: value for key, value in data["run"].items() if key not in ABOUT_FILES}
    return {key: value for key, value in data.items() if key not in ABOUT_FILES}


def assert_equal_answers(traces, kept, verbs):
    first = ask(verbs[0], traces, "--digest", kept)
    if not list(kept.rglob("*.npz")):
        assert "error" in first
        return
    assert ask(verbs[0], kept) == first
    for verb in verbs[1:]:
        assert ask(verb, kept) == ask(verb, traces), verb


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_digests_answer_as_traces_do(name, tmp_path):
    assert_equal_answers(H200 / name, tmp_path / "kept", ("find", "inspect", "links", "plan"))


@pytest.mark.parametrize("name", RUNS[:1])
def test_beside_their_traces_even_the_names_are_the_same(name, tmp_path):
    folder = shutil.copytree(H200 / name, tmp_path / name)
    before = ask("find", folder, "--digest", "beside")
    assert ask("find", folder) == before
    for trace in folder.glob("*.gz"):
        trace.unlink()
    assert ask("find", folder) == before


def test_two_runs_are_compared_and_both_are_kept(tmp_path):
    pair = H200 / "1f1b_p2_m4", H200 / "1f1b_p3_m7"
    before = ask("compare", *pair)
    assert "error" not in before
    for run in pair:
        ask("inspect", run, "--digest", tmp_path / run.name)
    assert ask("compare", *(tmp_path / run.name for run in pair)) == before


@pytest.mark.accuracy
@pytest.mark.parametrize("name", RECORDED)
def test_all_recorded_runs_answer_from_digests(name, recorded_data, tmp_path):
    verbs = ("find", "inspect", "links", "plan")
    assert_equal_answers(recorded_data / name, tmp_path / "kept", verbs)


@pytest.mark.accuracy
@pytest.mark.parametrize("name", OTHERS)
def test_all_public_traces_answer_from_digests(name, public_data, tmp_path):
    assert_equal_answers(public_data / name, tmp_path / "kept", ("find", "inspect", "links"))
