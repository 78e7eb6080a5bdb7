"""Whole runs: what is missing is named, and one bad file never stops the others."""

from __future__ import annotations

import os
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import fsspec
import numpy as np
import pytest
from support.traces.kineto_events import document, kernel, send, write
from support.traces.recordings import H200, PUBLIC

from debubble.errors import RunNotFound
from debubble.trace.engine import GivenEngine
from debubble.trace.run import find_run, read_run

PIPELINE = {"pg_name": "9", "pg_desc": "pp", "ranks": [1, 3]}


def read(*places, **options):
    return read_run(find_run([str(place) for place in places]), **options)


def codes(run):
    return [gap.code for gap in run.gaps]


def test_a_recorded_run_reads_whole_and_leaves_other_json_alone():
    run = read(H200 / "fwd_closed_m4")
    assert [trace.rank for trace in run.ranks] == [0, 1, 2, 3]
    assert run.missing_ranks == ()
    assert [Path(file).name for file in run.found.left_alone] == [
        f"truth{r}.json" for r in range(4)
    ]
    assert not run.gaps


def test_globs_and_urls_find_the_same_files():
    folder = H200 / "fwd_closed_m4"
    assert len(read(folder / "rank*.gz").ranks) == 4
    memory = fsspec.filesystem("memory")
    for file in folder.glob("rank*.gz"):
        memory.pipe(f"/listed/run/{file.name}", file.read_bytes())
    assert [trace.rank for trace in read("memory://listed/run").ranks] == [0, 1, 2, 3]
    assert [trace.rank for trace in read("memory://listed/run/rank2*").ranks] == [2]
    assert len(read(f"file://{folder}").ranks) == 4


@pytest.mark.slow
def test_a_process_pool_of_our_own_gives_the_same(monkeypatch):
    alone = read(H200 / "1f1b_p2_m4")
    monkeypatch.setattr("debubble.trace.engine._WORTH_A_POOL_BYTES", 0)
    seen = []
    pooled = read(H200 / "1f1b_p2_m4", on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    for left, right in zip(alone.ranks, pooled.ranks, strict=True):
        assert left.names == right.names
        assert np.array_equal(left.operators.kernel, right.operators.kernel)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rank1.json", b""),
        ("rank1.json", bytes(range(256)) * 10),
        ("rank1.json.gz", b"\x1f\x8b\x08garbage"),
        ("rank1.json", document([], rank=1, world=2)),
    ],
)
def test_one_bad_file_is_a_named_gap_and_the_other_ranks_go_on(tmp_path, name, content):
    write(tmp_path / "rank0.json", document([kernel()], rank=0, world=2))
    write(tmp_path / name, content, packed=False)
    run = read(tmp_path)
    assert [trace.rank for trace in run.ranks] == [0]
    gap = run.gaps[0]
    assert gap.code == "unreadable"
    assert gap.file.endswith(name)
    assert gap.rank == 1
    assert gap.hint
    assert run.missing_ranks == (1,)


def test_a_folder_with_no_traces_says_what_is_there_instead(tmp_path):
    write(tmp_path / "config.json", {"a": 1})
    with pytest.raises(RunNotFound, match="1 JSON file there, none of them a trace"):
        find_run([str(tmp_path)])


def test_an_empty_folder_and_a_wrong_path_are_errors(tmp_path):
    with pytest.raises(RunNotFound, match="no files there"):
        find_run([str(tmp_path)])
    with pytest.raises(RunNotFound, match="no such file or folder"):
        find_run([str(tmp_path / "typo.json")])


def test_a_file_given_by_name_that_is_no_trace_is_an_error(tmp_path):
    path = write(tmp_path / "a.json", {"schema": "1.0", "nodes": []})
    with pytest.raises(RunNotFound, match="execution trace"):
        find_run([path])


def test_a_file_without_a_rank_is_an_error_unless_the_rank_is_given(tmp_path):
    path = write(tmp_path / "trace.json", document([kernel()], rank=None))
    with pytest.raises(RunNotFound, match="rank unknown") as caught:
        read(path)
    assert "rank<N>.json.gz" in caught.value.hint
    assert [trace.rank for trace in read(path, rank=5).ranks] == [5]


def test_a_missing_rank_is_named(tmp_path):
    for rank in (0, 1, 3):
        peer = {0: 1, 1: 2, 3: 2}[rank]
        write(tmp_path / f"rank{rank}.json", document([send(to=peer)], rank=rank, world=4))
    run = read(tmp_path)
    assert run.missing_ranks == (2,)
    assert "missing_ranks" in codes(run)


def test_one_whole_pipeline_of_a_larger_world_is_complete(tmp_path):
    info = {"backend": "nccl", "world_size": 4, "pg_config": [PIPELINE]}
    for rank, peer in ((1, 1), (3, 0)):
        content = document([send(to=peer), kernel()], distributedInfo={**info, "rank": rank})
        write(tmp_path / f"rank{rank}.json", content)
    run = read(tmp_path)
    assert run.missing_ranks == ()
    assert run.world_size == 4
    assert not run.gaps


def test_a_world_without_point_to_point_traffic_wants_every_rank(tmp_path):
    write(tmp_path / "rank1.json", document([kernel()], rank=1, world=3))
    assert read(tmp_path).missing_ranks == (0, 2)


def test_a_cpu_only_rank_among_gpu_ranks_is_named(tmp_path):
    write(tmp_path / "rank0.json", document([kernel()], rank=0, world=2))
    write(tmp_path / "rank1.json", document([send()], rank=1, world=2, deviceProperties=[]))
    [gap] = [gap for gap in read(tmp_path).gaps if gap.code == "no_kernels"]
    assert gap.rank == 1


@pytest.mark.slow
@pytest.mark.usefixtures("public_data")
@pytest.mark.parametrize(
    ("files", "rank", "missing", "expected"),
    [
        ("hta/*trace_filter__sampled*", None, 126, ["missing_ranks"]),
        ("hta/*cpu_only*", None, 299, ["missing_ranks"]),
        ("hta/*rank_non_gpu*", None, 0, []),
        ("hta/*distributed_info_unavailable*", 0, 0, ["no_kernels"]),
        ("hta/*rank_unavailable*", 0, 0, []),
        ("hta/*amd_trace*", 0, 0, []),
        ("hta/*mtia*", None, 0, ["foreign_device"]),
        ("hta/*critical_path*", None, 0, []),
        ("hta/*ns_resolution*", None, 0, []),
        ("sglang-tp8/*DECODE*", None, 6, ["missing_ranks"]),
        ("tracelens/*mi300*", None, 7, ["missing_ranks"]),
        ("tracelens/*vllm*", 0, 0, []),
        ("nsys-ai/*", None, 0, ["rank_assumed"]),
    ],
)
def test_public_runs_say_the_right_thing(files, rank, missing, expected):
    run = read(PUBLIC / files, rank=rank)
    assert codes(run) == expected
    assert len(run.missing_ranks) == missing


def test_a_pipe_among_the_traces_is_named_and_not_waited_for(tmp_path):
    write(tmp_path / "rank0.json", document([kernel()], rank=0))
    os.mkfifo(tmp_path / "rank1.json")
    (tmp_path / "rank2.json").symlink_to("rank2.json")
    run = read(tmp_path)
    assert codes(run) == ["unreadable", "unreadable"]
    assert [gap.rank for gap in run.gaps] == [1, 2]
    assert "symbolic links" in run.gaps[1].message


def test_a_worker_that_dies_is_a_gap_for_each_file_it_took_along(tmp_path):
    for rank in range(2):
        write(tmp_path / f"rank{rank}.json", document([kernel()], rank=rank, world=2))
    with pytest.raises(RunNotFound, match="a worker process died"):
        read(tmp_path, engine=GivenEngine(executor=Dying()))


class Dying(Executor):
    """Takes one order and dies of it."""

    def __init__(self):
        self.alive = True

    def submit(self, *_):
        if not self.alive:
            raise BrokenProcessPool("dead already")
        self.alive = False
        future = Future()
        future.set_exception(BrokenProcessPool("died"))
        return future
