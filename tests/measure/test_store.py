"""The history: what was acknowledged is there, whoever is killed."""

from __future__ import annotations

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
from debubble.measure import store_schema
from debubble.measure.store import Store

# What version 1 of the store was made of, word for word, with a record in it.
RECORD_1 = (
    '{"kind":"training","ranks":[0,1],"stages":2,"microbatches":8,"schedule":"1f1b","split":[4,4],'
    '"message_bytes":1024,"tokens":null,"samples":[{"capture":"here","step":0,"bubble_fraction":0.3,'
    '"batch_latency_s":0.1,"step_time_s":0.1,"stream_per_s":null}],"memory":[],"environment":'
    '{"devices":["NVIDIA H200"],"versions":[["nccl","2.28.9"]],"world_size":null,'
    '"record_shapes":null,"profile_memory":null,"with_stack":null},"partial":false}'
)
MADE_1 = """
CREATE TABLE store_version (version INTEGER NOT NULL);
CREATE TABLE measurements (id {key} PRIMARY KEY, name TEXT NOT NULL,
    created_s DOUBLE PRECISION NOT NULL, data TEXT NOT NULL);
CREATE INDEX measurements_by_name ON measurements (name);
INSERT INTO store_version VALUES (1);
INSERT INTO measurements (name, created_s, data) VALUES ('base', 12.5, '{record}')
"""


@pytest.fixture
def store(url):
    opened = Store(url)
    yield opened
    opened.close()


@pytest.fixture
def database(tmp_path):
    """The file of a store in SQLite, and its URL."""
    return tmp_path / "history.db", f"sqlite:///{tmp_path / 'history.db'}"


def run_by_hand(url, *statements):
    """Do to a store what no debubble would."""
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        key = "SERIAL" if engine.dialect.name == "postgresql" else "INTEGER"
        for statement in statements:
            connection.exec_driver_sql(statement.replace("{key}", key))
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


def test_a_store_of_the_version_before_is_brought_up_to_date_with_what_it_holds(url):
    run_by_hand(url, *MADE_1.replace("{record}", RECORD_1).split(";"))
    store = Store(url)
    (old,) = store.named("base")
    assert (old.created_s, old.measurement.batch_latencies_s("profiled")) == (12.5, (0.1,))
    store.tag("base", {"a": "1"})
    store.add("base", sampled([0.2]), now_s=13, tags={"b": "2"})
    assert [one.tags for one in store.named("base")] == [{"a": "1"}, {"b": "2"}]
    with store.transaction() as connection:
        assert store_schema.read_version(connection) == store_schema.VERSION
    store.close()


def test_a_newer_store_is_left_alone(url, store):
    store.add("base", sampled([0.1]), now_s=0, tags={})
    store.close()
    run_by_hand(url, "UPDATE store_version SET version = version + 1")
    with pytest.raises(StoreError, match="written by a newer debubble") as caught:
        Store(url)
    assert "--upgrade" in caught.value.hint


def test_a_store_that_cannot_be_written_is_read_and_says_so(database):
    file, url = database
    writer = Store(url)
    writer.add("base", sampled([0.1]), now_s=0, tags={})
    reader = Store(f"sqlite:///file:{file}?mode=ro&uri=true")
    assert len(reader.named("base")) == 1
    with pytest.raises(StoreError, match="readonly") as caught:
        reader.add("base", sampled([0.1]), now_s=0, tags={})
    reader.close()
    writer.close()
    assert "cannot be written" in caught.value.hint


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
    with pytest.raises(MissingExtra) as caught:
        Store("sqlite:///history.db")
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
@pytest.mark.parametrize("left_open", [False, True])
def test_a_store_that_cannot_be_written_can_be_listed(left_open):
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        folder, tell = Path(place) / "store", Path(place) / "tell"
        folder.mkdir()
        tell.write_text("")
        tell.chmod(0o666)
        url = f"sqlite:///{folder}/history.db"
        store = Store(url)
        store.add("a", sampled([0.1]), now_s=1.0, tags={})
        if not left_open:
            store.close()
        for file in folder.iterdir():
            file.chmod(0o444)
        assert reading(url, folder, tell) == "1"
        store.close()


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
