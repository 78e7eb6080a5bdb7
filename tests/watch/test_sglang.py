"""SGLang is captured by its own routes, and never left profiling."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager

import pytest
from support.services.engine_routes import serving
from support.services.watch_service import Watching, write_config
from support.traces.recordings import H200


class Engine:
    """Profiles from one order to the next, and serves ten requests meanwhile."""

    def __init__(self):
        self.profiling = False
        self.orders = []
        self.served = 0

    def order(self, path, body):
        if path == "/start_profile":
            self.orders.append(json.loads(body))
            self.profiling = True
            self.served += 10
            return 200, "Start profiling.\n"
        self.profiling = False
        for rank in range(4):
            name = f"{len(self.orders)}-PP-{rank}-rank{rank}.trace.json.gz"
            shutil.copy(
                H200 / "fwd_closed_m4" / f"rank{rank}.json.gz",
                f"{self.orders[-1]['output_dir']}/{name}",
            )
        return 200, "Stop profiling.\n"

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
    source = f'[[source]]\nname = "chat"\nfolder = "{folder}/traces"\nsettle = "0s"\n'
    source += (
        f'poll = "100ms"\n[source.server]\nurl = "{url}"\nkind = "sglang"\nseconds = "100ms"\n'
    )
    return write_config(folder, sources=source)


@pytest.mark.slow
def test_sglang_is_captured_and_its_prompts_say_the_context_length(tmp_path):
    """Four ranks tell the same queue of three: that is no pressure, though twelve would be."""
    with sglang() as (engine, url), Watching(configure(tmp_path, url)) as watch:
        watch.wait_for("analysed")
        shown = watch.ask_until(lambda data: data["pipelines"][0]["standings"])
        latest = shown["pipelines"][0]["captures"][-1]["finding"]
        assert (latest["context_source"], latest["bucket"]) == ("server", 512)
        assert latest["requests"] == {"512": 10.0}
        assert watch.stop() == 0
    (order,) = engine.orders
    assert order["output_dir"] == str(tmp_path / "traces")
    assert not engine.profiling
