"""The service as it runs: captures found, read once, shown; killed and started again; attacked."""

from __future__ import annotations

import gzip
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import sqlalchemy as sa
from support.processes import PATIENCE_S, wait_until
from support.services.watch_service import Watching, place_capture, write_config

from debubble.annexes.watch import tables
from debubble.annexes.watch.analyse import Outcome
from debubble.annexes.watch.journal import Journal
from debubble.annexes.watch.routes import CONNECTIONS
from debubble.annexes.watch.webhooks import deliver
from debubble.measure.store import Store

pytestmark = pytest.mark.slow

TOKEN = "0123456789abcdef0123"  # noqa: S105 (made up)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """One service with a capture in it."""
    folder = tmp_path_factory.mktemp("watch")
    config = write_config(folder)
    place_capture(folder, "first")
    with Watching(config) as one:
        one.folder = folder
        one.wait_for("analysed")
        one.ask_until("/api/pipelines", lambda data: data["pipelines"][0]["latest"])
        yield one


def test_a_capture_is_analysed_and_shown_everywhere(service):
    (shown,) = service.data("/api/pipelines")["pipelines"]
    assert shown["latest"]["capture"] == "first/rank0.json.gz"
    assert shown["latest"]["numbers"]["bubble_fraction"] == pytest.approx(0.5617, abs=1e-3)
    assert (
        'debubble_bubble_ratio{cause="total",pipeline="train"} 0.56' in service.ask("/metrics")[2]
    )
    assert "first/rank0.json.gz" in service.ask("/")[2]
    number = shown["latest"]["id"]
    assert "between steps" in service.ask(f"/pipelines/train/captures/{number}")[2]
    assert service.data(f"/api/pipelines/train/captures/{number}")["capture"]["causes"]
    trends = service.data("/api/pipelines/train/trends")["trends"]
    assert {trend["metric"] for trend in trends} >= {"bubble_fraction", "batch_latency_s"}


def test_every_answer_has_its_security_headers_and_no_cookie(service):
    for path in ("/", "/metrics", "/nowhere"):
        _, headers, _ = service.ask(path)
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert "Set-Cookie" not in headers
    policy = service.ask("/")[1]["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/pipelines/train/captures/../../../etc/passwd",
        "/pipelines/%2e%2e/captures/1",
        "/api/pipelines/../captures",
        "//etc/passwd",
        "/traces/first/rank0.json.gz",
        "/pipelines/other/captures/1",
    ],
)
def test_no_path_leads_outside(service, path):
    assert service.ask(path)[0] == 404


def raw(service, data):
    """Send bytes as they are; return what comes back."""
    host, _, port = service.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        client.sendall(data)
        parts = []
        while part := client.recv(65536):
            parts.append(part)
        return b"".join(parts)


POST = b"POST /api/alerts/1/acknowledge HTTP/1.1\r\nHost: 127.0.0.1\r\n"
GET = b"GET / HTTP/1.1\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (POST + b"Content-Length: 9999999\r\n\r\n" + b"x" * 100_000, 413),
        (GET + b"Host: 127.0.0.1\r\nX: " + b"x" * 100_000, 431),
        (b"nonsense\r\n\r\n", 400),
        (GET + b"\r\n", 400),
        (GET + b"Host: a\r\nHost: b\r\n\r\n", 400),
        (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nx", 400),
        (b"GET /a%0d%0aX-Evil:1 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n", 404),
    ],
)
def test_what_is_no_request_or_too_large_is_refused_before_it_is_read(service, sent, status):
    answer = raw(service, sent)
    assert answer.startswith(f"HTTP/1.1 {status}".encode())
    assert b"X-Evil" not in answer


@pytest.mark.parametrize("host", ["[", "]", "[::1", "a[b", "%", "127.0.0.1:x:y"])
def test_a_host_that_is_none_is_refused_without_a_traceback(service, host):
    before = len([one for one in service.events if one.get("event") in (None, "bug")])
    head = f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    status = raw(service, head.encode()).split(b" ", 2)[1]
    assert status in {b"421", b"400", b"200"}
    path = "/alerts/1/acknowledge"
    assert service.ask(path, method="POST", headers={"Origin": f"http://{host}"})[0] == 403
    assert len([one for one in service.events if one.get("event") in (None, "bug")]) == before


def test_silent_sockets_lock_nobody_out(service):
    host, _, port = service.url.removeprefix("http://").partition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(CONNECTIONS + 50)]
    try:
        for number in range(5):
            silent[number].sendall(b"GET / HTT")
        for _ in range(20):
            assert service.ask("/healthz")[0] == 200
    finally:
        for one in silent:
            one.close()


def test_a_name_of_somebody_elses_for_this_machine_is_refused(service):
    assert service.ask("/", headers={"Host": "evil.example"})[0] == 421
    assert service.ask("/", headers={"Host": "localhost:9464"})[0] == 200


def test_slow_clients_are_cut_while_others_are_served(service):
    host, _, port = service.url.removeprefix("http://").partition(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(50)]
    try:
        for one in slow:
            one.sendall(b"GET / HTT")
        assert service.ask("/healthz")[0] == 200
        slow[0].settimeout(PATIENCE_S)
        assert slow[0].recv(100).startswith(b"HTTP/1.1 408")
    finally:
        for one in slow:
            one.close()


def test_damaged_captures_and_bombs_are_recorded_once_and_hurt_nobody(service):
    bomb = service.folder / "traces" / "bomb"
    bomb.mkdir()
    with gzip.open(bomb / "rank0.json.gz", "wb", 9) as stream:
        stream.write(b'{"traceEvents": [')
        for _ in range(200):
            stream.write(b" " * 1_000_000)
    event = service.wait_for("unreadable")
    assert event["capture"].startswith("bomb/rank0.json.gz")
    assert "a bomb" in event["problem"]
    (service.folder / "traces" / "empty.json").write_bytes(b"")
    service.wait_for("unreadable", count=2)
    place_capture(service.folder, "after")
    service.wait_for("analysed", capture=service.wait_for("analysed", count=2)["capture"])
    shown = service.ask_until(
        "/api/pipelines", lambda data: data["pipelines"][0]["captures"].get("stored") == 2
    )
    assert shown["pipelines"][0]["captures"] == {"stored": 2, "unreadable": 2}


def test_a_second_service_of_one_configuration_is_refused(service):
    words = ["watch", "--config", str(service.folder / "watch.toml")]
    second = subprocess.run(
        [sys.executable, "-m", "debubble", *words], capture_output=True, text=True, check=False
    )
    assert second.returncode == 2
    assert "another service runs" in second.stderr


def test_a_token_is_asked_of_everybody_but_probes(tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    listen = '[listen]\naddress = "0.0.0.0:0"\ntoken_file = "token"\n'
    with Watching(write_config(tmp_path, more=listen)) as one:
        one.url = one.url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104 (behind its token)
        status, headers, text = one.ask("/metrics")
        assert (status, headers["WWW-Authenticate"][:5]) == (401, "Basic")
        assert "debubble_" not in text
        for wrong in ("Bearer", "Bearer x", f"Bearer {TOKEN}x", "Basic !!", "Digest x"):
            assert one.ask("/", headers={"Authorization": wrong})[0] == 401
        assert one.ask("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200
        basic = "Basic OjAxMjM0NTY3ODlhYmNkZWYwMTIz"
        assert one.ask("/", headers={"Authorization": basic})[0] == 200
        assert one.ask("/healthz")[0] == one.ask("/readyz")[0] == 200


def is_claimed(engine):
    """Read beside the store, whose transactions wait for SQLite's lock: a frozen one holds it."""
    table = tables.captures
    with engine.connect() as connection:
        found = connection.execute(sa.select(table.c.number).where(table.c.state == "claimed"))
        return found.first() is not None


def kill_within_a_claim(one, engine):
    """Freeze the service until it is caught with a capture under way, then end it."""

    def is_caught():
        one.process.send_signal(signal.SIGSTOP)
        if is_claimed(engine):
            return True
        one.process.send_signal(signal.SIGCONT)
        return False

    wait_until(is_caught, "never is a capture under way")
    one.kill()


def test_what_was_under_way_when_it_was_killed_is_taken_up_in_either_store(tmp_path, url):
    config = write_config(tmp_path, store=url)
    for number in range(5):
        place_capture(tmp_path, f"c{number}")
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    for taken_up in (0, 1):
        with Watching(config) as one:
            one.wait_for("analysed")
            if taken_up:
                one.wait_for("taken_up")
            kill_within_a_claim(one, engine)
    with Watching(config) as one:
        one.wait_for("taken_up")
        one.ask_until(
            "/api/pipelines", lambda data: data["pipelines"][0]["captures"] == {"stored": 5}
        )
        assert one.stop() == 0
    engine.dispose()
    store = Store(url)
    journal = Journal(store)
    tags = [record.tags["watch"] for record in store.named("train")]
    assert len(tags) == len(set(tags)) == 5
    assert len(journal.points("train", most=100)["bubble_fraction"]) == 5
    store.close()


def test_a_digest_stays_where_the_raw_trace_goes(tmp_path):
    traces = tmp_path / "traces"
    sources = "".join(
        f'[[source]]\nname = "{name}"\nfolder = "{traces}/{name}"\nsettle = "0s"\npoll = "100ms"\n'
        f'keep = 0\ndigests = "{digests}"\n'
        for name, digests in (("here", "beside"), ("away", tmp_path / "kept"))
    )
    config = write_config(tmp_path, sources=sources)
    for name in ("here", "away"):
        place_capture(tmp_path, f"{name}/c0")
    with Watching(config) as one:
        for name in ("here", "away"):
            one.wait_for("pruned", source=name)
        assert one.stop() == 0
        assert len([event for event in one.events if event.get("event") == "analysed"]) == 2
    for kept in (traces / "here" / "c0", tmp_path / "kept" / "away" / "c0"):
        names = sorted(path.name for path in kept.iterdir())
        assert names == [f"rank{rank}.debubble.npz" for rank in range(4)]
    assert not list(traces.rglob("*.gz"))


def queue_alert(database, target):
    """Have an alert wait for a webhook."""
    store = Store(f"sqlite:///{database}")
    journal = Journal(store)
    claim = journal.claim("train", "a", (), now_s=1.0)
    with store.transaction() as connection:
        journal.raise_alert(
            connection, claim, "traffic_moved", "x", {"message": "m"}, at_s=1.0, targets=[target]
        )
    journal.finish(claim, Outcome(problem="made up"), now_s=1.0, follow=lambda *_: None)
    store.close()


class Refusing(BaseHTTPRequestHandler):
    """A webhook's target that takes the second attempt."""

    seen: list

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.headers["Idempotency-Key"], body))
        self.send_response(500 if len(self.seen) < 2 else 204)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_webhook_that_fails_is_tried_again_with_the_same_key(tmp_path):
    Refusing.seen = []
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    target = f"http://127.0.0.1:{server.server_port}/hook"
    queue_alert(tmp_path / "h.db", target)
    store = Store(f"sqlite:///{tmp_path}/h.db")
    journal = Journal(store)
    (first,) = journal.due(target, now_s=2.0, most_attempts=9)
    assert not deliver(journal, first)
    assert journal.due(target, now_s=2.0, most_attempts=9) == ()
    (again,) = journal.due(target, now_s=time.time() + 3600, most_attempts=9)
    assert deliver(journal, again)
    assert journal.due(target, now_s=time.time() + 1e6, most_attempts=9) == ()
    keys, bodies = zip(*Refusing.seen, strict=True)
    assert set(keys) == {"debubble-alert-1"}
    assert bodies[0]["alert"]["kind"] == "traffic_moved"
    server.shutdown()
    server.server_close()
    store.close()


def test_a_webhook_that_hangs_holds_up_nobody(tmp_path):
    """The socket accepts and never answers; the service stops all the same."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        more = f'[[webhook]]\nurl = "http://127.0.0.1:{port}/"\n'
        config = write_config(tmp_path, more=more)
        queue_alert(tmp_path / "history.db", f"http://127.0.0.1:{port}/")
        with Watching(config) as one, silent.accept()[0]:
            place_capture(tmp_path, "a")
            one.wait_for("analysed")
            assert one.ask("/healthz")[0] == 200
            one.process.send_signal(signal.SIGTERM)
            assert one.process.wait(PATIENCE_S) == 0
