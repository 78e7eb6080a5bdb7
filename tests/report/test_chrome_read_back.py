"""The Perfetto file keeps to its format and, read back by our reader, gives the same numbers."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest
from support.timelines.engine_runs import timeline_of
from support.traces.read_once import build_recording
from support.traces.recordings import H200

from debubble.report.chrome import write_chrome
from debubble.timeline.build import build_run
from debubble.timeline.figures import measure_pipeline
from debubble.trace.run import find_run, read_run

NUMBER = (int, float)
EVERY = {"ph": str, "name": str, "pid": int, "tid": int, "ts": NUMBER}
# What the Trace Event Format asks of each phase that we use, and what it allows besides.
REQUIRED = {
    "M": EVERY | {"args": dict},
    "X": EVERY | {"cat": str, "dur": NUMBER},
    "C": EVERY | {"args": dict},
    "s": EVERY | {"cat": str, "id": int},
    "f": EVERY | {"cat": str, "id": int, "bp": str},
}
ALLOWED = {"X": {"args"}}
METADATA = {"process_name", "process_sort_index", "process_labels", "thread_name"}
METADATA |= {"thread_sort_index"}


@pytest.fixture(scope="module", params=["recorded", "simulated"])
def timeline(request):
    if request.param == "recorded":
        return build_recording(H200 / "1f1b_p2_m4")
    return timeline_of("1f1b", 4, 8, one_way=120_000)


@pytest.fixture(scope="module")
def document(timeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("perfetto") / "run.json"
    write_chrome(timeline, path)
    return json.loads(path.read_text("utf-8"), parse_constant=pytest.fail)


def test_every_event_keeps_to_the_trace_event_format(document):
    assert isinstance(document["traceEvents"], list)
    assert document["displayTimeUnit"] in {"ms", "ns"}
    for event in document["traceEvents"]:
        required = REQUIRED[event["ph"]]
        assert required.keys() <= event.keys() <= required.keys() | ALLOWED.get(event["ph"], set())
        for name, kind in required.items():
            assert isinstance(event[name], kind), (name, event)
            assert not isinstance(event[name], bool)
        if event["ph"] == "M":
            assert event["name"] in METADATA
        if event["ph"] == "C":
            assert all(isinstance(value, NUMBER) for value in event["args"].values())


def as_table(document, stage_of):
    """What the file shows, as rows that our reader of op tables takes."""
    for event in document["traceEvents"]:
        if event.get("cat") not in {"pass", "send", "receive"}:
            continue
        args, rank = event["args"], event["pid"]
        row = {"step": args["step"], "rank": rank, "pipeline": 0, "stage": stage_of[rank]}
        row |= {"start_us": event["ts"], "duration_us": event["dur"]}
        if event["cat"] == "pass":
            yield row | {"microbatch": args["microbatch"], "op": event["name"][0], "bytes": 0}
            continue
        other = int(event["name"].split()[-1])
        onward = (other > rank) == (event["cat"] == "send")
        op = f"{'forward' if onward else 'backward'}-{event['cat'].replace('receive', 'recv')}"
        size = max(args["bytes"], 0)
        yield row | {"microbatch": -1, "op": op, "peer": other, "bytes": size}


def test_read_back_it_gives_the_same_numbers(timeline, document, tmp_path):
    stage_of = {rank.rank: rank.stages[0] for rank in timeline.ranks}
    rows = list(as_table(document, stage_of))
    path = tmp_path / "ops.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    again = build_run(read_run(find_run([str(path)])))
    before, after = measure_pipeline(timeline, 0), measure_pipeline(again, 0)
    assert after.batch_latency_ns == before.batch_latency_ns
    assert (after.schedule, after.microbatches) == (before.schedule, before.microbatches)
    assert [window.length_ns for window in after.windows] == [
        window.length_ns for window in before.windows
    ]
    # Of a pass the file shows the span, and not what was computed in it.
    seen = [replace(row, busy_ns=row.median_ns) for row in before.stages]
    assert list(after.stages) == seen
    assert [(hop.source, hop.destination, hop.count) for hop in after.hops] == [
        (hop.source, hop.destination, hop.count) for hop in before.hops
    ]
    assert [hop.wire_ns for hop in after.hops] == [hop.wire_ns for hop in before.hops]
    # Compute of a step that lies in no pass is work as well; the file shows passes alone.
    outside = work_outside_passes(timeline, before)
    assert bubble_of(document, before) - outside == pytest.approx(before.bubble_fraction, abs=1e-4)


def work_outside_passes(timeline, figures):
    """The share of ranks x window that was compute between passes; the middle of all steps."""
    shares = []
    for window in figures.windows:
        inside = int(timeline.passes.busy_ns[timeline.passes.step == window.step].sum())
        span = window.start_ns, window.end_ns
        occupied = sum(rank.occupied.inside(*span) for rank in figures.ranks)
        shares.append((occupied - inside) / (len(figures.ranks) * window.length_ns))
    return statistics.median(shares)


def bubble_of(document, figures):
    """The bubble by what the file says was busy in its passes; the middle of all steps."""
    bubbles = []
    for window in figures.windows:
        busy = sum(
            event["args"]["busy_us"] * 1000
            for event in document["traceEvents"]
            if event.get("cat") == "pass" and event["args"]["step"] == window.step
        )
        bubbles.append(1 - busy / (len(figures.ranks) * window.length_ns))
    return statistics.median(bubbles)
