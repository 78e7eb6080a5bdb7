"""Folders with one capture or many, as the frameworks leave them."""

from __future__ import annotations

import json
import os
import time

import pytest
from support.traces.kineto_events import document, kernel, write

from debubble.errors import RunNotFound
from debubble.trace.captures import group_captures
from debubble.trace.format import TraceFile
from debubble.trace.run import find_run, read_run


def put(folder, name, rank, world=2):
    return write(folder / name, document([kernel()], rank=rank, world=world))


def names(found):
    return [capture.name for capture in found.captures]


# Paths of a run's files, by capture and rank; a part that is the same in all is left out of names.
EIGHT = range(8)
LAYOUTS = {
    "a plain folder": [["rank0.json", "rank1.json"]],
    "torchtitan's iterations, in numerical order": [
        [f"iteration_{n}/rank{rank}_trace.json" for rank in (0, 1)] for n in (9, 10, 100)
    ],
    "TensorBoard's stamps, of other hosts and processes": [
        [f"node{rank}_1{rank}.{1_700_000_000_000 + n + 7 * rank}.pt.trace.json" for rank in (0, 1)]
        for n in (0, 900_000)
    ],
    "a serving engine, started again": [
        [f"dp0_pp{r}_tp0_dcp0_ep0_rank{r}.{1_718 * 10**15 + n + r}.pt.trace.json" for r in (0, 1)]
        for n in (0, 5 * 10**11)
    ],
    "SGLang's phases": [
        [f"1780800270.547418-TP-{rank}-{phase}.trace.json" for rank in (0, 1)]
        for phase in ("DECODE", "EXTEND")
    ],
    "a folder a rank": [["rank_0/trace.json", "rank_1/trace.json"]],
    "a folder a node": [
        ["alpha/rank0.json", "alpha/rank1.json", "beta/rank2.json", "beta/rank3.json"]
    ],
    "names that say nothing": [["alpha.json", "beta.json", "gamma.json"]],
    "numbers that count devices of a host": [
        [f"host{rank // 4}_gpu{rank % 4}.json" for rank in EIGHT]
    ],
    "two captures in a folder": [
        [f"trace_{rank}_step{step}.json" for rank in (0, 1)] for step in (10, 20)
    ],
    "captures of one rank": [["iteration_0/trace.json"], ["iteration_1/trace.json"]],
    **{
        pattern: [[pattern % rank for rank in EIGHT]]
        for pattern in (
            *("trace_%d.json", "%d.json", "gpu%d.json", "worker%d.json", "r%d.json"),
            *("node0_proc%d.json", "profile-%d-of-8.json", "host_%d_trace.json"),
            *("gpu%d/trace.json", "rank%d.json"),
        )
    },
}


@pytest.mark.parametrize("captures", LAYOUTS.values(), ids=LAYOUTS)
def test_files_that_were_recorded_together_are_one_capture(captures, tmp_path):
    for files in reversed(captures):
        for rank, file in enumerate(files):
            put(tmp_path, file, rank, world=len(files))
    found = find_run([str(tmp_path)])
    expected = [[str(tmp_path / file) for file in files] for files in captures]
    assert [[file.file for file in capture.files] for capture in found.captures] == expected
    run = read_run(found)
    assert [trace.file for trace in run.ranks] == expected[-1]
    assert run.missing_ranks == ()


def test_captures_are_named_by_what_tells_them_apart(tmp_path):
    for step in (10, 20):
        for rank in (0, 1):
            put(tmp_path, f"trace_{rank}_step{step}.json", rank)
    assert names(find_run([str(tmp_path)])) == ["trace-step10", "trace-step20"]
    assert names(find_run([str(tmp_path / "*step10.json")])) == ["trace-step10"]


def test_the_newest_complete_capture_is_taken_and_the_newer_one_named(tmp_path):
    for iteration, ranks in ((10, (0, 1)), (20, (0, 1)), (30, (0,))):
        for rank in ranks:
            put(tmp_path / f"iteration_{iteration}", f"rank{rank}.json", rank)
    found = find_run([str(tmp_path)])
    assert found.capture.name == "iteration_20"
    assert [gap.code for gap in found.gaps] == ["newer_incomplete"]
    assert "iteration_30" in found.gaps[0].message


def test_a_capture_can_be_asked_for(tmp_path):
    for iteration in (10, 20):
        put(tmp_path / f"iteration_{iteration}", "rank0.json", 0, world=1)
    assert find_run([str(tmp_path)], capture="iteration_10").capture.name == "iteration_10"
    with pytest.raises(RunNotFound, match="no capture") as caught:
        find_run([str(tmp_path)], capture="iteration_99")
    assert "iteration_20" in caught.value.hint
    with pytest.raises(RunNotFound, match="several"):
        find_run([str(tmp_path)], capture="iteration")


def test_files_named_one_by_one_belong_together(tmp_path):
    files = [
        put(tmp_path / place, name, rank)
        for rank, (place, name) in enumerate([("a", "x.json"), ("b", "y.json")])
    ]
    assert len(find_run(files).captures) == 1


def test_two_files_of_one_rank_are_both_named_and_neither_is_read(tmp_path):
    put(tmp_path, "rank0.json", 0)
    put(tmp_path, "rank0.json.gz", 0)
    put(tmp_path, "rank1.json", 1)
    run = read_run(find_run([str(tmp_path)]))
    assert [trace.rank for trace in run.ranks] == [1]
    [gap] = [gap for gap in run.gaps if gap.code == "duplicate_rank"]
    assert "rank0.json," in gap.message
    assert "rank0.json.gz" in gap.message
    assert gap.rank == 0
    assert gap.hint


def test_a_rank_found_twice_only_after_reading_is_a_duplicate_too(tmp_path):
    for name in ("x", "y"):
        content = {"schemaVersion": 1, "traceEvents": [kernel()], "distributedInfo": {"rank": 0}}
        write(tmp_path / f"{name}.json", content)
    with pytest.raises(RunNotFound, match="same rank"):
        read_run(find_run([str(tmp_path / "x.json"), str(tmp_path / "y.json")]))


@pytest.mark.slow
def test_twenty_thousand_captures_are_sorted_in_no_time():
    files = [
        TraceFile(file=f"it_{i // 2}/rank{i % 2}.json", format="kineto", rank=i % 2, world_size=4)
        for i in range(20_000)
    ]
    files += [
        TraceFile(file=f"x.{1_700_000_000_000}.{i}.json", format="kineto", rank=i)
        for i in range(20_000)
    ]
    began = time.process_time()
    captures = group_captures(files)
    assert len(captures) > 10_000
    assert time.process_time() - began < 60  # it was an hour


def at(second, base_s=0):
    """A trace whose first event began in that second."""
    event = {"ph": "X", "cat": "cpu_op", "name": "a", "ts": (second - base_s) * 1e6, "dur": 1.0}
    base = {"baseTimeNanoseconds": base_s * 10**9} if base_s else {}
    return json.dumps({"schemaVersion": 1, **base, "traceEvents": [event]})


@pytest.mark.parametrize("base_s", [0, 1_790_000_000])
def test_the_newest_capture_is_newest_by_time_and_not_by_name(base_s, tmp_path):
    for folder, second in (("z_older", 1_790_000_100), ("a_newer", 1_790_000_200)):
        (tmp_path / folder).mkdir()
        for rank in range(2):
            (tmp_path / folder / f"rank{rank}.json").write_text(at(second + rank, base_s))
    found = find_run([str(tmp_path)])
    assert [capture.name for capture in found.captures] == ["z_older", "a_newer"]
    assert found.capture.name == "a_newer"


def test_where_traces_tell_no_time_the_newest_is_the_one_written_last(tmp_path):
    for folder, written in (("z_older", 100), ("a_newer", 200)):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "rank0.json"
        file.write_text('{"traceEvents": []}')
        os.utime(file, (written, written))
    assert find_run([str(tmp_path)]).capture.name == "a_newer"


def test_sglang_names_the_rank_of_each_axis(tmp_path):
    """As its source writes them; not seen on a recording. The world's rank is in the trace."""
    for stage in ("EXTEND", "DECODE"):
        for rank in range(4):
            file = f"1780800270.5-TP-{rank % 2}-PP-{rank // 2}-{stage}.trace.json"
            put(tmp_path, file, rank, world=4)
    found = find_run([str(tmp_path)])
    assert sorted(len(capture.files) for capture in found.captures) == [4, 4]
    run = read_run(found)
    assert [trace.rank for trace in run.ranks] == [0, 1, 2, 3]
    assert run.missing_ranks == ()
