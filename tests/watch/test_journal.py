"""Each capture once, whoever is killed; alerts once, until somebody says that he knows."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from support.measurements import sampled
from support.services.watch_service import analysis

from debubble.annexes.watch import tables
from debubble.annexes.watch.analyse import Outcome
from debubble.annexes.watch.journal import MOST_DEATHS, Journal
from debubble.measure.store import Store


@pytest.fixture
def journal(url):
    store = Store(url)
    yield Journal(store)
    store.close()


def claim(journal, key="a", source="s"):
    return journal.claim(source, key, (f"/t/{key}.json",), now_s=1.0)


def finish(journal, one, result=None, follow=lambda *_: None):
    return journal.finish(one, result or analysis(sampled([0.1])), now_s=2.0, follow=follow)


def test_a_capture_is_claimed_once(journal):
    assert claim(journal) is not None
    assert claim(journal) is None
    assert claim(journal, source="other") is not None


def test_a_result_is_stored_once_with_its_measurement(journal):
    one = claim(journal)
    assert finish(journal, one)
    assert not finish(journal, one)
    (record,) = journal.store.named("s")
    assert record.tags == {"watch": "a"}
    assert journal.outcomes("s") == {"stored": 1}
    assert journal.points("s", most=5)["batch_latency_s"] == [(1.0, 512, 0.1)]


def test_nothing_is_stored_where_what_follows_fails(journal):
    one = claim(journal)

    def fail(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finish(journal, one, follow=fail)
    assert journal.outcomes("s") == {"claimed": 1}
    assert journal.store.records() == ()
    assert finish(journal, one)


def test_claims_of_a_dead_service_are_taken_up_however_often_it_dies(journal):
    claim(journal)
    for _ in range(50):
        (one,) = journal.unfinished(["s"], now_s=3.0)
        assert (one.deaths, one.files) == (0, ("/t/a.json",))


def test_a_capture_with_which_the_service_dies_again_and_again_is_given_up(journal):
    claim(journal, "a")
    claim(journal, "b")
    for deaths in range(MOST_DEATHS):
        found = journal.unfinished(["s"], now_s=3.0)
        assert [(one.key, one.deaths) for one in found][-1] == ("a" if deaths else "b", deaths)
        journal.count_death(next(one for one in found if one.key == "a"))
    assert [one.key for one in journal.unfinished(["s"], now_s=3.0)] == ["b"]
    (row,) = journal.given_up(["s"])
    assert (row.key, row.problem) == ("a", "the service died 5 times while it was analysed")


def test_a_service_that_stops_holds_nothing_against_a_capture(journal):
    claim(journal)
    for _ in range(2 * MOST_DEATHS):
        (one,) = journal.unfinished(["s"], now_s=3.0)
        journal.count_death(one)
        journal.put_back(one)
    assert len(journal.unfinished(["s"], now_s=3.0)) == 1


def test_what_was_given_up_is_taken_up_once_when_it_is_asked_for(journal):
    finish(journal, claim(journal), Outcome(problem="took too long", given_up=True))
    finish(journal, claim(journal, "b"), Outcome(problem="is empty"))
    assert [row.key for row in journal.given_up(["s", "other"])] == ["a"]
    assert journal.retry(["other"]) == 0
    assert journal.retry(["s"]) == 1
    assert journal.given_up(["s"]) == ()
    assert journal.asked_again(["other"]) == ()
    (one,) = journal.asked_again(["s"])
    assert (one.key, one.deaths) == ("a", 0)
    assert journal.asked_again(["s"]) == ()
    assert finish(journal, one)
    assert journal.outcomes("s") == {"stored": 1, "unreadable": 1}
    assert journal.retry(["s"], 2) == 1


def test_a_capture_that_cannot_be_read_is_recorded_as_such(journal):
    finish(journal, claim(journal), Outcome(problem="is empty"))
    (row,) = journal.captures("s", most=5)
    assert (row.state, row.problem, row.finding) == ("unreadable", "is empty", None)
    assert claim(journal) is None
    assert journal.latest("s") is None


def raise_alert(journal, one, targets=()):
    with journal.store.transaction() as connection:
        return journal.raise_alert(
            connection, one, "bucket_slower", "x/512", {"message": "m"}, at_s=5.0, targets=targets
        )


def test_an_alert_is_raised_once_until_it_is_acknowledged(journal):
    one = claim(journal)
    number = raise_alert(journal, one)
    assert raise_alert(journal, one) is None
    followed = []
    assert journal.acknowledge(number, now_s=6.0, follow=lambda _, alert: followed.append(alert))
    assert [alert.subject for alert in followed] == ["x/512"]
    assert not journal.acknowledge(number, now_s=7.0, follow=lambda *_: None)
    assert raise_alert(journal, one) is not None


def test_a_webhook_gets_each_alert_once_and_later_again_where_it_failed(journal):
    raise_alert(journal, claim(journal), targets=["http://a", "http://b"])
    (first,) = journal.due("http://a", now_s=5.0, most_attempts=2)
    (second,) = journal.due("http://b", now_s=5.0, most_attempts=2)
    journal.delivered(first, now_s=6.0)
    journal.postpone(second, "refused", next_s=100.0)
    assert journal.due("http://b", now_s=99.0, most_attempts=2) == ()
    (again,) = journal.due("http://b", now_s=100.0, most_attempts=2)
    assert journal.due("http://b", now_s=100.0, most_attempts=1) == ()
    assert (again.target, again.attempts) == (second.target, 1)


def test_only_the_newest_raw_traces_are_kept(journal):
    for key in "abcd":
        finish(journal, claim(journal, key))
    gone = journal.prunable("s", keep=2)
    assert [files for _, files in gone] == [("/t/b.json",), ("/t/a.json",)]
    journal.forget_files(gone[0][0])
    assert [files for _, files in journal.prunable("s", keep=2)] == [("/t/a.json",)]


def test_a_capture_gets_the_traffic_of_its_own_trigger(journal):
    first = journal.begin_trigger("s", now_s=10.0)
    journal.end_trigger(first, now_s=12.0, traffic={512: 3.0})
    second = journal.begin_trigger("s", now_s=20.0)
    journal.end_trigger(second, now_s=22.0, traffic={2048: 4.0})
    assert journal.traffic_at("s", 11.0) == {512: 3.0}
    assert journal.traffic_at("s", 21.0) == {2048: 4.0}
    assert journal.traffic_at("s", 9.0) == {}
    assert journal.last_trigger("s") == 20.0


def test_a_store_of_the_history_alone_gets_the_tables_of_the_service_and_keeps_its_records(url):
    store = Store(url)
    store.add("before", sampled([0.1]), now_s=1, tags={})
    with store.transaction() as connection:
        assert not sa.inspect(connection).has_table(tables.captures.name)
    journal = Journal(store)
    assert finish(journal, claim(journal))
    # Once more over tables that are there, as those of every store of version 3 were.
    assert Journal(store).outcomes("s") == {"stored": 1}
    assert [record.name for record in store.records()] == ["before", "s"]
    store.close()
