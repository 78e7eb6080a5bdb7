"""The history: what was acknowledged is there, whoever is killed."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from measuring import sampled

from debubble.errors import MissingExtra, RunNotFound, StoreError
from debubble.measure.store import Store, default_url
from debubble.measure.store_schema import MIGRATIONS, VERSION


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'history.db'}"


@pytest.fixture
def store(url):
    opened = Store(url)
    yield opened
    opened.close()


def test_what_is_kept_comes_back_whole(store):
    kept = sampled([0.1, 0.2], step_times=[0.2, None], tokens=4096)
    store.add("base", kept, now_s=12.5, tags={"commit": "abc"})
    (record,) = store.named("base")
    assert record.measurement == kept
    assert (record.created_s, record.tags) == (12.5, {"commit": "abc"})


def test_a_name_that_is_not_there_is_said(store):
    with pytest.raises(RunNotFound, match="nothing in the history is called 'base'"):
        store.named("base")


def test_tags_are_added_and_replaced(store):
    store.add("base", sampled([0.1]), now_s=0, tags={"a": "1"})
    assert store.tag("base", {"a": "2", "b": "3"}) == 1
    assert store.named("base")[0].tags == {"a": "2", "b": "3"}


def test_pruning_keeps_the_newest_of_each_name(store):
    for number, name in enumerate(["a", "b", "a", "a"]):
        store.add(name, sampled([0.1]), now_s=number, tags={"t": name})
    assert store.prune(keep=1) == 2
    assert [(one.name, one.created_s) for one in store.records()] == [("b", 1.0), ("a", 3.0)]
    assert store.prune(keep=0, name="a") == 1
    assert [one.name for one in store.records()] == ["b"]


def test_it_is_written_ahead_and_in_full(store):
    with store._transaction() as connection:
        settings = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous")
        ]
    assert settings == ["wal", 2]


def test_an_older_store_is_brought_up_to_date(url, tmp_path):
    old = sqlite3.connect(tmp_path / "history.db")
    for statement in MIGRATIONS[0]:
        old.execute(statement.replace("{key}", "INTEGER PRIMARY KEY"))
    old.execute("INSERT INTO store_version VALUES (1)")
    old.commit()
    old.close()
    store = Store(url)
    store.add("base", sampled([0.1]), now_s=0, tags={"a": "1"})
    assert store.named("base")[0].tags == {"a": "1"}
    store.close()


def test_a_newer_store_is_left_alone(url, store, tmp_path):
    store.close()
    newer = sqlite3.connect(tmp_path / "history.db")
    newer.execute("UPDATE store_version SET version = ?", (VERSION + 1,))
    newer.commit()
    newer.close()
    with pytest.raises(StoreError, match="written by a newer debubble"):
        Store(url)


def test_a_store_that_cannot_be_written_is_read_and_says_so(store, tmp_path):
    store.add("base", sampled([0.1]), now_s=0, tags={})
    reader = Store(f"sqlite:///file:{tmp_path / 'history.db'}?mode=ro&uri=true")
    assert len(reader.named("base")) == 1
    with pytest.raises(StoreError, match="readonly") as caught:
        reader.add("base", sampled([0.1]), now_s=0, tags={})
    reader.close()
    assert "cannot be written" in caught.value.hint


def test_a_file_that_is_something_else_is_named(tmp_path):
    (tmp_path / "notes.db").write_text("no database, only words\n" * 100, "utf-8")
    with pytest.raises(StoreError, match=r"notes\.db: file is not a database"):
        Store(f"sqlite:///{tmp_path / 'notes.db'}")


def test_a_url_of_nothing_is_refused():
    with pytest.raises(StoreError, match="is no store"):
        Store("nosuchthing:///x")


def test_without_the_extra_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(MissingExtra) as caught:
        Store("sqlite:///history.db")
    assert caught.value.hint == "pip install 'debubble[store]'"


def test_the_default_lies_in_the_users_data_folder():
    home = Path("/home/me")
    assert default_url({}, home) == "sqlite:////home/me/.local/share/debubble/history.db"
    assert default_url({"XDG_DATA_HOME": "/d"}, home) == "sqlite:////d/debubble/history.db"


@pytest.mark.parametrize(
    ("writers", "count"), [(3, 15), pytest.param(8, 500, marks=pytest.mark.accuracy, id="all")]
)
def test_what_was_acknowledged_is_there_whoever_is_killed(writers, count, url):
    script = Path(__file__).with_name("store_writer.py")
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
    with store._transaction() as connection:
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar_one() == "ok"
    store.close()
    assert len(acknowledged) >= sum(until)
    assert set(acknowledged) <= kept
