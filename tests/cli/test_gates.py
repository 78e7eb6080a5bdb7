"""Gates: 0 is said only of what was judged, 1 only where the gate closed."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import click
import pytest
from support.services.console import type_command
from support.traces.kineto_events import document, kernel, write
from support.traces.recordings import H200

from debubble.api import analyse
from debubble.cli.gates import judge_bubbles
from debubble.errors import GateError, Touch


@pytest.fixture(scope="module")
def known():
    """A pipeline whose ranks wait 43 % of the batch or more."""
    return analyse(H200 / "fwd_closed_m4").pipeline


def test_a_bubble_that_cannot_be_told_does_not_pass(known):
    with pytest.raises(GateError, match="the bubble is unknown"):
        judge_bubbles([replace(known, windows=())], 0.2)


def test_one_pipeline_over_the_limit_closes_the_gate_whatever_the_others_are(known):
    other = replace(known, pipeline=1, windows=())
    with pytest.raises(click.exceptions.Exit) as closed:
        judge_bubbles([other, known], 0.2)
    assert closed.value.exit_code == 1
    with pytest.raises(GateError, match="of pipeline 1 is unknown"):
        judge_bubbles([known, other], 0.9)
    judge_bubbles([known], 0.9)


def test_a_part_of_a_pipeline_is_answered_and_not_judged(tmp_path):
    file = "tests/data/h200/fwd_closed_m4/rank0.json.gz"
    answer = type_command(f"debubble find {file} --fail-over 20%", tmp_path)
    assert answer.text.startswith("In part, with no trace of ranks 1-3")
    assert "error: --fail-over cannot be judged" in answer.text
    assert "no trace of ranks 1-3\n" in answer.text
    assert answer.code == 2


def test_no_pipeline_is_answered_and_not_judged(tmp_path):
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", document([kernel()], rank=rank, world=2))
    answer = type_command("debubble find . --fail-over 20%", tmp_path)
    assert answer.text.startswith("No pipeline in these traces")
    assert "error: --fail-over cannot be judged: no pipeline" in answer.text
    assert answer.code == 2


def test_hops_that_are_all_unknown_do_not_pass(tmp_path):
    words = "debubble links tests/data/links/sendrecv_2ranks.txt --fail-on slow"
    answer = type_command(words, tmp_path)
    assert "error: --fail-on slow cannot be judged" in answer.text
    assert answer.code == 2
    assert (
        type_command("debubble links tests/data/h200/1f1b_p2_m4 --fail-on slow", tmp_path).code == 0
    )


def no_stamp(events):
    [e for e in events if e.get("cat") == "kernel" and "nccl" not in e["name"]][50]["ts"] = 0


def lost_kernels(events):
    kernels = [e for e in events if e.get("cat") == "kernel" and "nccl" not in e["name"]]
    lost = {id(event) for event in kernels[::10]}
    events[:] = [event for event in events if id(event) not in lost]


def wrong_memory(events):
    for event in events:
        if event["name"] == "[memory]":
            event["args"]["Total Allocated"] *= 1000


def malformed(events):
    events.insert(100, 7)


def written(folder, damage):
    """Return a run, one of whose ranks was damaged."""
    folder.mkdir()
    for source in (H200 / "fwd_closed_m4").glob("rank*.json.gz"):
        content = json.loads(gzip.decompress(source.read_bytes()))
        if source.name == "rank2.json.gz":
            damage(content["traceEvents"])
        (folder / source.name.removesuffix(".gz")).write_text(json.dumps(content))
    return folder


GATES = {
    Touch.TIMES: "find {} --fail-over 57%",
    Touch.MESSAGES: "links {} --fail-on slow --class sockets",
    Touch.LAYERS: "plan {} --emit torch",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "touched"),
    [
        (malformed, set(GATES)),
        (lost_kernels, {Touch.TIMES}),
        (wrong_memory, set()),
    ],
)
def test_a_gate_closes_only_on_what_bears_on_it(tmp_path, damage, touched):
    run = written(tmp_path / "run", damage)
    for judged, words in GATES.items():
        answer = type_command(f"debubble {words.format(run)}", tmp_path)
        assert (answer.code == 2) == (judged in touched), words


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "code"), [("99%", 0), ("5%", 1)])
def test_a_doubt_that_moves_little_closes_no_gate_far_from_its_limit(tmp_path, limit, code):
    run = written(tmp_path / "run", no_stamp)
    answer = type_command(f"debubble find {run} --fail-over {limit}", tmp_path)
    assert "1 kernel in another order than on the host, left out" in answer.text
    assert answer.code == code


@pytest.fixture(scope="module")
def of_damage(tmp_path_factory):
    """A run of which an event was no event: it is named, and all that it may have moved."""
    return written(tmp_path_factory.mktemp("damaged") / "run", malformed)


def test_no_change_is_written_out_of_damaged_traces(tmp_path, of_damage):
    words = f"debubble plan {of_damage} --emit torch -o order.csv --force"
    answer = type_command(words, tmp_path)
    assert "--emit writes nothing: rank 2" in answer.text
    assert (answer.code, answer.out) == (2, "")
    assert not (tmp_path / "order.csv").exists()
    sound = type_command("debubble plan tests/data/h200/fwd_closed_m4 --emit torch", tmp_path)
    assert sound.code == 0
    assert sound.out


@pytest.mark.parametrize("sides", ["kept sound", "sound kept"])
def test_no_gate_judges_by_what_was_kept_of_damaged_traces(tmp_path, of_damage, sides):
    store = f"--store sqlite:///{tmp_path}/history.db"
    for name, traces in (("kept", of_damage), ("sound", "tests/data/h200/fwd_closed_m4")):
        added = type_command(f"debubble history add {traces} --name {name} {store}", tmp_path)
        assert added.code == 0
    answer = type_command(f"debubble compare {sides} --fail-on worse {store}", tmp_path)
    assert "--fail-on cannot be judged: rank 2" in answer.text
    assert answer.code == 2
    assert "warning: rank 2" in type_command(f"debubble compare {sides} {store}", tmp_path).text
    assert type_command(f"debubble compare sound sound --fail-on worse {store}", tmp_path).code == 0


def test_hops_are_not_held_against_those_of_damaged_traces(tmp_path, of_damage):
    earlier = type_command(f"debubble links {of_damage} --json", tmp_path)
    (tmp_path / "earlier.json").write_text(earlier.out)
    words = "debubble links tests/data/h200/fwd_closed_m4 --history earlier.json"
    answer = type_command(words, tmp_path)
    assert "earlier.json: an answer with doubtful messages: rank 2" in answer.text
    assert answer.code == 2


def test_runs_that_cannot_be_compared_do_not_pass(tmp_path):
    words = "debubble compare tests/data/h200/1f1b_p2_m4 tests/data/h200/fwd_closed_m4"
    answer = type_command(f"{words} --fail-on worse", tmp_path)
    assert "--fail-on cannot be judged: the runs cannot be compared" in answer.text
    assert answer.code == 2
    assert type_command(words, tmp_path).code == 0
