"""`find` on what is not a whole pipeline: it says so, and says what still holds."""

from __future__ import annotations

import gzip
import json

import pytest
from support.services.console import type_command
from support.traces.kineto_events import document, kernel, operator, write
from support.traces.recordings import H200


def test_traces_without_a_pipeline_are_an_answer_and_not_an_error(tmp_path):
    for rank in (0, 1):
        events = [
            kernel("gemm", ts=0.0, dur=30.0),
            kernel("ncclDevKernel_AllReduce(x)", ts=30.0, dur=70.0),
        ]
        write(tmp_path / f"rank{rank}.json", document(events, rank=rank, world=2))
    answer = type_command("debubble find .", tmp_path)
    assert answer.code == 0
    assert answer.text.startswith(
        "No pipeline in these traces: no rank sends or receives point to point. "
        "Busy: rank 0 30.0 %, rank 1 30.0 %."
    )
    data = json.loads(type_command("debubble find . --json", tmp_path).text)
    assert data["numbers"] is None
    assert [gap["code"] for gap in data["warnings"]] == ["no_pipeline"]
    assert type_command("debubble find . --strict", tmp_path).code == 2
    for picture in ("--svg out.svg", "--perfetto out.json"):
        refused = type_command(f"debubble find . {picture}", tmp_path)
        assert (refused.code, refused.text[:28]) == (2, "error: no pipeline in these ")


def test_the_next_command_of_a_part_is_one_that_works(tmp_path):
    traces = " ".join(str(H200 / f"1f1b_p3_m7/rank{rank}.json.gz") for rank in (0, 2))
    answer = type_command(f"debubble find {traces}", tmp_path)
    assert answer.text.rstrip().endswith(f"next: debubble inspect {traces}")
    assert type_command(f"debubble plan {traces}", tmp_path).code == 2


def test_without_shapes_the_cure_is_named(tmp_path):
    for rank in (0, 1):
        events = [kernel(), operator("c10d::send", ts=1.0), operator("c10d::recv_", ts=5.0)]
        write(tmp_path / f"rank{rank}.json", document(events, rank=rank, world=2))
    answer = type_command("debubble find .", tmp_path)
    assert "the peers of all 4 messages are unknown" in answer.text
    assert "record_shapes=True" in answer.text


def test_a_stage_without_a_trace_makes_the_answer_partial(tmp_path):
    files = [f"tests/data/h200/fwd_closed_m4/rank{rank}.json.gz" for rank in (0, 1, 3)]
    answer = type_command(f"debubble find {' '.join(files)}", tmp_path)
    assert answer.text.startswith(
        "In part, with no trace of rank 2: the other ranks wait 56 % of the batch"
    )
    assert "theory for 4 ranks" in answer.text
    assert "warning: no trace of rank 2" in answer.text


@pytest.mark.parametrize("ranks", [(0,), (3,), (0, 1, 3)])
def test_waits_for_ranks_without_a_trace_are_no_bottleneck(tmp_path, ranks):
    files = " ".join(f"tests/data/h200/fwd_closed_m4/rank{rank}.json.gz" for rank in ranks)
    answer = type_command(f"debubble find {files}", tmp_path).text
    assert "bottleneck" not in answer
    assert "Waits for ranks without a trace are unexplained" in answer
    data = json.loads(type_command(f"debubble find {files} --json", tmp_path).text)
    assert data["bottleneck"] is None
    assert "without a trace" in data["unknown"]["bottleneck"]


def test_a_file_that_ends_before_its_kernels_makes_its_rank_missing(tmp_path):
    rewritten(tmp_path, "fwd_closed_m4", keep="013")
    whole = (H200 / "fwd_closed_m4" / "rank2.json.gz").read_bytes()
    (tmp_path / "rank2.json.gz").write_bytes(whole[: len(whole) * 2 // 5])
    answer = type_command("debubble find .", tmp_path)
    assert answer.text.startswith("In part, with no trace of rank 2: the other ranks wait 56 %")
    assert "rank2.json.gz: truncated gzip data" in answer.text
    data, codes = codes_of(tmp_path)
    # Without that rank the replay misses the steps: no savings are told.
    assert codes == ["truncated", "missing_ranks", "replay_misses"]
    assert data["run"]["missing_ranks"] == [2]


def test_theory_is_not_claimed_when_the_pipeline_may_go_on_beyond_the_traces(tmp_path):
    files = [f"tests/data/h200/1f1b_p3_m7/rank{rank}.json.gz" for rank in (0, 1)]
    answer = type_command(f"debubble find {' '.join(files)} --json", tmp_path)
    data = json.loads(answer.text)
    assert data["run"]["partial"] is True
    assert data["theory"] == {"bubble_fraction": None, "schedule_bubble_fraction": None}


def rewritten(folder, name, change=None, keep=None):
    """A shipped recording with its events changed, or only some of its ranks."""
    for path in sorted((H200 / name).glob("rank*.json.gz")):
        if keep is not None and path.name[4] not in keep:
            continue
        content = json.loads(gzip.decompress(path.read_bytes()))
        if change is not None:
            content["traceEvents"] = change(content["traceEvents"])
        write(folder / path.name, content)


def without_marks(events):
    return [one for one in events if not one.get("name", "").startswith("ProfilerStep#")]


def codes_of(folder):
    data = json.loads(type_command("debubble find . --json", folder).text)
    return data, [gap["code"] for gap in data["warnings"]]


@pytest.mark.slow
def test_steps_that_were_never_marked_are_told_and_it_is_said(tmp_path):
    rewritten(tmp_path, "1f1b_p2_m4", without_marks)
    marked = type_command("debubble find tests/data/h200/1f1b_p2_m4", tmp_path).text
    answer = type_command("debubble find .", tmp_path)
    assert answer.text.partition("\n\nwarning")[0] == marked.partition("\n\nnext")[0]
    assert "warning: no step marks; 2 steps inferred from the order of the passes" in answer.text
    data, codes = codes_of(tmp_path)
    assert codes == ["steps_inferred"]
    assert (data["run"]["steps"], data["run"]["steps_inferred"]) == ([0, 1], True)
    assert type_command("debubble find . --strict", tmp_path).code == 2


@pytest.mark.slow
def test_ranks_of_two_runs_are_told_apart_and_no_bubble_is_invented(tmp_path):
    rewritten(tmp_path, "1f1b_p3_m7", keep="12")
    rewritten(tmp_path, "1f1b_p2_m4", keep="0")
    answer = type_command("debubble find .", tmp_path)
    assert answer.text.startswith("Bubble unknown: these ranks are not of one run. Busy:")
    assert "their jobs had different numbers of ranks" in answer.text
    assert "hop " not in answer.text
    data, codes = codes_of(tmp_path)
    assert "mixed_runs" in codes
    assert data["run"]["one_run"] is False
    assert data["numbers"]["bubble_fraction"] is data["run"]["clock_uncertainty_s"] is None
    assert type_command("debubble find . --strict", tmp_path).code == 2


def cut_short(events):
    """Lose what the device had not done after two thirds of the capture."""
    on_device = [one for one in events if one.get("cat") in {"kernel", "gpu_memset", "gpu_memcpy"}]
    first, last = (pick(one["ts"] for one in on_device) for pick in (min, max))
    end = first + 0.7 * (last - first)
    return [one for one in events if one not in on_device or one["ts"] + one["dur"] < end]


@pytest.mark.slow
def test_a_step_that_the_capture_cuts_is_left_out_and_named(tmp_path):
    rewritten(tmp_path, "1f1b_p2_m4", cut_short)
    data, codes = codes_of(tmp_path)
    assert codes == ["cut_steps"]
    assert data["run"]["steps"] == [2]
    assert data["run"]["steps_left_out"] == [{"step": 3, "why": "cut_steps"}]
    assert data["run"]["partial"] is False
    answer = type_command("debubble find . --step 3", tmp_path)
    assert answer.text.startswith("In part, of a step that the capture cuts: ranks wait")
    assert type_command("debubble find . --strict", tmp_path).code == 2


def test_an_order_of_ones_own_is_stated_as_a_file_and_answered_as_data(tmp_path):
    (tmp_path / "own.csv").write_text(
        "0F0,0F1,,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    )
    answer = type_command(
        "debubble find tests/data/h200/1f1b_p2_m4 --schedule own.csv --json --strict", tmp_path
    )
    data = json.loads(answer.text)
    assert answer.code == 0
    assert data["run"]["schedule"] == "1f1b"
    assert data["run"]["stated"] == {
        "schedule": "own.csv",
        "chunks": 1,
        "agrees": True,
        "deviation": None,
    }


def test_a_statement_that_the_run_contradicts_is_answered_as_data(tmp_path):
    answer = type_command(
        "debubble find tests/data/h200/1f1b_p2_m4 --schedule zbv --json --strict", tmp_path
    )
    data = json.loads(answer.text)
    assert answer.code == 2
    assert data["run"]["stated"]["deviation"] == {
        "rank": 0,
        "step": 2,
        "place": 2,
        "found": "0B0",
        "expected": "0F2",
    }
    assert [(one["code"], one["rank"]) for one in data["warnings"]] == [("schedule_differs", 0)]
    assert data["theory"]["bubble_fraction"] is None
    assert data["theory"]["schedule_bubble_fraction"] < 0.1
