"""Servers are captured when they are at ease, one at a time, and never left profiling."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import contextmanager

import pytest
from support.processes import wait_until
from support.services.engine_routes import serving
from support.services.watch_service import Watching, write_config
from support.traces.recordings import H200


class Engine:
    """A serving engine as seen from outside."""

    lock = threading.Lock()
    profiling = 0
    most_profiling = 0

    def __init__(self, folder):
        self.folder = folder
        self.waiting = 0.0
        self.tokens = 0
        self.captures = 0

    def page(self):
        self.tokens += 50
        waiting = f"vllm:num_requests_waiting {self.waiting}\n"
        return f"{waiting}vllm:generation_tokens_total {self.tokens}\n"

    def order(self, path, _body):
        self.start() if path == "/start_profile" else self.stop()
        return 200, ""

    def start(self):
        with Engine.lock:
            Engine.profiling += 1
            Engine.most_profiling = max(Engine.most_profiling, Engine.profiling)

    def stop(self):
        with Engine.lock:
            Engine.profiling -= 1
        self.captures += 1
        for rank in range(4):
            name = f"{self.captures}-rank{rank}.json.gz"
            shutil.copy(H200 / "fwd_closed_m4" / f"rank{rank}.json.gz", self.folder / name)


@pytest.fixture(autouse=True)
def _nothing_profiles_yet():
    """Count anew: a service killed at the end of a test may leave its engine profiling."""
    Engine.profiling = Engine.most_profiling = 0


@contextmanager
def engine(folder):
    folder.mkdir()
    one = Engine(folder)
    with serving(one.page, one.order) as one.url:
        yield one


def source_of(name, folder, url, kind, *, every="300ms", seconds="200ms"):
    return (
        f'[[source]]\nname = "{name}"\nfolder = "{folder}"\nsettle = "0s"\npoll = "100ms"\n'
        f'[source.server]\nurl = "{url}"\nkind = "{kind}"\nevery = "{every}"\n'
        f'seconds = "{seconds}"\n'
    )


def source(one, **words):
    return source_of(one.folder.name, one.folder, one.url, "vllm", **words)


def configure(folder, engines, *, witness=None, **said):
    """Write a configuration; a witness is captured all the time, whatever is said of the others."""
    sources = "".join(source(one, **said) for one in engines)
    sources += source(witness) if witness else ""
    return write_config(folder, sources=sources)


@pytest.mark.slow
def test_two_servers_are_never_captured_at_once(tmp_path):
    with engine(tmp_path / "a") as first, engine(tmp_path / "b") as second:
        with Watching(configure(tmp_path, [first, second])) as watch:
            watch.wait_for("capturing", count=3, source="a")
            watch.wait_for("capturing", count=3, source="b")
            watch.wait_for("analysed", source="a")
            assert watch.stop() == 0
        assert Engine.most_profiling == 1
        assert Engine.profiling == 0


@pytest.mark.slow
def test_a_server_under_pressure_is_left_alone_until_it_is_at_ease(tmp_path):
    with engine(tmp_path / "a") as one:
        one.waiting = 99.0
        with Watching(configure(tmp_path, [one])) as watch:
            assert "99 requests wait" in watch.wait_for("not_captured", count=3)["problem"]
            assert one.captures == 0
            one.waiting = 0.0
            watch.wait_for("analysed")


@pytest.mark.slow
def test_a_stop_ends_a_profile_early_and_never_leaves_it_on(tmp_path):
    with engine(tmp_path / "a") as one:
        with Watching(configure(tmp_path, [one], seconds="1h")) as watch:
            watch.wait_for("capturing")
            wait_until(lambda: Engine.profiling, "nothing is profiled")
            assert watch.stop() == 0
        assert (Engine.profiling, one.captures) == (0, 1)


@pytest.mark.slow
def test_a_profile_that_a_killed_service_left_on_is_ended_by_the_next(tmp_path):
    with engine(tmp_path / "a") as one:
        config = configure(tmp_path, [one], seconds="1h", every="1h")
        with Watching(config) as watch:
            watch.wait_for("capturing")
            wait_until(lambda: Engine.profiling, "nothing is profiled")
            watch.kill()
        assert Engine.profiling == 1
        with Watching(config) as watch:
            watch.wait_for("profile_ended")
            assert (Engine.profiling, one.captures) == (0, 1)
            watch.wait_for("analysed")


@pytest.mark.slow
def test_a_server_that_is_captured_is_not_captured_again_at_once_after_a_restart(tmp_path):
    """Meanwhile another server is captured again and again."""
    with engine(tmp_path / "a") as one, engine(tmp_path / "b") as other:
        config = configure(tmp_path, [one], every="1h", witness=other)
        with Watching(config) as watch:
            watch.wait_for("analysed", source="a")
            watch.kill()
        with Watching(config) as watch:
            watch.wait_for("capturing", count=4, source="b")
            assert watch.stop() == 0
        assert one.captures == 1


class Sglang:
    """Profiles from one order to the next into the folder that is ordered; tells its prompts."""

    def __init__(self):
        self.orders = []
        self.served = 0

    def order(self, path, body):
        if path == "/start_profile":
            self.orders.append(json.loads(body))
            self.served += 10
            return 200, "Start profiling.\n"
        for rank in range(4):
            name = f"{self.orders[-1]['output_dir']}/PP-{rank}-rank{rank}.trace.json.gz"
            shutil.copy(H200 / "fwd_closed_m4" / f"rank{rank}.json.gz", name)
        return 200, "Stop profiling.\n"

    def page(self):
        name, labels = "sglang:prompt_tokens_histogram_bucket", 'model_name="m"'
        bounds = (("300.0", 0), ("500.0", self.served), ("+Inf", self.served))
        lengths = "".join(f'{name}{{le="{le}",{labels}}} {count}\n' for le, count in bounds)
        ranks = (f'{{{labels},pp_rank="{rank}",tp_rank="0"}}' for rank in range(4))
        return lengths + "".join(f"sglang:num_queue_reqs{one} 3.0\n" for one in ranks)


@pytest.mark.slow
def test_sglang_is_captured_and_its_prompts_say_the_context_length(tmp_path):
    """Four ranks tell the same queue of three: that is no pressure, though twelve would be."""
    engine = Sglang()
    with serving(engine.page, engine.order) as url:
        sources = source_of("chat", tmp_path / "traces", url, "sglang")
        with Watching(write_config(tmp_path, sources=sources)) as watch:
            watch.wait_for("analysed")
            shown = watch.ask_until(lambda data: data["pipelines"][0]["standings"])
            assert watch.stop() == 0
    finding = shown["pipelines"][0]["captures"][-1]["finding"]
    assert (finding["context_source"], finding["bucket"]) == ("server", 512)
    assert finding["requests"] == {"512": 10.0}
    assert engine.orders[0]["output_dir"] == str(tmp_path / "traces")
