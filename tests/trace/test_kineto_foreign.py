"""Traces of devices and tools that are not read: said so, and nothing made up of them."""

from __future__ import annotations

import pytest
from support.traces.kineto_events import document, kernel, operator, write

from debubble.trace.columns import steps_of, summarise
from debubble.trace.kineto import read_kineto


def process(name, pid=4):
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def span(name, pid=4, **more):
    return {"ph": "X", "name": name, "pid": pid, "tid": 2, "ts": 10.0, "dur": 90.0, **more}


ASCEND = [
    process("Python", 1),
    process("Ascend Hardware"),
    span("MatMulV2", args={"Task Type": "AI_CORE", "Stream Id": 2}),
    operator("aten::mm"),
]
OTHER_TOOL = [process("browser"), span("v8.compile", cat="v8"), span("paint", cat="blink")]


@pytest.mark.parametrize(
    ("events", "code", "names"),
    [
        pytest.param(ASCEND, "foreign_device", "Ascend Hardware", id="Ascend"),
        pytest.param(OTHER_TOOL, "not_understood", "3 events", id="another tool"),
        pytest.param(
            [{**kernel(), "cat": "mtia_ccp_events"}, operator("aten::mm")],
            "foreign_device",
            "mtia_ccp_events",
            id="MTIA",
        ),
    ],
)
def test_what_is_not_read_is_named_and_has_no_busy_share(events, code, names, tmp_path):
    trace = read_kineto(write(tmp_path / "rank0.json", document(events)))
    [gap] = trace.gaps
    assert gap.code == code
    assert names in gap.message
    summary = summarise(trace)
    assert summary.busy_fraction is None
    assert summary.device == "not read"


def test_a_rank_that_had_no_work_while_it_was_captured_is_not_taken_for_another_tools(tmp_path):
    """A short capture of a server may hold nothing of a rank but its host asking if all is done."""
    asks = {**span("cudaEventQuery", cat="cuda_runtime"), "args": {"correlation": 7}}
    held = document([asks, asks])
    held["deviceProperties"] = [{"id": 0, "name": "H200"}]
    [gap] = read_kineto(write(tmp_path / "rank0.json", held)).gaps
    assert gap.code == "no_kernels"
    assert "nothing ran on its device while it was captured: 2 events" in gap.message
    assert "longer" in gap.hint


@pytest.mark.parametrize("category", ["Operator", "cpu_op"])
def test_steps_are_found_under_the_categories_of_old_and_other_builds(category, tmp_path):
    events = [span("ProfilerStep#7", cat=category), kernel()]
    trace = read_kineto(write(tmp_path / "rank0.json", document(events)))
    assert steps_of(trace) == (7,)
