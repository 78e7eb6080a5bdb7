"""What `inspect` says of the files that it found."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support.services.console import type_command
from support.traces.recordings import H200

import debubble
from debubble.errors import NoPipeline
from debubble.report.answers.inspect import answer_inspect
from debubble.trace.run import find_run, read_run

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize(
    ("present", "said"), [((0, 3), "missing: ranks 1-2."), ((0, 1, 3), "missing: rank 2.")]
)
def test_one_missing_rank_is_a_rank_and_several_are_ranks(present, said):
    files = [str(H200 / "fwd_closed_m4" / f"rank{rank}.json.gz") for rank in present]
    assert answer_inspect(read_run(find_run(files))).verdict.endswith(said)


OF_SHAPES = {
    *("Src Rank", "Dst Rank", "In msg nelems", "Out msg nelems", "dtype", "Collective name"),
    *("Process Group Name", "Process Group Ranks", "Process Group Description", "Group size"),
    *("Rank", "In split size", "Out split size", "Input Dims", "Input type", "Concrete Inputs"),
}


@pytest.fixture(scope="module")
def without_shapes(tmp_path_factory):
    """A recorded run as it would be without `record_shapes`."""
    folder = tmp_path_factory.mktemp("no") / "shapes"
    folder.mkdir()
    for file in (H200 / "1f1b_p2_m4").glob("*.json.gz"):
        trace = json.loads(gzip.decompress(file.read_bytes()))
        del trace["record_shapes"]
        for event in trace["traceEvents"]:
            event["args"] = {
                name: value
                for name, value in event.get("args", {}).items()
                if name not in OF_SHAPES
            }
        (folder / file.name).write_bytes(gzip.compress(json.dumps(trace).encode(), 1))
    return folder


def test_traces_without_shapes_say_at_once_what_no_verb_will_have(without_shapes):
    answer = answer_inspect(read_run(find_run([str(without_shapes)])))
    assert answer.verdict.endswith("all other verbs will lack the peers of all 32 messages.")
    [lack] = answer.lacks
    assert (lack.blocks, lack.record) == (True, "record_shapes=True")
    assert lack.verbs == ["find", "links", "plan", "simulate", "compare"]


@pytest.mark.slow
def test_inspect_and_find_do_not_send_each_other_round(without_shapes, tmp_path):
    for verb in ("inspect", "find"):
        said = type_command(f"debubble {verb} {without_shapes}", tmp_path)
        assert said.code == 0
        assert "record_shapes=True" in said.text
        assert said.out.splitlines()[-1] == "next: debubble capture -- COMMAND"


@pytest.mark.slow
def test_inspect_says_that_there_is_no_pipeline_where_find_sees_none(without_shapes):
    served = [path for path in (DATA / "serving").iterdir() if list(path.glob("*.json.gz"))]
    for run in [*H200.iterdir(), *(DATA / "frameworks").iterdir(), *served, without_shapes]:
        try:
            find_answer = debubble.find(str(run))
        except NoPipeline:
            find_answer = None
        holds = answer_inspect(read_run(find_run([str(run)]))).holds_pipeline
        assert holds == (find_answer is not None), run


def test_memory_that_was_not_recorded_is_named_with_whom_it_is_missed_by():
    answer = answer_inspect(read_run(find_run([str(DATA / "serving" / "k4")])))
    [lack] = answer.lacks
    assert (lack.verbs, lack.record) == (["plan", "compare"], "profile_memory=True")
    assert answer.verdict.endswith(
        "plan and compare will lack memory, and so whether a change fits."
    )
