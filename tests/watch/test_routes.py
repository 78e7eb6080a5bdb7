"""Whether the service is ready: a store that can be read may still be full."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa
from support.measurements import sampled
from support.services.watch_service import analysis

from debubble.annexes.watch.config import Config, Drift, Source
from debubble.annexes.watch.journal import Journal
from debubble.annexes.watch.judge import Judge
from debubble.annexes.watch.metrics import Counts
from debubble.annexes.watch.routes import Request, Routes
from debubble.annexes.watch.supervise import Patience
from debubble.measure.store import Store


@pytest.fixture
def store(tmp_path):
    opened = Store(f"sqlite:///{tmp_path}/history.db")
    yield opened
    opened.close()


def routes_of(store, tmp_path):
    journal = Journal(store)
    one = Source(name="train", folder=str(tmp_path))
    config = Config(lock=tmp_path / "lock", sources=(one,))
    judge = Judge(journal=journal, settings=Drift())
    return Routes(config, journal, judge, Counts(), Patience(store_check_s=0.0))


def ask(routes, target="/readyz", method="GET", **headers):
    path, _, query = target.partition("?")
    asked = {"host": "127.0.0.1", **headers}
    request = Request(method=method, path=path, query=query, headers=asked)
    return asyncio.run(routes.answer(request))


def fill_up(store):
    """Have the store as full as a disk can be: what is there can be read, and nothing written."""

    def limit(raw, *_):
        pages = raw.execute("PRAGMA page_count").fetchone()[0]
        raw.execute(f"PRAGMA max_page_count={pages}")

    store._engine.dispose()
    sa.event.listen(store._engine, "connect", limit)


def test_a_store_that_is_full_is_not_ready_until_it_is_not(store, tmp_path, monkeypatch):
    routes = routes_of(store, tmp_path)
    assert ask(routes).status == 503
    routes.refresh()
    routes.check_store()
    assert ask(routes).status == 200
    written = Journal.check_writable

    def write_much(journal, **_):
        with journal.store.transaction() as connection:
            journal.remember(connection, "", "written", "x" * 100_000)

    fill_up(store)
    monkeypatch.setattr(Journal, "check_writable", write_much)
    routes.check_store()
    answer = ask(routes)
    assert (answer.status, b"cannot be written" in answer.body) == (503, True)
    assert "full" in routes.store_problem
    assert ask(routes, "/healthz").status == 200
    monkeypatch.setattr(Journal, "check_writable", written)
    routes.check_store()
    assert ask(routes).status == 200


def test_a_request_that_cannot_be_answered_ends_nobody_else(store, tmp_path, monkeypatch):
    routes = routes_of(store, tmp_path)
    routes.refresh()
    monkeypatch.setattr(Journal, "capture", lambda *_: 1 / 0)
    assert ask(routes, "/pipelines/train/captures/1").status == 500
    assert ask(routes, "/").status == 200


def test_troubles_stand_on_the_page_and_in_the_metrics(store, tmp_path):
    routes = routes_of(store, tmp_path)
    counts = routes._counts
    counts.trouble("train", "server", "no <b>answer</b>")
    routes.refresh()
    assert b"server: no &lt;b&gt;answer&lt;/b&gt;" in ask(routes, "/").body
    assert b'debubble_source_up{pipeline="train"} 0.0' in ask(routes, "/metrics").body
    counts.well("train", "server")
    routes.refresh()
    assert b"no &lt;b&gt;" not in ask(routes, "/").body
    metrics = ask(routes, "/metrics").body
    assert b'debubble_source_up{pipeline="train"} 1.0' in metrics
    assert b'debubble_source_failures_total{pipeline="train"} 1.0' in metrics


def test_parameters_that_nothing_takes_are_refused(store, tmp_path):
    routes = routes_of(store, tmp_path)
    routes.refresh()
    assert ask(routes, "/api/pipelines").status == 200
    assert ask(routes, "/api/pipelines/train/captures").status == 200
    refused = ask(routes, "/api/pipelines/train/captures?limit=-1")
    assert (refused.status, b"takes parameters" in refused.body) == (400, True)
    assert ask(routes, "/metrics?module=x").status == 200


def test_what_another_version_stored_is_shown_without_its_numbers(store, tmp_path):
    routes = routes_of(store, tmp_path)
    claim = routes._journal.claim("train", "a 1 2", ("/t/a",), now_s=1.0)
    finding = analysis(sampled([0.1]))
    routes._journal.finish(claim, finding, now_s=2.0, follow=lambda *_: None)
    routes.refresh()
    assert b'"bubble_fraction"' in ask(routes, "/api/pipelines/train/captures").body
    newer = sa.text("UPDATE watch_captures SET data = :data")
    with store.transaction() as connection:
        connection.execute(newer, {"data": '{"of": "a version to come"}'})
    routes.refresh()
    for path in ("/", "/metrics", "/api/pipelines", "/pipelines/train/captures/1"):
        assert ask(routes, path).status == 200
