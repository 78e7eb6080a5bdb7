"""What a meter writes is read: peers, clocks that differ, steps that overlap, what lies beside."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import fsspec
import pytest
from support.services.watch_service import Watching, write_config

import debubble
from debubble.annexes.meter.trigger import LocalServer, own_tables
from debubble.annexes.watch.config import Source
from debubble.annexes.watch.sources import Scanner, fetch_tables
from debubble.capture.fetch import NoAnswer
from debubble.trace.source import DEFAULT_LIMITS

HEADER = "step,pipeline,stage,microbatch,op,start_ns,duration_ns,rank,bytes,peer,memory_bytes,host"
EPOCH = 1_790_000_000_000_000_000
MS = 1_000_000
STEPS = 5


def write_run(folder, *, ahead_ms=0, step_ms=100):
    """Write two ranks, two microbatches: F 10, B 20, wires of 1 ms; rank 1's clock is ahead."""
    rows = {0: [], 1: []}

    def row(rank, step, op, start, length, microbatch=-1, peer=-1):
        clock = EPOCH + (ahead_ms * MS if rank else 0) + step * step_ms * MS
        size = 4096 if peer >= 0 else -1
        rows[rank].append(
            f"{step},0,{rank},{microbatch},{op},{clock + int(start * MS)},{int(length * MS)},"
            f"{rank},{size},{peer},-1,host{rank}"
        )

    for step in range(STEPS):
        for number, (ready, back) in enumerate([(10, 42), (20, 73)]):
            row(0, step, "F", 10 * number, 10, number)
            row(0, step, "forward-send", ready, 0.1, peer=1)
            begins = 11 if number == 0 else 42
            row(
                1,
                step,
                "forward-recv",
                0 if number == 0 else 41.5,
                begins - (41.5 * number),
                peer=0,
            )
            row(1, step, "F", begins, 10, number)
            row(1, step, "B", begins + 10, 20, number)
            row(1, step, "backward-send", begins + 30, 0.1, peer=0)
            row(
                0,
                step,
                "backward-recv",
                20.5 if number == 0 else 62.5,
                back - (20.5, 62.5)[number],
                peer=1,
            )
            row(0, step, "B", back, 20, number)
    folder.mkdir(parents=True)
    for rank, lines in rows.items():
        (folder / f"rank{rank}.csv").write_text("\n".join((HEADER, *lines, "")))
        (folder / f"rank{rank}.csv.debubble.json").write_text(
            json.dumps(
                {
                    "schema": "debubble.sidecar/1",
                    "rank": rank,
                    "world_size": 2,
                    "pipeline": {"schedule": "1f1b", "microbatches": 2},
                    "workload": {"tokens": 512},
                    "steps": {"after_s": [0.1] * STEPS},
                }
            )
        )
    return folder


def bubble(folder):
    return debubble.analyse(str(folder)).pipeline.bubble_fraction


def test_clocks_of_two_hosts_are_laid_together_by_the_messages(tmp_path):
    right = write_run(tmp_path / "right", step_ms=200)
    wrong = write_run(tmp_path / "wrong", step_ms=200, ahead_ms=5000)
    assert bubble(wrong) == pytest.approx(bubble(right), abs=0.02)
    offsets = [line.clock_offset_ns for line in debubble.analyse(str(wrong)).timeline.ranks]
    assert offsets[1] - offsets[0] == pytest.approx(-5000 * MS, abs=3 * MS)


def test_steps_that_overlap_keep_their_times(tmp_path):
    """The first rank begins the next step before the last one has ended this."""
    run = debubble.analyse(str(write_run(tmp_path / "run", step_ms=85)))
    passes = run.timeline.passes
    first = [int(passes.start_ns[passes.step == step].min()) for step in range(STEPS)]
    assert [after - before for before, after in pairwise(first)] == [85 * MS] * 4


def test_what_lies_beside_the_tables_is_heard(tmp_path):
    run = debubble.analyse(str(write_run(tmp_path / "run", step_ms=200)))
    assert run.job.tokens == 512
    assert run.job.schedule == "1f1b"
    assert not [gap for gap in run.warnings if "sidecar" in str(gap)]


def test_watch_takes_a_segment_in_as_soon_as_all_ranks_have_written(tmp_path):
    root = tmp_path / "meter"
    write_run(root / "20260131-235959-step000000020")
    (root / "rank0.prom").write_text("debubble_meter_steps_total 3\n")
    source = Source(name="job", folder=str(root), settle_s=3600.0)
    scanner = Scanner(source, DEFAULT_LIMITS, lambda: 0.0)
    (ready,) = scanner.scan(())
    assert [Path(file).name for file in ready.files] == ["rank0.csv", "rank1.csv"]
    (root / "20260131-235959-step000000020" / "rank1.csv").unlink()
    assert Scanner(source, DEFAULT_LIMITS, lambda: 0.0).scan(()) == ()


def test_watch_takes_a_segment_from_an_object_store_with_what_lies_beside_it(tmp_path):
    local = write_run(tmp_path / "20260131-235959-step000000020")
    store = fsspec.filesystem("memory")
    try:
        for file in local.iterdir():
            store.pipe_file(f"/metered/job/{local.name}/{file.name}", file.read_bytes())
        source = Source(name="job", folder="memory://metered/job", settle_s=3600.0)
        (ready,) = Scanner(source, DEFAULT_LIMITS, lambda: 0.0).scan(())
        run = debubble.analyse(list(ready.files))
        assert run.pipeline.bubble_fraction == bubble(local)
        assert run.job.tokens == 512
        store.rm_file(f"/metered/job/{local.name}/rank1.csv")
        assert Scanner(source, DEFAULT_LIMITS, lambda: 0.0).scan(()) == ()
    finally:
        store.rm("/metered", recursive=True)


SEGMENT = "20260131-235959-step000000040"


@pytest.fixture
def meters(tmp_path):
    """Serve the tables of two metered ranks; yields their folder and their addresses."""
    out = tmp_path / "of the job"
    write_run(out / SEGMENT)
    servers = [
        LocalServer(0, str, lambda: None, lambda: None, lambda rank=rank: own_tables(out, rank))
        for rank in range(2)
    ]
    yield out, [f"http://127.0.0.1:{server.port}/" for server in servers]
    for server in servers:
        server.close()


def test_tables_are_fetched_from_metered_ranks_once_and_are_a_capture_when_all_have(
    tmp_path, meters
):
    out, addresses = meters
    source = Source(name="s", folder=str(tmp_path / "fetched"), settle_s=1e9, poll_s=1.0)
    Path(source.folder).mkdir()
    scanner = Scanner(source, DEFAULT_LIMITS, lambda: 0.0)
    seen = [set(), set()]
    assert fetch_tables(source, addresses[0], seen[0]) == 1
    assert scanner.scan(()) == (), "the other rank's is not there yet"
    assert fetch_tables(source, addresses[1], seen[1]) == 1
    (ready,) = scanner.scan(())
    assert bubble(Path(ready.files[0]).parent) == bubble(out / SEGMENT)
    assert [fetch_tables(source, *both) for both in zip(addresses, seen, strict=True)] == [0, 0]
    # A service that was started anew fetches all again, and knows it for what it was.
    assert [fetch_tables(source, address, set()) for address in addresses] == [1, 1]
    assert scanner.scan({ready.key}) == ()


def test_a_name_that_leads_elsewhere_is_not_written(tmp_path, monkeypatch):
    names = ["../../x.csv", "/etc/rank0.csv", f"{SEGMENT}/../rank0.csv", f"{SEGMENT}/rank0.csv"]
    listed = json.dumps([{"name": name, "modified_ns": 5} for name in names]).encode()
    monkeypatch.setattr(
        "debubble.annexes.watch.sources._ask",
        lambda url: listed if url.endswith("/tables") else b"x",
    )
    source = Source(name="s", folder=str(tmp_path / "fetched"))
    assert fetch_tables(source, "http://127.0.0.1:1", set()) == 1
    files = [file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()]
    assert files == [Path("fetched", SEGMENT, "rank0.csv")]


def test_a_meter_that_is_away_is_said(tmp_path, meters):
    source = Source(name="s", folder=str(tmp_path))
    with pytest.raises(NoAnswer, match="no meter answers"):
        fetch_tables(source, f"{meters[1][0]}elsewhere", set())
    with pytest.raises(NoAnswer):
        fetch_tables(source, "http://127.0.0.1:1", set())


@pytest.mark.slow
def test_a_service_fetches_tables_from_metered_ranks_and_analyses_them(tmp_path, meters):
    folder = tmp_path / "fetched"
    folder.mkdir()
    source = (
        f'[[source]]\nname = "t"\nfolder = "{folder}"\nsettle = "1h"\npoll = "100ms"\n'
        f"meters = {json.dumps([*meters[1], 'http://127.0.0.1:1'])}"
    )
    with Watching(write_config(tmp_path, sources=source)) as service:
        service.wait_for("meter_away")
        service.wait_for("analysed")
        shown = service.ask_until("/api/pipelines", lambda data: data["pipelines"][0]["latest"])
    latest = shown["pipelines"][0]["latest"]
    assert latest["capture"] == f"{SEGMENT}/rank0.csv"
    assert latest["numbers"]["bubble_fraction"] == pytest.approx(bubble(meters[0] / SEGMENT))
