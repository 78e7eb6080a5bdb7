"""`tune --server`: a server is started, asked, measured and ended, and the best setting is kept."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
from support.processes import PATIENCE_S, free_port, processes_with, wait_until
from support.services.console import REPOSITORY, type_command
from support.services.example_load import FILE

from debubble.annexes.tune.job import read_capture
from debubble.annexes.tune.process import MARK
from debubble.annexes.tune.server import answers, model_of, neighbours, planned
from debubble.annexes.tune.setting import SERVING_KNOBS, Setting, read_setting, read_template
from debubble.annexes.tune.task import Server
from debubble.errors import UsageError
from debubble.measure.load_results import LoadResult
from debubble.trace.server_notes import SCHEMA, ServerNotes, Span

TINY = shlex.join(
    [sys.executable, str(REPOSITORY / "tests" / "support" / "jobs" / "tiny_server.py")]
)
ENGINE = REPOSITORY / "examples" / "serve_pipeline" / "serve.py"


def test_what_lies_next_to_a_setting_is_tried_batches_in_flight_first_where_stages_starve():
    now = Setting(layers=(1, 1, 1, 5), in_flight=2, chunk=512)
    assert list(dict.fromkeys(neighbours(now, None))) == [
        Setting(layers=(1, 1, 1, 5), in_flight=4, chunk=512),
        Setting(layers=(2, 2, 2, 2), in_flight=2, chunk=512),
        Setting(layers=(1, 1, 1, 5), in_flight=1, chunk=512),
        Setting(layers=(1, 1, 1, 5), in_flight=2, chunk=1024),
        Setting(layers=(1, 1, 1, 5), in_flight=2, chunk=256),
    ]


class Noted:
    """A capture of which only the notes are looked at."""

    def __init__(self, waiting, capture=None):
        span = Span(seconds=2.0, requests_running=32.0, requests_waiting=waiting)
        self.server_notes = ServerNotes(
            schema=SCHEMA, kind="vllm", url="", began_unix_s=0.0, traces=(), before=span,
            during=span, after=None,
        )  # fmt: skip
        self.pipeline = self
        self.ranks = (0, 1)
        self.capture = capture

    def server_model(self, **known):
        return self.capture.server_model(**known)


def test_a_server_that_can_be_replayed_is_planned_for_and_others_are_not():
    """Recorded on an H200: four stages of 3, 3, 3 and 7 layers, under the profiler."""
    capture = read_capture(REPOSITORY / "tests" / "data" / "serving" / "u3337")
    load = LoadResult(
        clients=32, rate=None, seconds=30.0, failed=0, problem="", prompt_tokens=(512.0,),
        output_tokens=(48.0,), ttft_s=(0.1,), tpot_s=(), latency_s=(), out_per_s=1.0, in_per_s=1.0,
    )  # fmt: skip
    now = Setting(layers=(3, 3, 3, 7), in_flight=4)
    model = model_of(now, Noted(0.0, capture), load)
    assert model is not None
    gains = {
        candidate.setting.layers: candidate.expected.gain for candidate in planned(model, now, 1.0)
    }
    assert gains[4, 4, 4, 4] > 0.1
    # Where requests wait, or other batches are in flight than it was told, nothing is built on it.
    assert model_of(now, Noted(3.0, capture), load) is None
    assert model_of(now, Noted(None, capture), load) is None
    assert model_of(Setting(layers=(3, 3, 3, 7), in_flight=3), Noted(0.0, capture), load) is None
    assert model_of(now, None, load) is None


def test_a_batch_takes_more_requests_only_where_some_wait():
    now = Setting(requests_a_batch=8)
    assert [one.requests_a_batch for one in neighbours(now, Noted(3.0))] == [16, 4]
    assert [one.requests_a_batch for one in neighbours(now, Noted(0.0))] == [4]


def test_a_server_is_told_what_servers_can_be_told_and_its_folder():
    now = read_setting(["layers=3,3,3,7", "in_flight=4"])
    template = read_template(
        ["serve", "--layers={layers}", "-k", "{in_flight}", "{traces}"], now, SERVING_KNOBS
    )
    assert template.fill(now, traces="/t") == ("serve", "--layers=3,3,3,7", "-k", "4", "/t")
    assert str(now) == "layers 3,3,3,7, 4 in flight"
    with pytest.raises(UsageError, match="microbatches is nothing that can be tuned here"):
        read_template(["serve"], read_setting(["microbatches=4"]), SERVING_KNOBS)
    with pytest.raises(UsageError, match=r"no placeholder is called \{in_flight\}"):
        read_template(["train", "{in_flight}"], read_setting(["in_flight=4"]))


LOAD = f"{sys.executable} {FILE} {{url}} clients=2 prompt=4 output=8 warm-up=0.1"


def words_for(folder, port, *, way="", now="in_flight=1", runs=5, load=f"{LOAD} seconds=0.6"):
    return (
        f"debubble tune --server '{TINY} {port} {{in_flight}} 64 {way}' "
        f"--url http://127.0.0.1:{port} --load '{load}' --now {now} --runs {runs} "
        f"--out {folder / 'tune'}"
    )


def running(folder):
    """Processes of any run whose journal is in a folder."""
    journal = folder / "tune" / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    tokens = {line["token"] for line in lines if "token" in line}
    return processes_with(*(f"{MARK}={token}{of}" for token in tokens for of in ("", ".load")))


@pytest.mark.slow
def test_the_setting_that_serves_most_is_found_confirmed_and_nothing_is_left(tmp_path):
    said = type_command(f"{words_for(tmp_path, free_port())} --json", tmp_path)
    assert said.code == 0, said.text
    data = json.loads(said.out)
    assert data["now"] == {"in_flight": 1}
    assert data["winner"]["in_flight"] in {2, 4}
    assert data["verdict"] == "better"
    assert data["throughput_gain_fraction"] > 0.5
    first, *others = (run["measured"]["numbers"] for run in data["runs"])
    best = max(others, key=lambda numbers: numbers["tokens_per_s"])
    assert best["tpot_s"] < first["tpot_s"]
    assert best["ttft_s"] < first["ttft_s"]
    assert first["tpot_s"] > 0.008  # what one of its tokens takes
    assert f"{data['winner']['in_flight']}" in data["winner_command"]
    assert running(tmp_path) == []
    # Compared by hand it is the same.
    first, last = (tmp_path / "tune" / f"run00{number}" / "load.log" for number in (1, 2))
    compared = type_command(f"debubble compare {first} {last} --json", tmp_path)
    delta = json.loads(compared.out)["delta"]
    assert set(delta) == {"throughput", "ttft", "tpot", "request_latency"}
    assert delta["tpot"]["direction"] == delta["throughput"]["direction"] == "better"
    assert json.loads(compared.out)["verdict"] == "better"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("crash", "exit code 1: no room for the model"),
        ("dies", "exit code 3"),
        ("refuses", "no request was answered in 0.6 s: 503 too busy"),
        ("deaf", "no answer at"),
    ],
)
def test_a_server_that_cannot_be_measured_is_named_with_its_own_words(tmp_path, way, words):
    command = words_for(tmp_path, free_port(), way=way)
    said = type_command(f"{command} --minutes 0.05", tmp_path)
    assert said.code == 2
    assert "the unchanged server cannot be measured" in said.err
    assert words in said.err
    assert running(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "words"),
    [
        ("echo {url}", "the load measured nothing: it wrote no result"),
        ('sh -c "echo no such model; exit 3" {url}', "exit code 3: no such model"),
        ("no-such-program {url}", "no-such-program cannot be started"),
    ],
)
def test_a_load_that_measures_nothing_is_named_with_its_own_words(tmp_path, load, words):
    said = type_command(words_for(tmp_path, free_port(), load=load), tmp_path)
    assert said.code == 2
    assert words in said.err
    assert running(tmp_path) == []


@pytest.mark.slow
def test_a_rate_says_nothing_of_a_servers_best(tmp_path):
    """A generator that writes its result into {out}, as vLLM's does."""
    lines = {"total_input_tokens": 8, "total_output_tokens": 8, "completed": 2, "duration": 1.0,
             "output_throughput": 8.0, "request_rate": 2.0, "median_ttft_ms": 4.0}  # fmt: skip
    script = tmp_path / "load.sh"
    script.write_text(f"echo '{json.dumps(lines)}' > $2/result.json")
    said = type_command(
        words_for(tmp_path, free_port(), load=f"sh {script} {{url}} {{out}}"), tmp_path
    )
    assert said.code == 2
    assert "a rate is answered by any server that keeps up" in said.err


@pytest.mark.slow
def test_a_server_that_is_there_already_is_not_measured_for_another(tmp_path):
    port = free_port()
    other = subprocess.Popen([*shlex.split(TINY), str(port), "1", "64"])
    try:
        wait_for(port)
        said = type_command(words_for(tmp_path, port), tmp_path)
    finally:
        other.kill()
        other.wait()
    assert said.code == 2
    assert "something answers at" in said.err


def wait_for(port):
    server = Server(url=f"http://127.0.0.1:{port}", load=())
    wait_until(lambda: answers(server))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_tuning_that_is_ended_takes_its_server_with_it(tmp_path, how):
    port = free_port()
    words = shlex.split(words_for(tmp_path, port, load=f"{LOAD} seconds=300"))[1:]
    program = "import sys; from debubble.cli import main; main(sys.argv[1:])"
    tuning = subprocess.Popen(
        [sys.executable, "-c", program, *words], env=os.environ, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(port)
        assert running(tmp_path)
        tuning.send_signal(how)
        tuning.wait(PATIENCE_S)
    finally:
        tuning.kill()
        tuning.wait()
    wait_until(lambda: not running(tmp_path), "the server goes on")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--server 'x {in_flight}' --now in_flight=1", "--server needs --url and --load"),
        ("--url http://x --now in_flight=1", "--url is for a server"),
        ("--server x --url http://x --load 'l {url}' -- y", "both a server and a command"),
        ("--server x --url http://x --load clients=1 --now chunk=8", "is told {url}"),
    ],
)
def test_words_that_do_not_go_together_are_refused(tmp_path, words, problem):
    said = type_command(f"debubble tune {words}", tmp_path)
    assert said.code == 2
    assert problem in said.err


@pytest.mark.accuracy
def test_the_gloo_engine_ends_with_a_measured_gain_and_no_process(tmp_path):
    """Layers 1,1,1,5 with one batch of one request in flight: three stages wait at any time."""
    port = free_port()
    server = (
        f"{shlex.quote(sys.executable)} {ENGINE} --port {port} --width 32 --layer-us 3000 "
        "--requests 1 --layers {layers} --in-flight {in_flight} --folder {traces}"
    )
    said = type_command(
        f'debubble tune --server "{server}" --url http://127.0.0.1:{port} --kind vllm '
        f"--load '{sys.executable} {FILE} {{url}} "
        "clients=6 prompt=16 output=8 seconds=3 warm-up=1' "
        "--now layers=1,1,1,5 --now in_flight=1 --runs 4 --json "
        f"--out {tmp_path / 'tune'}",
        tmp_path,
    )
    assert said.code == 0, said.text
    data = json.loads(said.out)
    assert data["verdict"] == "better"
    assert data["throughput_gain_fraction"] > 0.2
    assert data["winner"]["in_flight"] > 1
    first = tmp_path / "tune" / "run001" / "traces"
    assert len(list(first.glob("*.json.gz"))) == 4
    assert (first / "server.debubble.json").exists()
    assert running(tmp_path) == []
