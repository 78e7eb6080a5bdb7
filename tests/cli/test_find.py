"""`find` on what is not a whole pipeline: it says so, and says what still holds."""

from __future__ import annotations

import json

from console import type_command
from making import document, kernel, operator, send, write


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


def test_theory_is_not_claimed_when_the_pipeline_may_go_on_beyond_the_traces(tmp_path):
    files = [f"tests/data/h200/1f1b_p3_m7/rank{rank}.json.gz" for rank in (0, 1)]
    answer = type_command(f"debubble find {' '.join(files)} --json", tmp_path)
    data = json.loads(answer.text)
    assert data["run"]["partial"] is True
    assert data["theory"] == {"bubble_fraction": None, "schedule_bubble_fraction": None}


def test_one_message_alone_invents_no_stages(tmp_path):
    write(tmp_path / "rank0.json", document([send(to=1), kernel()], rank=0, world=2))
    assert type_command("debubble find .", tmp_path).code == 0
