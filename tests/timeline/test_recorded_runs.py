"""The recorded H200 pipelines: every figure against a second way of computing it."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from support.traces.read_once import read_recording
from support.traces.recordings import H200, SHARED, recorded_run

from debubble.errors import NoPipeline
from debubble.timeline.build import build_timeline
from debubble.timeline.figures import measure_pipeline
from debubble.trace.run import find_run, read_run

ALL = SHARED / "h200"
RUNS = [
    "1f1b_m8",
    "1f1b_m8_split3337",
    "1f1b_m8_slow23",
    "1f1b_p2_m4",
    "1f1b_p3_m7",
    "gpipe_m8",
    "fwd_closed_m4",
    "fwd_closed_m8",
    "fwd_closed_m8_t512",
    "fwd_closed_m8_slow12",
    "zbv_m8",
]


def traces_of(name):
    return read_recording(recorded_run(name)).ranks


def bubble_by_definition(name, windows):
    """Count compute nanoseconds from the raw JSON, knowing nothing of the analysis but windows."""
    folder = H200 / name if (H200 / name).is_dir() else ALL / name
    shares = []
    spans = []
    for path in sorted(folder.glob("rank*.json.gz")):
        document = json.loads(gzip.decompress(path.read_bytes()))
        base = document["baseTimeNanoseconds"]
        spans.append(
            sorted(
                (base + round(e["ts"] * 1000), base + round((e["ts"] + e["dur"]) * 1000))
                for e in document["traceEvents"]
                if e.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}
                and "nccl" not in e["name"]
            )
        )
    for begin, end in windows:
        busy = 0
        for rank in spans:
            reach = begin
            for start, stop in rank:
                fresh = min(stop, end) - max(start, reach)
                if fresh > 0:
                    busy += fresh
                    reach = min(stop, end)
        shares.append(1 - busy / (len(spans) * (end - begin)))
    return shares


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_bubble_is_what_its_definition_says(name):
    figures = measure_pipeline(build_timeline(traces_of(name)), 0)
    windows = [(window.start_ns, window.end_ns) for window in figures.windows]
    assert len(windows) == (4 if name == "1f1b_p3_m7" else 2)
    for window, expected in zip(figures.windows, bubble_by_definition(name, windows), strict=True):
        assert window.bubble_fraction == pytest.approx(expected, abs=0.001)


@pytest.mark.parametrize("name", RUNS)
def test_every_transfer_is_matched_and_none_arrives_before_it_was_sent(name):
    timeline = build_timeline(traces_of(name))
    transfers = timeline.transfers
    sends = sum(int((trace.operators.operation == 1).sum()) for trace in traces_of(name))
    assert len(transfers) == sends
    assert (transfers.receive_end_ns > transfers.send_start_ns).all()


def test_peak_memory_is_the_truth():
    for name in ("1f1b_p2_m4", "fwd_closed_m4"):
        for rank in build_timeline(traces_of(name)).ranks:
            truth = json.loads((H200 / name / f"truth{rank.rank}.json").read_text())
            assert rank.peak_memory_bytes == pytest.approx(truth["peak_bytes"], rel=0.01)


def shifted(trace, offset_ns, ppm=20.0):
    """The same rank on a clock that is wrong and runs fast."""

    def move(table):
        since = table.start_ns - trace.kernels.start_ns[0]
        drift = np.rint(since * ppm * 1e-6).astype(np.int64)
        return replace(table, start_ns=table.start_ns + drift + offset_ns)

    tables = ("kernels", "launches", "operators", "annotations", "memory", "cpu_operators")
    return replace(trace, **{name: move(getattr(trace, name)) for name in tables})


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("offset_ns", [50_000_000, -50_000_000, 7_200_000_000_000])
def test_no_clock_error_changes_the_answer_by_one_percent(name, offset_ns):
    traces = traces_of(name)
    right = measure_pipeline(build_timeline(traces), 0)
    for wrong in range(len(traces)):
        moved = [shifted(t, offset_ns) if t.rank == wrong else t for t in traces]
        figures = measure_pipeline(build_timeline(moved), 0)
        assert figures.bubble_fraction == pytest.approx(right.bubble_fraction, rel=0.01)
        assert figures.batch_latency_ns == pytest.approx(right.batch_latency_ns, rel=0.01)
        assert figures.schedule == right.schedule


@pytest.mark.parametrize(
    "pattern", ["sglang-tp8/*DECODE*", "hta/*trace_filter__sampled*", "nsys-ai/*"]
)
def test_traces_without_a_pipeline_say_so(public_data, pattern):
    with pytest.raises(NoPipeline, match="no pipeline"):
        build_timeline(read_run(find_run([str(public_data / pattern)])).ranks)
