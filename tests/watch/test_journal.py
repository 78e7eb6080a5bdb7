"""Each capture once, whoever is killed; alerts once, until somebody acknowledges them."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from support.measurements import sampled
from support.services.watch_service import analysis

from debubble.annexes.watch.analyse import Outcome
from debubble.annexes.watch.journal import Journal, captures
from debubble.annexes.watch.judge import Alert, State
from debubble.measure.store import Store


@pytest.fixture
def journal(url):
    store = Store(url)
    yield Journal(store)
    store.close()


def claim(journal, key="a", pipeline="s"):
    return journal.claim(pipeline, key, (f"/t/{key}.json",), now_s=1.0)


def quiet(state, _capture, _earlier):
    return state, []


def finish(journal, capture, outcome=None, judge=quiet, targets=()):
    outcome = outcome or analysis(sampled([0.1]))
    return journal.finish(capture, outcome, now_s=2.0, judge=judge, targets=targets)


def test_a_result_is_stored_once_with_its_measurement(journal):
    capture = claim(journal)
    assert finish(journal, capture) == []
    assert finish(journal, capture) is None
    (record,) = journal.store.named("s")
    assert record.tags == {"watch": "a"}
    assert (journal.counts("s"), journal.ended_keys("s")) == ({"stored": 1}, {"a"})
    (stored,) = journal.captures("s")
    assert stored.finding.metrics["batch_latency_s"] == 0.1
    assert journal.capture(stored.id) == (stored, "")


def test_nothing_is_stored_where_what_follows_fails(journal):
    capture = claim(journal)

    def fail(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finish(journal, capture, judge=fail)
    assert journal.counts("s") == {"claimed": 1}
    assert journal.store.records() == ()
    assert finish(journal, capture) == []


def test_a_claim_that_did_not_end_is_found_again_with_its_attempts(journal):
    capture = claim(journal)
    assert (capture.attempts, journal.ended_keys("s")) == (0, frozenset())
    journal.begin(capture)
    again = claim(journal)
    assert (again.id, again.attempts) == (capture.id, 1)
    journal.begin(again)
    journal.put_back(again)  # it stopped, and did not die of it
    assert claim(journal).attempts == 1
    assert claim(journal, pipeline="other").attempts == 0


def test_what_failed_is_forgotten_when_it_is_to_be_tried_again(journal):
    finish(journal, claim(journal), Outcome(problem="took too long"))
    finish(journal, claim(journal, "b"), Outcome(problem="is empty"))
    finish(journal, claim(journal, "c"))
    assert journal.retry(["other"]) == ()
    assert [capture.problem for capture in journal.retry(["s"], 2)] == ["is empty"]
    assert journal.retry(["s"], 3) == ()
    assert [capture.key for capture in journal.retry(["s", "other"])] == ["a"]
    assert journal.ended_keys("s") == {"c"}


def up(kind="bucket_slower"):
    def judge(state, capture, _earlier):
        alert = Alert(pipeline="s", kind=kind, subject="x/512", message="m", raised_s=5.0,
                      capture_id=capture.id, data={})  # fmt: skip
        return state, [alert]

    return judge


def test_an_alert_is_raised_once_until_it_is_acknowledged(journal):
    assert len(finish(journal, claim(journal, "a"), judge=up())) == 1
    assert finish(journal, claim(journal, "b"), judge=up()) == []
    (alert,) = journal.alerts()
    closed = State(accepted_plan="a new one")
    assert journal.acknowledge(alert.id, now_s=6.0, accept=lambda _state, _alert: closed)
    assert journal.state("s", State) == closed
    assert not journal.acknowledge(alert.id, now_s=7.0, accept=lambda *_: closed)
    assert len(finish(journal, claim(journal, "c"), judge=up())) == 1
    assert [known.acknowledged_s for known in journal.alerts()] == [None, 6.0]


def test_each_webhook_gets_each_alert_once(journal):
    finish(journal, claim(journal), judge=up(), targets=["http://a", "http://b"])
    (alert,) = journal.undelivered("http://a", since_s=1.0)
    journal.delivered(alert, "http://a", now_s=6.0)
    assert journal.undelivered("http://a", since_s=1.0) == ()
    assert journal.undelivered("http://b", since_s=1.0) == (alert,)
    assert journal.undelivered("http://b", since_s=100.0) == ()


def test_only_the_newest_raw_traces_are_kept(journal):
    for key in "abcd":
        finish(journal, claim(journal, key))
    gone = journal.prunable("s", keep=2)
    assert [capture.files for capture in gone] == [("/t/b.json",), ("/t/a.json",)]
    journal.forget_files(gone[0])
    assert [capture.files for capture in journal.prunable("s", keep=2)] == [("/t/a.json",)]


def test_what_another_version_stored_is_shown_without_its_finding(journal):
    finish(journal, claim(journal))
    with journal.store.transaction() as connection:
        connection.execute(sa.text("UPDATE watch_captures SET finding = '{\"of\": 2}'"))
        connection.execute(sa.text("UPDATE watch_states SET data = '{\"mix\": 2}'"))
    assert journal.captures("s")[0].finding is None
    assert journal.state("s", State) == State()


def test_a_store_of_the_history_alone_gets_the_tables_of_the_service_and_keeps_its_records(url):
    store = Store(url)
    store.add("before", sampled([0.1]), now_s=1, tags={})
    with store.transaction() as connection:
        assert not sa.inspect(connection).has_table(captures.name)
    journal = Journal(store)
    assert finish(journal, claim(journal)) == []
    assert Journal(store).counts("s") == {"stored": 1}  # once more over tables that are there
    assert [record.name for record in store.records()] == ["before", "s"]
    store.close()
