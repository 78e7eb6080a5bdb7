"""Digests in a run: where they are kept, which of two is read, and that nothing else changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fsspec
import pytest
from support.traces.kineto_events import document, kernel, launch, write
from support.traces.rank_traces import assert_same
from support.traces.recordings import H200

from debubble.errors import Code, RunNotFound
from debubble.trace.captures import recognise
from debubble.trace.digest import DigestPlace, place_digests, unpack_digest
from debubble.trace.run import find_run, read_run
from debubble.trace.sidecar import SCHEMA

BESIDE = DigestPlace(place="beside")
TABLE = ["step,stage,microbatch,op,start_us,duration_us", "0,0,0,F,0,10", "0,1,0,F,10,10"]


def read(*places, **options):
    return read_run(find_run([str(place) for place in places]), **options)


def codes(run):
    return [gap.code for gap in run.gaps]


def used(run):
    return [Path(known.file).name for known in run.found.capture.files]


@pytest.fixture
def traces(tmp_path):
    """Two ranks of a run, in a folder of its own."""
    folder = tmp_path / "run"
    for rank in (0, 1):
        events = [launch(), kernel(ts=10.0 + rank)]
        write(folder / f"rank{rank}.json.gz", document(events, rank=rank, world=2))
    return folder


def sidecar(folder, rank, **said):
    content = {"schema": SCHEMA, "rank": rank, "workload": said}
    (folder / f"rank{rank}.debubble.json").write_text(json.dumps(content))


def test_a_digest_is_known_by_its_content_and_by_the_name_of_its_trace(traces):
    read(traces, digests=BESIDE)
    (traces / "rank1.debubble.npz").rename(traces / "whatever")
    known = recognise(str(traces / "whatever"))
    assert (known.format, known.rank, known.world_size) == ("digest", 1, 2)
    assert known.named == str(traces / "rank1.json.gz")


def test_a_digest_beside_its_trace_is_read_in_its_stead(traces):
    before = read(traces, digests=BESIDE)
    after = read(traces)
    assert used(after) == ["rank0.debubble.npz", "rank1.debubble.npz"]
    assert after.gaps == before.gaps
    for left, right in zip(before.ranks, after.ranks, strict=True):
        assert_same(left, right)
    assert [capture.name for capture in after.found.captures] == ["run"]


def test_a_trace_that_was_recorded_again_goes_before_its_old_digest(traces):
    read(traces, digests=BESIDE)
    events = [launch(), kernel(ts=99.0)]
    write(traces / "rank1.json.gz", document(events, rank=1, world=2))
    run = read(traces)
    assert used(run) == ["rank0.debubble.npz", "rank1.json.gz"]
    assert [gap.code for gap in run.gaps] == [Code.DIGEST_DIFFERS]
    assert run.gaps[0].file == str(traces / "rank1.debubble.npz")
    assert codes(read(traces, digests=BESIDE)) == [Code.DIGEST_DIFFERS]
    assert codes(read(traces)) == []


def test_a_damaged_digest_does_not_stand_in_the_way_of_its_trace(traces):
    read(traces, digests=BESIDE)
    for rank, keep in ((0, 40), (1, -30)):
        path = traces / f"rank{rank}.debubble.npz"
        path.write_bytes(path.read_bytes()[:keep])
    run = read(traces)
    assert [trace.rank for trace in run.ranks] == [0, 1]
    assert codes(run) == [Code.UNREADABLE, Code.UNREADABLE]
    assert {gap.rank for gap in run.gaps} == {0, 1}


@pytest.mark.parametrize(
    ("files", "target"),
    [
        (["t/rank_0/trace.json", "t/rank_1/trace.json"], "k/t/rank_0/trace.debubble.npz"),
        (["t/h_1.1700000000000.pt.trace.json"], "k/t/h_1.1700000000000.debubble.npz"),
        (["s3://b/t/rank0.json.gz", "s3://b/t/rank1.json.gz"], "k/t/rank0.debubble.npz"),
    ],
)
def test_names_are_those_of_the_traces(files, target):
    assert place_digests("k", files, files).target(files[0]) == target
    assert BESIDE.target("/a/rank0.json") == "/a/rank0.debubble.npz"


def test_in_object_storage_too_a_digest_beside_its_trace_is_read(traces):
    memory = fsspec.filesystem("memory")
    for trace in traces.iterdir():
        memory.pipe(f"/beside/run/{trace.name}", trace.read_bytes())
    place = DigestPlace(place="memory://beside/kept", root=str(traces), run="run")
    assert_same(read(traces, digests=place).ranks[1], read("memory://beside/kept/run").ranks[1])
    read("memory://beside/run", digests=BESIDE)
    run = read("memory://beside/run")
    assert used(run) == ["rank0.debubble.npz", "rank1.debubble.npz"]
    write(traces / "rank1.json.gz", document([kernel(ts=99.0)], rank=1, world=2))
    memory.pipe("/beside/run/rank1.json.gz", (traces / "rank1.json.gz").read_bytes())
    assert codes(read("memory://beside/run")) == [Code.DIGEST_DIFFERS]
    memory.rm("/beside", recursive=True)


def test_a_trace_with_the_name_of_a_digest_is_still_a_trace(traces):
    (traces / "rank0.json.gz").rename(traces / "rank0.debubble.npz")
    assert [trace.rank for trace in read(traces).ranks] == [0, 1]


def test_digests_are_copied_to_another_place(traces, tmp_path):
    read(traces, digests=BESIDE)
    for trace in traces.glob("*.gz"):
        trace.unlink()
    read(traces, digests=DigestPlace(place=str(tmp_path / "kept"), root=str(traces), run="run"))
    for rank in (0, 1):
        name = f"rank{rank}.debubble.npz"
        assert (tmp_path / "kept/run" / name).read_bytes() == (traces / name).read_bytes()


def test_what_else_has_the_name_is_left_alone(traces):
    (traces / "rank0.debubble.npz").write_text("mine")
    run = read(traces / "rank0.json.gz", digests=BESIDE)
    assert Code.DIGEST_NOT_WRITTEN in codes(run)
    assert (traces / "rank0.debubble.npz").read_text() == "mine"


def test_the_digest_of_another_trace_is_left_alone(traces, tmp_path):
    place = DigestPlace(place=str(tmp_path / "kept"), root=str(traces), run="run")
    read(traces, digests=place)
    again = shutil.copytree(traces, tmp_path / "again")
    write(again / "rank0.json.gz", document([kernel(ts=5.0)], rank=0, world=2))
    run = read(again, digests=DigestPlace(place=place.place, root=str(again), run="run"))
    assert [(gap.code, gap.rank) for gap in run.gaps] == [(Code.DIGEST_NOT_WRITTEN, 0)]
    assert str(traces / "rank0.json.gz") in run.gaps[0].message


def test_a_digest_tells_what_the_sidecar_told_and_a_sidecar_beside_it_goes_first(traces):
    sidecar(traces, 0, tokens=4096)
    before = read(traces, digests=BESIDE)
    (traces / "rank0.json.gz").unlink()
    (traces / "rank0.debubble.json").unlink()
    after = read(traces)
    assert after.sidecars == before.sidecars
    assert [said.tokens for said in after.sidecars] == [4096]
    sidecar(traces, 0, tokens=8192)
    assert [said.tokens for said in read(traces).sidecars] == [8192]


def test_a_rank_that_only_the_folder_tells_is_told_of_the_digest_too(tmp_path, monkeypatch):
    for rank in (0, 1):
        folder = tmp_path / f"rank_{rank}"
        write(folder / "trace.json", document([kernel()], rank=None))
        monkeypatch.chdir(folder)
        with pytest.raises(RunNotFound, match="rank unknown"):
            read("trace.json", digests=BESIDE)
    for trace in tmp_path.rglob("*.json"):
        trace.unlink()
    assert [trace.rank for trace in read(tmp_path).ranks] == [0, 1]


def test_an_op_table_has_one_digest(tmp_path):
    (tmp_path / "ops.csv").write_text("\n".join(TABLE))
    (before,) = read(tmp_path, digests=BESIDE).tables
    for with_trace in (True, False):
        run = read(tmp_path)
        assert used(run) == ["ops.debubble.npz"]
        assert run.gaps == ()
        assert_same(before, run.tables[0])
        if with_trace:
            (tmp_path / "ops.csv").unlink()


def test_an_export_of_several_ranks_has_one_digest(public_data, tmp_path):
    export = tmp_path / "two.sqlite"
    shutil.copy(public_data / "nsys-ai" / "mfu_2gpu_before.sqlite", export)
    before = read(export, digests=BESIDE)
    after = read(tmp_path)
    assert used(after) == ["two.debubble.npz"]
    for left, right in zip(before.ranks, after.ranks, strict=True):
        assert_same(left, right)


def test_a_recorded_trace_comes_back_to_the_last_bit(tmp_path):
    folder = shutil.copytree(H200 / "1f1b_p2_m4", tmp_path / "run")
    run = read(folder, digests=BESIDE)
    for trace in run.ranks:
        (back,) = unpack_digest((folder / f"rank{trace.rank}.debubble.npz").read_bytes())
        assert_same(trace, back)
        size = (folder / f"rank{trace.rank}.debubble.npz").stat().st_size
        assert size < 0.02 * trace.inflated_bytes


def test_an_edit_of_the_same_length_is_not_answered_from_the_digest(tmp_path):
    calls = {**launch(), "name": "cudaGraphLaunch"}
    events = [calls, *(kernel(ts=10.0 + i, dur=0.5) for i in range(3000))]
    plain = tmp_path / "rank0.json"
    write(plain, document(events))
    read(tmp_path, digests=BESIDE)
    assert used(read(tmp_path)) == ["rank0.debubble.npz"]
    plain.write_bytes(plain.read_bytes().replace(b'"ts": 20.0', b'"ts": 21.0', 1))
    again = read(tmp_path)
    assert used(again) == ["rank0.json"]
    assert codes(again) == [Code.DIGEST_DIFFERS]
