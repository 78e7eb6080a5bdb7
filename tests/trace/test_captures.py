"""Folders with one capture or many, as the frameworks leave them."""

from __future__ import annotations

import json
import os
import time

import pytest
from support.traces.kineto_events import document, kernel, write

from debubble.errors import RunNotFound
from debubble.trace.captures import group_captures
from debubble.trace.format import Head, TraceFile
from debubble.trace.run import find_run, read_run


def put(folder, name, rank, world=2):
    return write(folder / name, document([kernel()], rank=rank, world=world))


def names(found):
    return [capture.name for capture in found.captures]


def test_a_plain_folder_is_one_capture(tmp_path):
    for rank in (1, 0):
        put(tmp_path, f"rank{rank}.json", rank)
    found = find_run([str(tmp_path)])
    assert len(found.captures) == 1
    assert [file.rank for file in found.capture.files] == [0, 1]


def test_torchtitan_iterations_are_captures_in_numerical_order(tmp_path):
    for iteration in (9, 10, 100):
        for rank in (0, 1):
            put(tmp_path / f"iteration_{iteration}", f"rank{rank}_trace.json", rank)
    found = find_run([str(tmp_path)])
    assert names(found) == ["iteration_9", "iteration_10", "iteration_100"]
    assert found.capture.name == "iteration_100"


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


def test_tensorboard_stamps_split_a_folder_though_hosts_and_processes_differ(tmp_path):
    for second, pids in ((1_700_000_000_000, (11, 12)), (1_700_000_900_000, (11, 12))):
        for rank, pid in enumerate(pids):
            put(tmp_path, f"node{rank}_{pid}.{second + 7 * rank}.pt.trace.json", rank)
    found = find_run([str(tmp_path)])
    assert [len(capture.files) for capture in found.captures] == [2, 2]
    assert "1700000900" in found.capture.files[0].file


def test_restarts_of_a_serving_engine_are_separate_captures(tmp_path):
    for stamp in (1_718_000_000_000_000_000, 1_718_000_500_000_000_000):
        for rank in (0, 1):
            put(
                tmp_path, f"dp0_pp{rank}_tp0_dcp0_ep0_rank{rank}.{stamp + rank}.pt.trace.json", rank
            )
    assert [len(capture.files) for capture in find_run([str(tmp_path)]).captures] == [2, 2]


def test_sglang_stages_of_one_profile_are_separate_captures(tmp_path):
    for stage in ("EXTEND", "DECODE"):
        for rank in (0, 1):
            put(tmp_path, f"1780800270.547418-TP-{rank}-{stage}.trace.json", rank)
    found = find_run([str(tmp_path)])
    assert len(found.captures) == 2
    assert {len(capture.files) for capture in found.captures} == {2}


def test_a_folder_a_rank_is_one_capture(tmp_path):
    for rank in (0, 1):
        put(tmp_path / f"rank_{rank}", "trace.json", rank)
    assert len(find_run([str(tmp_path)]).captures) == 1


def test_a_folder_a_node_is_one_capture(tmp_path):
    for node, ranks in (("alpha", (0, 1)), ("beta", (2, 3))):
        for rank in ranks:
            put(tmp_path / node, f"rank{rank}.json", rank, world=4)
    found = find_run([str(tmp_path)])
    assert len(found.captures) == 1
    assert [file.rank for file in found.capture.files] == [0, 1, 2, 3]


PATTERNS = (
    "trace_%d.json",
    "%d.json",
    "gpu%d.json",
    "worker%d.json",
    "r%d.json",
    "node0_proc%d.json",
    "profile-%d-of-8.json",
    "host_%d_trace.json",
    "gpu%d/trace.json",
    "rank%d.json",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_files_are_joined_by_the_rank_and_world_they_name_inside(pattern, tmp_path):
    for rank in range(8):
        put(tmp_path, pattern % rank, rank, world=8)
    run = read_run(find_run([str(tmp_path)]))
    assert [trace.rank for trace in run.ranks] == list(range(8))
    assert run.missing_ranks == ()
    assert len(run.found.captures) == 1


def test_names_that_say_nothing_at_all_are_joined_in_one_folder(tmp_path):
    for rank, name in enumerate(("alpha", "beta", "gamma")):
        put(tmp_path, f"{name}.json", rank, world=3)
    assert len(find_run([str(tmp_path)]).captures) == 1


def test_numbers_that_count_devices_of_a_host_are_no_ranks(tmp_path):
    for rank in range(8):
        put(tmp_path, f"host{rank // 4}_gpu{rank % 4}.json", rank, world=8)
    assert len(find_run([str(tmp_path)]).captures) == 1


def test_two_captures_in_one_folder_stay_two(tmp_path):
    for step in (10, 20):
        for rank in (0, 1):
            put(tmp_path, f"trace_{rank}_step{step}.json", rank)
    found = find_run([str(tmp_path)])
    assert [[file.rank for file in one.files] for one in found.captures] == [[0, 1], [0, 1]]
    assert all("step20" in file.file for file in found.capture.files)
    assert names(found) == ["trace-step10", "trace-step20"]


def test_captures_of_one_rank_in_folders_of_their_own_stay_apart(tmp_path):
    for number in (0, 1):
        put(tmp_path / f"iteration_{number}", "trace.json", 0)
    assert len(find_run([str(tmp_path)]).captures) == 2


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


def test_a_digest_of_a_trace_with_an_impossible_name_is_named_in_words_that_can_be_printed():
    head = Head(file="runs/\ud800.json", rank=0)
    file = TraceFile(file="runs/rank0.debubble.npz", format="digest", rank=0, head=head)
    assert file.named == "runs/?.json"


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
