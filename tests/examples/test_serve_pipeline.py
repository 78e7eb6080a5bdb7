"""The example server, end to end: served, captured by its routes, and its bubble found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest
from support.services.console import REPOSITORY, type_command

pytestmark = pytest.mark.slow

EXAMPLE = REPOSITORY / "examples" / "serve_pipeline"
SHORT, LONG = 64, 512


@contextmanager
def serving(kind, folder):
    server = subprocess.Popen(
        [sys.executable, EXAMPLE / "serve.py", "--kind", kind, "--folder", folder, "--port", "0"],
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
def asking(url, clients):
    words = [url, "--tokens", str(SHORT), "--clients", str(clients), "--seconds", "600"]
    load = subprocess.Popen([sys.executable, EXAMPLE / "load.py", *words])
    try:
        yield
    finally:
        load.kill()
        load.wait()


def fetch(url, data=None):
    body = None if data is None else json.dumps(data).encode()
    with urllib.request.urlopen(url, data=body) as answer:  # noqa: S310 (our own server)
        return answer.read().decode()


def find(folder):
    found = type_command(f"debubble find {folder} --json", folder.parent)
    assert found.code == 0, found.text
    return json.loads(found.text)


def test_one_request_at_a_time_keeps_half_of_a_two_stage_pipeline_waiting(tmp_path):
    out = tmp_path / "out"
    with serving("vllm", out) as url, asking(url, clients=1):
        words = f"debubble capture --server {url} --kind vllm --seconds 1 --out {out} --json"
        said = type_command(words, tmp_path)
    assert said.code == 0, said.text
    assert len(json.loads(said.text)["traces"]) == 2
    data = find(out)
    assert data["run"]["kind"] in {"stream", "forward"}
    # One batch in flight over two stages: half of the time at least, and what the front takes.
    assert data["numbers"]["bubble_fraction"] > 0.5
    if data["stream"]:
        assert data["stream"]["batches_in_flight"] == pytest.approx(1, abs=0.2)


def test_sglang_counts_the_requests_and_prompts_are_counted_by_length(tmp_path):
    out = tmp_path / "out"
    with serving("sglang", tmp_path / "elsewhere") as url:
        with asking(url, clients=3):
            words = f"debubble capture --server {url} --kind sglang --steps 12 --out {out}"
            said = type_command(words, tmp_path)
        assert said.code == 0, said.text
        fetch(f"{url}/v1/completions", {"prompt": list(range(LONG))})
        metrics = fetch(f"{url}/metrics")
    assert len(list(out.glob("*.json.gz"))) == 2
    data = find(out)
    assert sum(stage["passes"]["F"]["n"] for stage in data["stages"]) == 2 * 12
    counts = {
        float(bound): int(count)
        for bound, count in re.findall(r'tokens_bucket\{.*le="(.+)"\} (\d+)', metrics)
    }
    assert counts[500.0] == counts[100.0] > 12
    assert counts[1000.0] == counts[100.0] + 1 == counts[float("inf")]
