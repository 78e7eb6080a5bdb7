"""Real parts from end to end: a pipelined server, its load, captures on schedule, Prometheus."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from functools import partial

import pytest
from support.measurements import sampled
from support.processes import free_port, wait_until
from support.services.console import REPOSITORY
from support.services.watch_service import Watching, analysis, write_config

from debubble.annexes.watch.config import Drift
from debubble.annexes.watch.journal import Journal
from debubble.annexes.watch.judge import judge
from debubble.annexes.watch.run import read_file
from debubble.measure.store import Store

pytestmark = pytest.mark.slow

EXAMPLE = REPOSITORY / "examples" / "serve_pipeline"
REFERENCE = 10
# Of ten captures that are compared, one of other lengths is enough, and two are sure.
DELAY = 5


@contextmanager
def serving(folder):
    words = ["--kind", "vllm", "--folder", str(folder), "--port", "0", "--layers", "1,1"]
    # Batches take their time asleep: the machine is free for what is tested.
    words += ["--chunk", "4096", "--token-us", "10"]
    server = subprocess.Popen(
        [sys.executable, EXAMPLE / "serve.py", *words], stdout=subprocess.PIPE, text=True
    )
    try:
        yield server.stdout.readline().split()[-1]
    finally:
        server.terminate()
        server.stdout.close()
        server.wait()


@contextmanager
def asking(url, tokens):
    words = ["clients=2", f"prompt={tokens}", "output=1", "seconds=600"]
    load = subprocess.Popen(
        [sys.executable, EXAMPLE / "load.py", url, *words], stdout=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        load.kill()
        load.wait()


def configure(folder, server):
    source = (
        f'[[source]]\nname = "chat"\nfolder = "{folder}/traces"\nsettle = "0s"\npoll = "50ms"\n'
        f'keep = 2\n[source.server]\nurl = "{server}"\nkind = "vllm"\nevery = "100ms"\n'
        'seconds = "100ms"\n'
    )
    return write_config(folder, sources=source, more=f"[drift]\nreference = {REFERENCE}\n")


def alerts(watch):
    return watch.data()["alerts"]


@contextmanager
def prometheus(folder, target):
    """A real Prometheus with the rules of the package; None where there is none."""
    program, promtool = shutil.which("prometheus"), shutil.which("promtool")
    if program is None or promtool is None:
        yield None
        return
    (folder / "rules.yml").write_text(read_file("rules"))
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        "rule_files: [rules.yml]\nscrape_configs:\n  - job_name: debubble\n"
        f"    static_configs: [{{targets: ['{target}']}}]\n"
    )
    config = folder / "prometheus.yml"
    subprocess.run([promtool, "check", "config", config], check=True, stdout=subprocess.DEVNULL)
    port = free_port()
    server = subprocess.Popen(
        [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}",
         f"--web.listen-address=127.0.0.1:{port}"],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def firing(url):
    """The alerts that fire; none while Prometheus starts."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/alerts", timeout=10) as answer:  # noqa: S310
            found = json.load(answer)["data"]["alerts"]
    except OSError:
        return set()
    return {one["labels"]["alertname"] for one in found if one["state"] == "firing"}


def remember_short_requests(folder):
    """Have a store in which this source was captured before, serving short requests alone."""
    store = Store(f"sqlite:///{folder}/history.db")
    journal = Journal(store)
    settings = Drift(reference=REFERENCE)
    for number in range(REFERENCE):
        capture = journal.claim("chat", str(number), (), now_s=float(number))
        known = analysis(sampled([0.01]), bucket=1024, requests={1024: 20.0})
        journal.finish(capture, known, now_s=1.0, judge=partial(judge, settings=settings))
    store.close()


def find_shift(tmp_path, learn):
    """Serve short requests, then long ones; return what the alert says of the change."""
    traces = tmp_path / "traces"
    traces.mkdir()
    with serving(traces) as server, Watching(configure(tmp_path, server)) as watch:
        learn(watch, server)
        assert alerts(watch) == []
        before = sum(one.get("event") == "analysed" for one in watch.events)
        with asking(server, 2048):
            watch.wait_for("alert", kind="traffic_moved")
        after = sum(one.get("event") == "analysed" for one in watch.events)
        assert after - before <= DELAY + 2  # two captures may still be of the old load
        watch.ask_until(lambda data: data["alerts"])
        (moved,) = [one for one in alerts(watch) if one["kind"] == "traffic_moved"]
        assert moved["data"]["before"] == {"1024": 1.0}
        assert "8192" in moved["data"]["after"]
        change = moved["data"]["batch_latency_s"]
        parts = change["traffic_moved"] + change["buckets_slower"]
        assert parts == pytest.approx(change["after"] - change["before"])
        latest = watch.pipelines()["chat"]["captures"][0]
        assert latest["finding"]["context_source"] == "server"
        with prometheus(tmp_path, watch.url.removeprefix("http://")) as url:
            if url is not None:
                wait_until(lambda: "DebubbleTrafficMoved" in firing(url), "no alert fires")
        status, _, _ = watch.ask(f"/alerts/{moved['id']}/acknowledge", method="POST")
        assert status == 303
        shown = watch.data()["alerts"]
        assert all(one["acknowledged_s"] for one in shown if one["kind"] == "traffic_moved")
        assert watch.stop() == 0
        return change


def test_traffic_that_shifts_is_captured_detected_attributed_and_alerted(tmp_path):
    """What was served before, it knows from its store; the long requests are real."""
    remember_short_requests(tmp_path)
    assert find_shift(tmp_path, lambda _watch, _server: None)["traffic_moved"] > 0


@pytest.mark.accuracy
def test_most_of_the_change_is_put_down_to_traffic_where_nothing_else_changed(tmp_path):
    def serve_short_requests(watch, server):
        with asking(server, 512):
            watch.wait_for("analysed", count=REFERENCE + 2)

    change = find_shift(tmp_path, serve_short_requests)
    assert change["traffic_moved"] > abs(change["buckets_slower"])
    assert change["traffic_moved"] > 0.5 * (change["after"] - change["before"])
