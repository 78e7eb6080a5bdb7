"""Raw traces go once their digests are kept, and not before."""

from __future__ import annotations

import shutil

import pytest
from support.measurements import sampled
from support.services.watch_service import analysis
from support.traces.recordings import H200

from debubble.annexes.watch.config import Source
from debubble.annexes.watch.journal import Journal
from debubble.annexes.watch.sources import prune
from debubble.measure.store import Store


@pytest.fixture
def journal(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/history.db")
    yield Journal(store)
    store.close()


def stored(journal, folder):
    """Put a capture there that was analysed before anybody kept digests."""
    shutil.copytree(H200 / "1f1b_p2_m4", folder, ignore=shutil.ignore_patterns("truth*"))
    files = tuple(sorted(map(str, folder.iterdir())))
    claim = journal.claim("s", "a", files, now_s=1.0)
    journal.finish(claim, analysis(sampled([0.1])), now_s=2.0, follow=lambda *_: None)


def source(folder, **more):
    return Source(name="s", folder=str(folder), settle_s=1, poll_s=1, keep=0, **more)


def test_digests_that_are_missing_are_made_before_the_traces_go(journal, tmp_path):
    stored(journal, tmp_path / "t" / "a")
    kept = tmp_path / "kept"
    assert prune(source(tmp_path / "t", digests=str(kept)), journal) == 1
    assert list((tmp_path / "t").iterdir()) == []
    assert len(list((kept / "s" / "a").glob("*.debubble.npz"))) == 2


def test_traces_stay_where_their_digests_cannot_be_written(journal, tmp_path, capsys):
    stored(journal, tmp_path / "t" / "a")
    (tmp_path / "kept").write_text("a file")
    place = str(tmp_path / "kept")
    assert prune(source(tmp_path / "t", digests=place), journal) == 0
    assert len(list((tmp_path / "t" / "a").iterdir())) == 2
    assert "not_pruned" in capsys.readouterr().err


def test_what_cannot_be_read_goes_without_a_digest(journal, tmp_path):
    stored(journal, tmp_path / "t" / "a")
    (tmp_path / "t" / "a" / "rank1.json.gz").write_bytes(b"no trace")
    assert prune(source(tmp_path / "t", digests="beside"), journal) == 1
    assert [path.name for path in (tmp_path / "t" / "a").iterdir()] == ["rank0.debubble.npz"]
