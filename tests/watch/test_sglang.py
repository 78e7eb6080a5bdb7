"""SGLang is captured by the number of its own steps, and never left profiling."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import contextmanager

import pytest
from support.services.engine_routes import serving
from support.services.watch_service import Watching, write_config
from support.traces.recordings import H200

STEPS = 6


class Engine:
    """Profiles so many steps once told to, and ends by itself where it has requests."""

    def __init__(self):
        self.has_requests = True
        self.profiling = False
        self.orders = []
        self.ended = 0
        self.served = 0
        self.started = threading.Event()

    def start(self, order):
        self.orders.append(order)
        self.profiling = True
        if self.has_requests:
            self.served += 10
            self.stop()
        self.started.set()

    def stop(self):
        if not self.profiling:
            return False
        self.profiling, self.ended = False, self.ended + 1
        order = self.orders[-1]
        for rank in range(4):
            name = f"{self.ended}-PP-{rank}-rank{rank}.trace.json.gz"
            shutil.copy(
                H200 / "fwd_closed_m4" / f"rank{rank}.json.gz", f"{order['output_dir']}/{name}"
            )
        return True

    def order(self, path, body):
        if path == "/start_profile":
            self.start(json.loads(body))
            return 200, "Start profiling.\n"
        if self.stop():
            return 200, "Stop profiling.\n"
        return 500, "Profiling is not in progress. Call /start_profile first."

    def page(self):
        name, labels = "sglang:prompt_tokens_histogram_bucket", 'model_name="m"'
        bounds = (("300.0", 0), ("500.0", self.served), ("+Inf", self.served))
        lengths = "".join(f'{name}{{le="{le}",{labels}}} {count}\n' for le, count in bounds)
        ranks = (f'{{{labels},pp_rank="{rank}",tp_rank="0"}}' for rank in range(4))
        return lengths + "".join(f"sglang:num_queue_reqs{one} 3.0\n" for one in ranks)


@contextmanager
def sglang():
    engine = Engine()
    with serving(engine.page, engine.order) as url:
        yield engine, url


def configure(folder, url):
    source = f'[[source]]\nname = "chat"\nfolder = "{folder}/traces"\nserver = "{url}"\n'
    source += f'kind = "sglang"\njitter = "0%"\nsteps = {STEPS}\nsettle = "0s"\npoll = "100ms"\n'
    return write_config(folder, sources=source)


@pytest.mark.slow
def test_sglang_is_told_its_steps_and_its_prompts_say_the_context_length(tmp_path):
    """Four ranks tell the same queue of three: that is no pressure, though twelve would be."""
    with sglang() as (engine, url), Watching(configure(tmp_path, url)) as watch:
        watch.wait_for("analysed")
        shown = watch.ask_until("/api/pipelines", lambda data: data["pipelines"][0]["latest"])
        latest = shown["pipelines"][0]["latest"]
        assert (latest["context_source"], latest["context_bucket"]) == ("server", 512)
        assert latest["requests"] == {"512": 10.0}
        assert watch.stop() == 0
    (order,) = engine.orders
    assert (order["num_steps"], order["output_dir"]) == (STEPS, str(tmp_path / "traces"))
    assert not engine.profiling


@pytest.mark.slow
def test_a_stop_does_not_wait_for_steps_that_never_come(tmp_path):
    with sglang() as (engine, url):
        engine.has_requests = False
        with Watching(configure(tmp_path, url)) as watch:
            watch.wait_for("capturing")
            assert engine.started.wait(60)
            assert watch.stop() == 0
            problem = watch.wait_for("not_captured")["problem"]
        assert "the service stops" in problem
    assert (engine.profiling, engine.ended) == (False, 1)
