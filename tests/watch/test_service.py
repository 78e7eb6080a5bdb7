"""The service as it runs: captures found, read once, shown; killed and started again; attacked."""

from __future__ import annotations

import gzip
import json
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from support.measurements import sampled
from support.processes import PATIENCE_S, wait_until
from support.services.watch_service import Watching, analysis, place_capture, write_config

from debubble.annexes.watch.journal import Journal
from debubble.annexes.watch.judge import Alert
from debubble.annexes.watch.web import CONNECTIONS
from debubble.measure.store import Store

pytestmark = pytest.mark.slow

TOKEN = "0123456789abcdef0123"  # noqa: S105 (made up)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """One service with a capture in it."""
    folder = tmp_path_factory.mktemp("watch")
    config = write_config(folder)
    place_capture(folder, "first")
    with Watching(config) as watch:
        watch.folder = folder
        watch.wait_for("analysed")
        watch.ask_until(lambda data: data["pipelines"][0]["standings"])
        yield watch


def address(service):
    host, _, port = service.url.removeprefix("http://").partition(":")
    return host, int(port)


def test_a_capture_is_analysed_and_shown_everywhere(service):
    pipeline = service.pipelines()["train"]
    (capture,) = pipeline["captures"]
    assert capture["key"].startswith("first/rank0.json.gz ")
    assert capture["finding"]["metrics"]["bubble_fraction"] == pytest.approx(0.5617, abs=1e-3)
    assert {known["state"] for known in pipeline["standings"]} == {"learning"}
    text = service.ask("/metrics")[2]
    assert 'debubble_bubble_ratio{cause="total",pipeline="train"} 0.56' in text
    assert "first/rank0.json.gz" in service.ask("/")[2]
    assert "between steps" in service.ask(f"/captures/{capture['id']}")[2]


def test_every_answer_has_its_security_headers_and_no_cookie(service):
    for path in ("/", "/metrics", "/nowhere"):
        _, headers, _ = service.ask(path)
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert "Set-Cookie" not in headers


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/captures/../../../etc/passwd", "/captures/%2e%2e/1", "//etc/passwd",
     "/traces/first/rank0.json.gz", "/captures/99"],
)  # fmt: skip
def test_no_path_leads_outside(service, path):
    assert service.ask(path)[0] == 404


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 100_000, b"431"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"421"),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"421"),
        (b"GET / HTTP/1.1\r\nHost: [\r\n\r\n", b"421"),
        (b"GET / HTTP/1.1\r\nHost: localhost:9464\r\n\r\n", b"200"),
        (b"GET /a%0d%0aX-Evil:1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"404"),
        (b"POST /alerts/9/acknowledge HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"404"),
        (b"POST /alerts/9/acknowledge HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://[\r\n\r\n",
         b"403"),
    ],
)  # fmt: skip
def test_what_is_no_request_or_not_for_us_is_refused_without_a_traceback(service, sent, status):
    with socket.create_connection(address(service), timeout=PATIENCE_S) as client:
        client.sendall(sent)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.split(b" ", 2)[1] == status
    assert b"X-Evil" not in answer
    assert not [event for event in service.events if event.get("event") in (None, "bug")]


def test_requests_that_never_finish_hold_up_nobody_and_are_cut(service):
    silent = [socket.create_connection(address(service)) for _ in range(CONNECTIONS + 50)]
    try:
        for client in silent[-50:]:
            client.sendall(b"GET / HTT")
        for _ in range(20):
            assert service.ask("/healthz")[0] == 200
        silent[-1].settimeout(PATIENCE_S)
        assert silent[-1].recv(100) == b""
    finally:
        for client in silent:
            client.close()


def test_damaged_captures_and_bombs_are_recorded_once_and_hurt_nobody(service):
    bomb = service.folder / "traces" / "bomb"
    bomb.mkdir()
    with gzip.open(bomb / "rank0.json.gz", "wb", 9) as stream:
        stream.write(b'{"traceEvents": [')
        for _ in range(200):
            stream.write(b" " * 1_000_000)
    event = service.wait_for("not_analysed")
    assert event["capture"].startswith("bomb/rank0.json.gz")
    assert "a bomb" in event["problem"]
    (service.folder / "traces" / "empty.json").write_bytes(b"")
    service.wait_for("not_analysed", count=2)
    place_capture(service.folder, "after")
    service.wait_for("analysed", count=2)
    wanted = {"stored": 2, "failed": 2}
    service.ask_until(lambda data: data["pipelines"][0]["counts"] == wanted)


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
    with Watching(write_config(tmp_path, more=listen)) as watch:
        watch.url = watch.url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104 (behind its token)
        status, headers, text = watch.ask("/metrics")
        assert (status, headers["WWW-Authenticate"][:5]) == (401, "Basic")
        assert "debubble_" not in text
        for wrong in ("Bearer", "Bearer x", f"Bearer {TOKEN}x", "Basic !!", "Digest x"):
            assert watch.ask("/", headers={"Authorization": wrong})[0] == 401
        assert watch.ask("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200
        basic = "Basic OjAxMjM0NTY3ODlhYmNkZWYwMTIz"
        assert watch.ask("/", headers={"Authorization": basic})[0] == 200
        assert watch.ask("/healthz")[0] == watch.ask("/readyz")[0] == 200


def test_what_was_under_way_when_it_was_killed_is_taken_up_in_either_store(tmp_path, url):
    config = write_config(tmp_path, store=url)
    for number in range(5):
        place_capture(tmp_path, f"c{number}")
    for kill in (1, 2):
        with Watching(config) as watch:
            watch.wait_for("analysed", count=kill)
            watch.kill()
    with Watching(config) as watch:
        watch.ask_until(lambda data: data["pipelines"][0]["counts"] == {"stored": 5})
        assert watch.stop() == 0
    store = Store(url)
    tags = [record.tags["watch"] for record in store.named("train")]
    assert len(tags) == len(set(tags)) == 5
    assert len(Journal(store).captures("train")) == 5
    store.close()


def test_a_digest_stays_where_the_raw_trace_goes(tmp_path):
    traces = tmp_path / "traces"
    sources = "".join(
        f'[[source]]\nname = "{name}"\nfolder = "{traces}/{name}"\nsettle = "0s"\npoll = "100ms"\n'
        f'keep = 0\ndigests = "{digests}"\n'
        for name, digests in (("here", "beside"), ("away", tmp_path / "kept"))
    )
    sources += f'[[source]]\nname = "full"\nfolder = "{traces}/full"\nsettle = "0s"\n'
    sources += f'poll = "100ms"\nkeep = 0\ndigests = "{tmp_path}/a file"\n'
    (tmp_path / "a file").write_text("in the way of digests")
    config = write_config(tmp_path, sources=sources)
    for name in ("here", "away", "full"):
        place_capture(tmp_path, f"{name}/c0")
    with Watching(config) as watch:
        for name in ("here", "away"):
            watch.wait_for("pruned", source=name)
        watch.wait_for("analysed", source="full")
        assert watch.stop() == 0
        assert len([event for event in watch.events if event.get("event") == "analysed"]) == 3
    for kept in (traces / "here" / "c0", tmp_path / "kept" / "away" / "c0"):
        names = sorted(path.name for path in kept.iterdir())
        assert names == [f"rank{rank}.debubble.npz" for rank in range(4)]
    assert len(list(traces.rglob("*.gz"))) == 4  # of those without a digest


class Refusing(BaseHTTPRequestHandler):
    """A webhook's target that takes the second attempt."""

    taken: list

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.taken.append((self.headers["Idempotency-Key"], body))
        self.send_response(500 if len(self.taken) < 2 else 204)
        self.end_headers()

    def log_message(self, *_):
        pass


def queue_alert(database, *targets):
    """Have an alert wait for webhooks."""
    store = Store(f"sqlite:///{database}")
    journal = Journal(store)
    capture = journal.claim("train", "a", (), now_s=1.0)
    alert = Alert(pipeline="train", kind="traffic_moved", subject="x", message="m", raised_s=1.0,
                  capture_id=1, data={})  # fmt: skip
    outcome = analysis(sampled([0.1]))
    journal.finish(capture, outcome, now_s=4e9, judge=lambda state, *_: (state, [alert]),
                   targets=targets)  # fmt: skip
    store.close()


def test_a_webhook_that_refuses_is_asked_again_and_one_that_hangs_holds_up_nobody(tmp_path):
    """The socket accepts and never answers; the service stops all the same."""
    Refusing.taken = []
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = (server.server_port, silent.getsockname()[1])
        targets = [f"http://127.0.0.1:{port}/" for port in ports]
        config = write_config(tmp_path, more=f"webhooks = {json.dumps(targets)}\n")
        queue_alert(tmp_path / "history.db", *targets)
        with Watching(config) as watch, silent.accept()[0]:
            place_capture(tmp_path, "a")
            watch.wait_for("analysed")
            watch.wait_for("webhook_sent")
            wait_until(lambda: len(Refusing.taken) == 2)
            watch.process.send_signal(signal.SIGTERM)
            assert watch.process.wait(PATIENCE_S) == 0
    server.shutdown()
    server.server_close()
    keys, bodies = zip(*Refusing.taken, strict=True)
    assert set(keys) == {"debubble-alert-1"}
    assert bodies[0]["alert"]["kind"] == "traffic_moved"
