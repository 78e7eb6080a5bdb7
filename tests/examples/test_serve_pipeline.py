"""The example server, end to end: served, captured by its routes, and its bubble found."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from itertools import pairwise

import pytest
from support.processes import PATIENCE_S, free_port, processes_with, wait_until
from support.services.console import REPOSITORY, type_command
from support.services.example_load import import_load

pytestmark = pytest.mark.slow

drive, read_load = (getattr(import_load(), name) for name in ("drive", "read_load"))
EXAMPLE = REPOSITORY / "examples" / "serve_pipeline"
SHORT, LONG = 64, 600


@contextmanager
def serving(folder, *words):
    server = subprocess.Popen(
        [sys.executable, EXAMPLE / "serve.py", "--folder", folder, "--port", "0", *words],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield server.stdout.readline().split()[-1]
    finally:
        server.terminate()
        server.stdout.close()
        server.wait()


@contextmanager
def asking(url, *words):
    load = subprocess.Popen(
        [
            sys.executable,
            EXAMPLE / "load.py",
            url,
            f"prompt={SHORT}",
            "seconds=600",
            *words,
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        load.kill()
        load.wait()


def fetch(url, data=None):
    body = None if data is None else json.dumps(data).encode()
    with urllib.request.urlopen(url, data=body) as answer:  # noqa: S310 (our own server)
        return answer.read().decode()


def complete(url, tokens, **more):
    return json.loads(fetch(f"{url}/v1/completions", {"prompt": list(range(tokens)), **more}))


def find(folder):
    found = type_command(f"debubble find {folder} --json", folder.parent)
    assert found.code == 0, found.text
    return json.loads(found.text)


def find_of_one_request_at_a_time(tmp_path):
    out = tmp_path / "out"
    with serving(out) as url, asking(url, "clients=1", "output=1"):
        words = f"debubble capture --server {url} --kind vllm --seconds 1 --out {out}"
        said = type_command(f"{words} --json", tmp_path)
    assert said.code == 0, said.text
    assert len(json.loads(said.text)["traces"]) == 2
    return find(out)


def test_one_request_at_a_time_keeps_half_of_a_two_stage_pipeline_waiting(tmp_path):
    data = find_of_one_request_at_a_time(tmp_path)
    assert data["run"]["kind"] == "stream"
    assert data["stream"]["batches_in_flight"] == 1
    # On a busy machine it is hosts, the way back or the client that the next batch waits for.
    causes = data["ledger"]["causes"]
    waited_s = sum(causes[cause] for cause in ("in_flight", "host", "way_back", "no_work"))
    assert waited_s > 0.3 * data["ledger"]["total_s"]
    for rank in data["ledger"]["ranks"]:
        assert abs(sum(rank["causes"].values()) - data["stream"]["window_s"]) < 1e-8
    # One batch in flight over two stages: half of the time at least, and what the front takes.
    assert data["numbers"]["bubble_fraction"] > 0.5


def test_batches_are_chunks_of_prompts_beside_answers_so_many_in_flight(tmp_path):
    log = tmp_path / "batches.jsonl"
    words = ["--layers", "1,1,2", "--in-flight", "2", "--chunk", "40", "--requests", "3"]
    words += ["--layer-us", "2000", "--width", "32", "--log", str(log), "--labels"]
    with serving(tmp_path, *words) as url:
        load = read_load(["clients=8", "prompt=100", "output=12", "seconds=2", "warm-up=0.5"])
        result = drive(url, load)
        fetch(f"{url}/start_profile", {})
        complete(url, 100, max_tokens=4)
        fetch(f"{url}/stop_profile", {})
    batches = [json.loads(line) for line in log.read_text().splitlines()]
    assert {batch["chunk"] for batch in batches} == {0, 1, 20, 40}  # 1 is the first request
    assert {batch["slot"] for batch in batches} == {0, 1}
    assert max(batch["answers"] for batch in batches) == 3
    # No slot's batch leaves before its last one has landed.
    for slot in (0, 1):
        mine = [batch for batch in batches if batch["slot"] == slot]
        assert all(a["landed_unix_s"] <= b["left_unix_s"] for a, b in pairwise(mine))
    # Three stages of 2, 2 and 4 ms: no batch is through in less.
    took = [batch["landed_unix_s"] - batch["left_unix_s"] for batch in batches]
    assert min(took) >= 0.008
    # Of the last request alone: three chunks, and three tokens after the first.
    assert [batch["profiled"] for batch in batches].count(True) == 3 + 3
    assert result["failed"] == 0
    assert set(result["output_lens"]) == {12}
    assert len(list(tmp_path.glob("profile1-rank*.json.gz"))) == 3
    text = gzip.decompress((tmp_path / "profile1-rank1.json.gz").read_bytes()).decode()
    labels = re.findall(r"execute_context_\d\(\d+\)_generation_\d\(\d\)", text)
    assert list(dict.fromkeys(labels)) == [
        "execute_context_1(40)_generation_0(0)",
        "execute_context_1(20)_generation_0(0)",
        "execute_context_0(0)_generation_1(1)",
    ]


def test_the_demo_of_watch_takes_its_parts_with_it(tmp_path):
    port = free_port()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    demo = subprocess.Popen(
        [sys.executable, EXAMPLE / "watch_demo.py", "--port", str(port), "--stay"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert "requests of 512 tokens" in demo.stdout.readline()
        assert len(parts_of(tmp_path)) >= 4  # the front, its ranks, the load, the service
        demo.send_signal(signal.SIGTERM)
        _, errors = demo.communicate(timeout=PATIENCE_S)
    finally:
        demo.kill()
    wait_until(lambda: not parts_of(tmp_path), "processes are left")
    assert (demo.returncode, errors) == (0, "")


def parts_of(folder):
    """The processes whose environment names a folder."""
    return processes_with(f"TMPDIR={folder}")
