"""The profiling routes of serving engines, driven over real HTTP; a real profiler answers."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from support.jobs.forked_ranks import environment_of_ranks
from support.services.engine_routes import serving

from debubble.capture import server as capturing
from debubble.capture.server import ServerOrder, capture_server
from debubble.errors import CaptureError, UsageError

pytestmark = pytest.mark.slow


@contextmanager
def profiled(folder):
    command = [sys.executable, "-m", "support.jobs.profiled_server", str(folder)]
    with subprocess.Popen(
        command,
        env=environment_of_ranks(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """A server that writes its traces into a folder of its own, and that folder."""
    folder = tmp_path_factory.mktemp("vllm")
    with profiled(folder) as url:
        yield url, folder


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    """A server that is told where to write its traces."""
    with profiled(tmp_path_factory.mktemp("elsewhere")) as url:
        yield url


def answering(code, text=""):
    """Lend a server that answers every order alike, without a profiler."""
    return serving(lambda: "", lambda _path, _body: (code, text))


def order(url, folder, kind="vllm", **more):
    return ServerOrder(url=url, kind=kind, out=folder, **{"seconds": 0.2, **more})


def inferences_in(answer):
    (file,) = answer.files
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return [event["name"] for event in events].count("aten::linear")


def test_vllm_is_started_and_stopped_and_its_traces_are_found(vllm):
    url, folder = vllm
    first = capture_server(order(url, folder))
    again = capture_server(order(url + "/", folder))
    assert "profiling overhead unknown" in first.note  # it has no metrics
    assert first.files != again.files
    assert inferences_in(first) > 0


def test_sglang_is_told_where_to_write_and_stopped(sglang, tmp_path):
    answer = capture_server(order(sglang, tmp_path / "out", kind="sglang"))
    assert [file.parent for file in answer.files] == [tmp_path / "out"]
    assert inferences_in(answer) > 0


def test_traces_on_another_machine_are_said_to_be_there(vllm, tmp_path):
    answer = capture_server(order(vllm[0], tmp_path / "out"))
    assert answer.files == ()
    assert "torch_profiler_dir" in answer.note


def test_an_interrupted_capture_does_not_leave_the_server_profiling(vllm):
    def interrupt(_seconds):
        raise KeyboardInterrupt

    url, folder = vllm
    before = len(list(folder.glob("*.json.gz")))
    with pytest.raises(KeyboardInterrupt):
        capture_server(order(url, folder), sleep=interrupt)
    assert len(list(folder.glob("*.json.gz"))) == before + 1


@pytest.mark.parametrize(("kind", "cure"), [("vllm", "--profiler-config"), ("sglang", "router")])
def test_missing_routes_come_with_the_way_to_have_them(tmp_path, kind, cure):
    with answering(404) as url, pytest.raises(CaptureError) as refusal:
        capture_server(order(url, tmp_path, kind=kind))
    assert "no profiling routes" in refusal.value.message
    assert cure in refusal.value.hint
    if kind == "vllm":
        config = json.loads(refusal.value.hint.partition("'")[2].rpartition("'")[0])
        assert config["ignore_frontend"] is True
        assert config["max_iterations"] > 100
        assert config["torch_profiler_with_stack"] is False


def test_what_the_server_says_of_its_failure_is_passed_on(tmp_path):
    with (
        answering(500, "no room for the profiler") as url,
        pytest.raises(CaptureError) as refusal,
    ):
        capture_server(order(url, tmp_path))
    assert "answered 500" in refusal.value.message
    assert "no room for the profiler" in refusal.value.message


def test_an_answer_that_is_late_is_called_late(tmp_path, monkeypatch):
    monkeypatch.setattr(capturing, "_PATIENCE_S", 0.5)
    end = threading.Event()

    def late(path, _body):
        if path == "/stop_profile":
            end.wait()
        return 200, ""

    with serving(lambda: "", late) as url, pytest.raises(CaptureError) as refusal:
        capture_server(order(url, tmp_path))
    end.set()
    assert "stop_profile: no answer within 0.5 s" in refusal.value.message
    assert "still be writing" in refusal.value.hint


def test_nobody_at_the_address_is_said_plainly(tmp_path):
    with answering(200) as url:
        pass
    with pytest.raises(CaptureError, match="refused"):
        capture_server(order(url, tmp_path))


def test_an_address_without_a_scheme_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is no address"):
        order("localhost:8000", tmp_path)
