"""The Chrome trace that we write: valid, complete, and readable by ourselves."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from support.services.console import type_command
from support.simulator.devices import Play
from support.simulator.host_programs import Setup
from support.simulator.written_traces import Writing, write_run
from support.traces.read_once import analyse_recording
from support.traces.recordings import H200

from debubble.report.chrome import chrome_trace, write_chrome
from debubble.timeline.build import build_timeline
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


@pytest.fixture(scope="module", params=["recorded", "overlapping"])
def timeline(request, tmp_path_factory):
    folder = H200 / "1f1b_p2_m4"
    if request.param == "overlapping":
        folder = tmp_path_factory.mktemp("dualpipe")
        setup = Setup(schedule="dualpipe-v", ranks=2, microbatches=4, early=True)
        write_run(Play(setup), folder, Writing(labels="runtime"))
    return build_timeline(read_run(find_run([str(folder)])).ranks)


@pytest.fixture
def events(timeline):
    return chrome_trace(timeline)["traceEvents"]


def slices(events, category):
    return [e for e in events if e["ph"] == "X" and e["cat"] == category]


def test_every_event_keeps_to_the_trace_event_format(timeline):
    document = json.loads(json.dumps(chrome_trace(timeline)), parse_constant=pytest.fail)
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


def test_every_pass_is_there_in_microseconds_on_one_clock(timeline, events):
    base = chrome_trace(timeline)["baseTimeNanoseconds"]
    passes = timeline.passes
    shown = slices(events, "pass")
    begins = sorted(base + round(e["ts"] * 1000) for e in shown)
    assert begins == sorted(passes.start_ns.tolist())
    lengths = sorted(round(e["dur"] * 1000) for e in shown)
    assert lengths == sorted((passes.end_ns - passes.start_ns).tolist())
    for event in shown:
        assert event["name"][0] in "FBIW"
        assert event["name"][1:] == str(event["args"]["microbatch"])
        assert {"stage", "step"} <= event["args"].keys()


def test_each_rank_is_a_process_that_says_its_stages(timeline, events):
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    for rank in timeline.ranks:
        plural = "s" if len(rank.stages) > 1 else ""
        stages = " ".join(map(str, rank.stages))
        assert names[rank.rank] == f"rank {rank.rank}, stage{plural} {stages}"


def test_an_arrow_goes_from_each_send_into_its_receive(timeline, events):
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(timeline.transfers)
    spans = defaultdict(list)
    for event in (*slices(events, "send"), *slices(events, "receive")):
        spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] < end["ts"]
        for one in (start, end):
            assert any(a <= one["ts"] <= b for a, b in spans[one["pid"], one["tid"]])


def test_nothing_overlaps_on_a_track(events):
    tracks = defaultdict(list)
    for event in (e for e in events if e["ph"] == "X"):
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert tracks.keys() == named
    for spans in tracks.values():
        for before, after in pairwise(sorted(spans)):
            assert after[0] >= before[1] - 1e-3


def test_each_wait_is_there_with_its_cause_and_whom_it_is_for():
    run = analyse_recording(H200 / "1f1b_p2_m4")
    events = chrome_trace(run.timeline, run.waits)["traceEvents"]
    shown = Counter(
        (
            event["pid"],
            event["args"]["cause"],
            event["args"]["waits_for"],
            round(1000 * event["dur"]),
        )
        for event in slices(events, "wait")
    )
    expected = [(w.rank, str(w.cause), w.waits_for, w.end_ns - w.start_ns) for w in run.waits]
    assert shown == Counter(expected)


def test_no_microbatch_is_left_in_flight(events):
    counts = defaultdict(list)
    for event in (e for e in events if e["name"] == "microbatches in flight"):
        counts[event["pid"]].append(event["args"]["count"])
    for values in counts.values():
        assert min(values) == values[-1] == 0
        assert max(values) >= 1


def test_a_file_is_packed_by_its_name(timeline, tmp_path):
    plain, packed = tmp_path / "a.json", tmp_path / "a.json.gz"
    write_chrome(timeline, plain)
    write_chrome(timeline, packed)
    assert json.loads(gzip.decompress(packed.read_bytes())) == json.loads(plain.read_bytes())


def test_the_command_line_says_where_the_file_is(tmp_path):
    words = "debubble find tests/data/h200/1f1b_p2_m4 --json --perfetto out.json.gz"
    answer = type_command(words, tmp_path)
    assert "out.json.gz written" in answer.text
    assert json.loads(answer.text[: answer.text.rindex("}") + 1])["schema"] == "debubble.find/1"
    again = type_command(words, tmp_path)
    assert (again.code, "--force" in again.text) == (2, True)
    assert type_command(f"{words} --force", tmp_path).code == 0
