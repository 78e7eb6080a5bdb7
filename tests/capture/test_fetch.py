"""Whatever is at the other end: an answer within its time and size, or one kind of error."""

from __future__ import annotations

import gc
import warnings

import pytest
from support.services.engine_routes import serving
from support.services.hostile_engine import ANSWERS, hostile_engine

from debubble.annexes.watch.mix import ServerMetrics, ask_server, requests_between
from debubble.capture import fetch as fetching
from debubble.capture.fetch import NoAnswer, fetch
from debubble.errors import CaptureError

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _answers_in_a_moment(monkeypatch):
    monkeypatch.setattr(fetching, "ANSWER_S", 0.5)
    monkeypatch.setattr(fetching, "MAX_BYTES", 1 << 20)


def ask(url, **given):
    return fetch(url, **{"patience_s": PATIENCE_S} | given)


@pytest.mark.parametrize("body", [None, b"abc"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_bad_answer_is_one_kind_of_error_or_an_answer(answer, body):
    with hostile_engine(answer) as engine:
        try:
            reply = ask(engine.url, body=body)
        except NoAnswer as error:
            said = str(error)
        else:
            said = f"{engine.url} {len(reply.body)}"
            assert len(reply.body) <= 1 << 20
        assert engine.url in said
        assert len(said) < 400
        assert engine.asked >= 1


@pytest.mark.parametrize("answer", ANSWERS)
def test_figures_of_a_bad_engine_are_figures_or_an_error_of_ours(answer):
    with hostile_engine(answer) as engine:
        try:
            told = ask_server(engine.url)
        except CaptureError:
            return
    counts = requests_between(ServerMetrics(), told)
    assert 0 <= told.waiting < float("inf")
    assert all(0 < bucket <= 1 << 31 and 0 < count < 1e18 for bucket, count in counts.items())


def test_a_bound_of_1e308_counts_as_none():
    with hostile_engine("a bound of 1e308") as engine:
        told = ask_server(engine.url)
    assert sum(requests_between(ServerMetrics(), told).values()) == 9.0


@pytest.mark.parametrize("answer", ["cut in its body", "cut in a chunk"])
def test_half_an_answer_is_none(answer):
    with hostile_engine(answer) as engine, pytest.raises(NoAnswer):
        ask(engine.url)


@pytest.mark.parametrize("answer", ["a byte a second", "without an end"])
def test_an_answer_that_has_no_end_is_ended(answer):
    with hostile_engine(answer) as engine, pytest.raises(NoAnswer):
        ask(engine.url)


def test_what_never_answers_is_late():
    with hostile_engine("a byte a second") as engine, pytest.raises(NoAnswer) as refusal:
        ask(engine.url, patience_s=0.2)
    assert refusal.value.late


def test_nobody_is_followed_to_another_origin_and_an_order_is_made_once():
    for answer in ("a redirect to somebody else", "a redirect to a file", "a redirect in circles"):
        with hostile_engine(answer) as engine:
            assert not ask(engine.url, body=b"abc").ok
            assert engine.asked == 1
            assert not ask(engine.url).ok


@pytest.mark.parametrize(
    "url", ["http://[", "http://", "ftp://x/", "http://x:99999/", "http://a b/", "http://x:no/"]
)
def test_what_is_no_address_is_said(url):
    with pytest.raises(NoAnswer):
        ask(url, patience_s=2.0)


def test_an_answer_is_read_whole_up_to_its_limit(monkeypatch):
    with serving(lambda: "x" * 1000, lambda _path, body: (201, str(len(body)))) as url:
        monkeypatch.setattr(fetching, "MAX_BYTES", 1000)
        assert ask(url).body == b"x" * 1000
        monkeypatch.setattr(fetching, "MAX_BYTES", 999)
        with pytest.raises(NoAnswer, match="longer than 999 bytes"):
            ask(url)
        reply = ask(f"{url}/there", body=b"abc")
        assert (reply.status, reply.body) == (201, b"3")


def test_an_answer_that_leads_nowhere_is_let_go_of():
    gc.collect()
    with hostile_engine("a redirect to no address") as engine:
        with pytest.raises(NoAnswer):
            fetch(engine.url)
        with warnings.catch_warnings(record=True) as unclosed:
            warnings.simplefilter("always")
            gc.collect()
    assert not unclosed
