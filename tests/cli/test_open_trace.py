"""`find --perfetto OUT --open`: the viewer gets the trace, and nobody else."""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import closing
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from support.services.console import type_command
from support.services.free_port import free_port

from debubble.cli.viewer import VIEWER, open_trace
from debubble.errors import UsageError

CONTENT = b"[" + b" " * 100_000 + b"]"


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "a run.json"
    file.write_bytes(CONTENT)
    return file


def where(url):
    """The address that the viewer is told, as the viewer reads it."""
    assert url.startswith(f"{VIEWER}/#!/?url=")
    target = parse_qs(urlsplit(url).fragment.partition("?")[2])["url"][0]
    return urlsplit(target)


def ask(place, method="GET", path=None, **headers):
    with closing(http.client.HTTPConnection("127.0.0.1", place.port, timeout=10)) as line:
        line.request(method, place.path if path is None else path, headers=headers)
        answer = line.getresponse()
        return answer.status, answer.headers, answer.read()


def opened(trace, *asks):
    """Open a trace; a browser that asks these things is the user's. Returns what it got."""
    got, looking = [], []

    def browse(url):
        def look():
            got.extend(one(where(url)) for one in asks)

        looking.append(threading.Thread(target=look))
        looking[0].start()
        return True

    given = open_trace(trace, print, port=free_port(), browse=browse)
    looking[0].join()
    return given, got


def test_the_viewer_gets_the_trace_once_and_the_server_ends(trace):
    given, [(status, headers, body)] = opened(trace, lambda place: ask(place, Origin=VIEWER))
    assert (given, status, body) == (True, 200, CONTENT)
    assert headers["Access-Control-Allow-Origin"] == VIEWER


def test_the_name_of_the_file_is_told_and_cannot_be_guessed(trace):
    _, [path] = opened(trace, lambda place: (ask(place, Origin=VIEWER), place.path)[1])
    secret, name = path.strip("/").split("/")
    assert unquote(name) == "a run.json"
    assert len(secret) > 20


def test_other_pages_names_and_files_get_nothing(trace):
    given, got = opened(
        trace,
        lambda place: ask(place, Origin="https://evil.example"),
        lambda place: ask(place, Host="evil.example:9001"),
        lambda place: ask(place, path="/etc/passwd"),
        lambda place: ask(place, path="/../../etc/passwd"),
        lambda place: ask(place, "POST"),
        lambda place: ask(place, "OPTIONS", Origin=VIEWER),
        lambda place: ask(place, Origin=VIEWER),
    )
    assert given
    assert [status for status, _, _ in got] == [404, 404, 404, 404, 501, 204, 200]
    assert all(CONTENT not in body for _, _, body in got[:-1])
    assert got[-2][1]["Access-Control-Allow-Private-Network"] == "true"


def test_patience_ends_where_nobody_looks(trace):
    said, times = [], iter([0.0, 1.0, 100.0])
    url = []
    given = open_trace(
        trace,
        said.append,
        port=free_port(),
        browse=lambda address: bool(url.append(address)),
        clock=lambda: next(times),
    )
    assert not given
    assert said == [f"no browser here; open {url[0]}"]


def test_a_port_that_is_taken_is_said(trace):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="cannot be had"):
            open_trace(trace, print, port=taken.getsockname()[1])


def test_open_needs_something_to_open(tmp_path):
    answer = type_command("debubble find tests/data/h200/1f1b_p2_m4 --open", tmp_path)
    assert answer.code == 2
    assert "--open shows what --perfetto writes" in answer.err
