"""The history: what was acknowledged is there, whoever is killed."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.measurements import sampled

from debubble.errors import Code, MissingExtra, StoreError
from debubble.measure.store import Store


@pytest.fixture
def store(url):
    opened = Store(url)
    yield opened
    opened.close()


def run_by_hand(url, *statements):
    """Do to a store what no debubble would."""
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def test_what_is_kept_comes_back_whole(store):
    kept = sampled([0.1, 0.2], step_times=[0.2, None], tokens=4096)
    store.add("base", kept, now_s=12.5, tags={"commit": "abc"})
    (record,) = store.named("base")
    assert record.measurement == kept
    assert (record.created_s, record.tags) == (12.5, {"commit": "abc"})


def test_pruning_keeps_the_newest_of_each_name(store):
    for number, name in enumerate(["a", "b", "a", "a"]):
        store.add(name, sampled([0.1]), now_s=number, tags={"t": name})
    assert store.prune(keep=1) == 2
    assert [(one.name, one.created_s) for one in store.records()] == [("b", 1.0), ("a", 3.0)]
    assert store.prune(keep=0, name="a") == 1
    assert [one.name for one in store.records()] == ["b"]


def test_nobody_at_the_address_is_an_error_without_the_password():
    with pytest.raises(StoreError, match="refused") as caught:
        Store("postgresql://me:secret@127.0.0.1:1/history")
    assert "secret" not in str(caught.value)
    assert "is the server up" in caught.value.hint


def test_a_file_that_is_something_else_is_named(tmp_path):
    (tmp_path / "notes.db").write_text("no database, only words\n" * 100, "utf-8")
    with pytest.raises(StoreError, match=r"notes\.db: file is not a database"):
        Store(f"sqlite:///{tmp_path / 'notes.db'}")


def test_without_the_extra_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    monkeypatch.delitem(sys.modules, "debubble.measure.store")
    with pytest.raises(MissingExtra) as caught:
        importlib.import_module("debubble.measure.store")
    assert caught.value.hint == "pip install 'debubble[store]'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writers", "count"), [(3, 15), pytest.param(8, 500, marks=pytest.mark.accuracy, id="all")]
)
def test_what_was_acknowledged_is_there_whoever_is_killed(writers, count, url):
    script = Path(__file__).parents[1] / "support" / "jobs" / "store_writer.py"
    rng = random.Random(4)  # noqa: S311 (no secret)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), url, f"writer {number}", str(count)],
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        for number in range(writers)
    ]
    # Those that are killed first are read first, so that all are killed in the middle of it.
    until = [rng.randrange(1, count) if number % 2 == 0 else count for number in range(writers)]
    acknowledged = []
    for number in sorted(range(writers), key=until.__getitem__):
        process = processes[number]
        said = [process.stdout.readline().strip() for _ in range(until[number])]
        if until[number] < count:
            process.kill()
        said += process.stdout.read().split()
        process.stdout.close()
        process.wait()
        acknowledged += [(f"writer {number}", line) for line in said if line]
    store = Store(url)
    kept = {(one.name, one.tags["number"]) for one in store.records()}
    if url.startswith("sqlite"):
        with store.transaction() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar_one() == "ok"
    store.close()
    assert len(acknowledged) >= sum(until)
    assert set(acknowledged) <= kept


def test_a_damaged_record_is_named_and_hides_nobody(url, store):
    for name in ("a", "a", "b"):
        store.add(name, sampled([0.1]), now_s=1.0, tags={})
    run_by_hand(url, "UPDATE measurements SET data='{\"kind\": ' WHERE id=2")
    records, (gap,) = store.readable_records()
    assert [record.number for record in records] == [1, 3]
    assert (gap.code, "record 2 of the history, 'a', is damaged" in str(gap)) == (
        Code.DAMAGED_RECORD, True
    )  # fmt: skip
    assert len(store.named("b")) == 1
    with pytest.raises(StoreError, match="record 2"):  # nothing is held against half of a name
        store.named("a")


@pytest.mark.parametrize(
    "url",
    [
        "postgres://u:SECRET@h/d",
        "postgres://u:SEC:RET@h/d",
        "postgres://u:SECR@ET@h/d",
        "postgresql://u:SECRET@h:port/d",
        "mysql://h/d?user=u&password=SECRET",
        "nonsense//u:SECRET@h",
        "postgresql://u:SECRET@127.0.0.1:1/d?sslpassword=SECRET",
    ],
)
def test_no_error_shows_a_password(url):
    with pytest.raises((StoreError, MissingExtra)) as refusal:
        Store(url)
    said = f"{refusal.value} {refusal.value.hint}"
    assert not [part for part in ("SECRET", "SEC", "RET", "SECR", "ET@") if part in said], said


def reading(url, folder, tell):
    """Read a store as somebody who may not write it: in a process that is not root."""
    folder.chmod(0o555)
    child = os.fork()
    if not child:
        with suppress(BaseException):
            os.setuid(65534)
            opened = Store(url, read_only=True)
            tell.write_text(str(len(opened.records())))
        os._exit(0)
    os.waitpid(child, 0)
    folder.chmod(0o755)
    return tell.read_text()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_a_store_that_cannot_be_written_can_be_listed():
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        folder, tell = Path(place) / "store", Path(place) / "tell"
        folder.mkdir()
        tell.write_text("")
        tell.chmod(0o666)
        url = f"sqlite:///{folder}/history.db"
        store = Store(url)
        store.add("a", sampled([0.1]), now_s=1.0, tags={})
        store.close()
        for file in folder.iterdir():
            file.chmod(0o444)
        assert reading(url, folder, tell) == "1"


@pytest.mark.skipif(os.name != "posix", reason="rights of POSIX")
def test_a_new_store_is_its_owners_alone_and_an_old_one_keeps_its_rights(tmp_path):
    file = tmp_path / "history.db"
    before = os.umask(0o022)
    try:
        with closing(Store(f"sqlite:///{file}")) as store:
            store.add("a", sampled([1.0, 2.0]), now_s=1.0, tags={})
            made = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert made["history.db"] == 0o600
    assert set(made.values()) == {0o600}
    file.chmod(0o640)
    Store(f"sqlite:///{file}").close()
    assert file.stat().st_mode & 0o777 == 0o640
