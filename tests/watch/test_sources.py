"""A capture is taken once nobody writes to it any more, and only once."""

from __future__ import annotations

import json
import shutil

import fsspec
import pytest
from support.traces.recordings import H200

from debubble.annexes.watch.config import Source
from debubble.annexes.watch.sources import Scanner, remove_capture
from debubble.errors import RunNotFound
from debubble.trace.digest import DigestPlace
from debubble.trace.run import find_run, read_run

RUN = H200 / "1f1b_p2_m4"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def scanner(folder, clock, **more):
    source = Source(name="s", folder=str(folder), settle_s=10.0, poll_s=1.0, keep=None, **more)
    return Scanner(source, clock)


def place(folder, *ranks):
    folder.mkdir(exist_ok=True, parents=True)
    for rank in ranks:
        shutil.copy(RUN / f"rank{rank}.json.gz", folder)


def test_a_capture_is_ready_once_nothing_changed_for_a_while(tmp_path, clock):
    one = scanner(tmp_path, clock)
    place(tmp_path / "a", 0)
    assert one.scan(()) == ()
    clock.now = 9.0
    place(tmp_path / "a", 1)
    assert one.scan(()) == ()
    clock.now = 18.0
    assert one.scan(()) == ()
    clock.now = 19.0
    (ready,) = one.scan(())
    assert [file.rpartition("/")[2] for file in ready.files] == ["rank0.json.gz", "rank1.json.gz"]


def test_sidecars_that_tell_all_ranks_are_there_need_no_wait(tmp_path, clock):
    one = scanner(tmp_path, clock)
    place(tmp_path / "a", 0, 1)
    for rank in range(2):
        assert one.scan(()) == ()
        said = {"schema": "debubble.sidecar/1", "rank": rank, "world_size": 2}
        (tmp_path / "a" / f"rank{rank}.debubble.json").write_text(json.dumps(said))
    assert len(one.scan(())) == 1


def test_what_is_claimed_is_not_found_again_and_what_is_replaced_is(tmp_path, clock):
    one = scanner(tmp_path, clock)
    place(tmp_path / "a", 0, 1)
    one.scan(())
    clock.now = 10.0
    (ready,) = one.scan(())
    assert one.scan({ready.key}) == ()
    (tmp_path / "a" / "rank0.json.gz").touch()
    one.scan({ready.key})
    clock.now = 20.0
    (again,) = one.scan({ready.key})
    assert again.key != ready.key


def test_a_damaged_trace_is_a_capture_too_beside_its_ranks(tmp_path, clock):
    one = scanner(tmp_path, clock)
    place(tmp_path / "a", 0)
    (tmp_path / "a" / "rank1.json.gz").write_bytes(b"")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "trace.json.gz").write_bytes(b"\x00garbage")
    one.scan(())
    clock.now = 10.0
    assert sorted(len(ready.files) for ready in one.scan(())) == [1, 2]


def test_prefixes_of_object_stores_are_watched_alike(clock):
    store = fsspec.filesystem("memory")
    try:
        for rank in range(2):
            content = (RUN / f"rank{rank}.json.gz").read_bytes()
            store.pipe_file(f"/bucket/a/rank{rank}.json.gz", content)
        one = scanner("memory://bucket", clock)
        one.scan(())
        clock.now = 10.0
        (ready,) = one.scan(())
        assert len(ready.files) == 2
        remove_capture(one.source, ready.files)
        assert store.find("/bucket") == []
    finally:
        store.rm("/bucket", recursive=True) if store.exists("/bucket") else None


def test_a_folder_that_is_away_is_said(tmp_path, clock):
    with pytest.raises(RunNotFound, match="no such folder"):
        scanner(tmp_path / "none", clock).scan(())


def test_pruning_removes_traces_and_sidecars_of_the_source_alone(tmp_path):
    source = Source(name="s", folder=str(tmp_path / "t"), settle_s=1, poll_s=1, keep=0)
    place(tmp_path / "t" / "a", 0)
    (tmp_path / "t" / "a" / "rank0.debubble.json").write_text("{}")
    other = tmp_path / "other.json"
    other.write_text("{}")
    remove_capture(source, [str(tmp_path / "t" / "a" / "rank0.json.gz"), str(other)])
    assert other.exists()
    assert list((tmp_path / "t").iterdir()) == []


def digest(folder):
    read_run(find_run([str(folder)]), digests=DigestPlace(place="beside"))


def names(ready):
    return [file.rpartition("/")[2] for file in ready.files]


def test_digests_alone_are_a_capture_unless_they_are_the_services_own(tmp_path, clock):
    place(tmp_path / "a", 0, 1)
    digest(tmp_path / "a")
    for trace in (tmp_path / "a").glob("*.gz"):
        trace.unlink()
    others, own = scanner(tmp_path, clock), scanner(tmp_path, clock, digests="beside")
    inside = scanner(tmp_path, clock, digests=str(tmp_path / "a"))
    for one in (others, own, inside):
        one.scan(())
    clock.now = 10.0
    (ready,) = others.scan(())
    assert names(ready) == ["rank0.debubble.npz", "rank1.debubble.npz"]
    assert own.scan(()) == inside.scan(()) == ()


def test_captures_that_were_moved_away_and_left_a_link_stay(tmp_path):
    archive = tmp_path / "archive" / "a"
    archive.mkdir(parents=True)
    (archive / "rank0.json.gz").write_bytes(b"dear")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a").symlink_to(archive)
    source = Source(name="job", folder=str(tmp_path / "t"))
    beside = f"{tmp_path}/t/../archive/a/rank0.json.gz"
    remove_capture(source, [str(tmp_path / "t" / "a" / "rank0.json.gz"), beside])
    assert (archive / "rank0.json.gz").read_bytes() == b"dear"
    assert (tmp_path / "t" / "a").is_symlink()
