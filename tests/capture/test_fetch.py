"""Whatever is at the other end: an answer within its time and size, or one kind of error."""

from __future__ import annotations

import pytest
from support.services.engine_routes import serving
from support.services.hostile_engine import ANSWERS, hostile_engine

from debubble.annexes.watch.mix import ServerMetrics, ask_server, requests_between
from debubble.capture import fetch as fetching
from debubble.capture.fetch import NoAnswer, Request, fetch
from debubble.errors import CaptureError

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _answers_in_a_moment(monkeypatch):
    monkeypatch.setattr(fetching, "ANSWER_S", 0.5)


def ask(url, **given):
    return fetch(Request(url=url, **{"patience_s": PATIENCE_S, "most_bytes": 1 << 20} | given))


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_bad_answer_is_one_kind_of_error_or_an_answer(answer, method):
    with hostile_engine(answer) as engine:
        try:
            reply = ask(engine.url, method=method)
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


@pytest.mark.parametrize(
    "answer", ["a redirect to a file", "a redirect to somebody else", "a redirect to no address"]
)
def test_nobody_is_followed_to_another_origin(answer):
    with hostile_engine(answer) as engine, pytest.raises(NoAnswer):
        ask(engine.url)


def test_the_same_origin_is_followed_and_an_order_is_not_made_twice():
    with hostile_engine("a redirect in circles") as engine:
        with pytest.raises(NoAnswer, match="in circles"):
            ask(engine.url)
        assert engine.asked == 4
    with hostile_engine("a redirect to a file") as engine:
        assert ask(engine.url, method="POST").status == 302
        assert engine.asked == 1


@pytest.mark.parametrize(
    "url", ["http://[", "http://", "ftp://x/", "http://x:99999/", "http://a b/", "http://x:no/"]
)
def test_what_is_no_address_is_said(url):
    with pytest.raises(NoAnswer):
        ask(url, patience_s=2.0)


def test_an_answer_is_read_whole_up_to_its_limit():
    with serving(lambda: "x" * 1000, lambda _path, body: (201, str(len(body)))) as url:
        assert ask(url, most_bytes=1000).body == b"x" * 1000
        with pytest.raises(NoAnswer, match="longer than 999 bytes"):
            ask(url, most_bytes=999)
        told = ask(f"{url}/there", method="POST", body=b"abc")
        assert (told.status, told.body) == (201, b"3")
