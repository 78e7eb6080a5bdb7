"""A running service for tests: started, asked, killed; and captures for it to find."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

from support.processes import PATIENCE_S, wait_until
from support.traces.recordings import H200

from debubble.annexes.watch.analyse import Finding, Outcome, PlannedChange
from debubble.annexes.watch.judge import Capture
from debubble.measure.measurement import Measurement


def write_config(folder, *, sources="", more="", store=None):
    """Write a configuration with one folder source, unless others are given."""
    traces = folder / "traces"
    traces.mkdir(exist_ok=True)
    source = sources or (
        f'[[source]]\nname = "train"\nfolder = "{traces}"\nsettle = "200ms"\npoll = "100ms"\n'
    )
    config = folder / "watch.toml"
    listen = "" if "[listen]" in more else '[listen]\naddress = "127.0.0.1:0"\n'
    store = store or f"sqlite:///{folder}/history.db"
    config.write_text(f'store = "{store}"\n{more}\n{listen}{source}')
    return config


def place_capture(folder, name, recorded="fwd_closed_m4"):
    """Put a recorded run where the service looks."""
    target = folder / "traces" / name
    shutil.copytree(H200 / recorded, target, ignore=shutil.ignore_patterns("truth*"))
    return target


class Watching:
    """One service, in a process of its own."""

    def __init__(self, config, **patience):
        """Start it, as the verb does, or with less patience."""
        program = "from pathlib import Path; from debubble.annexes.watch.run import serve; "
        program += "from debubble.annexes.watch.service import Patience; "
        program += f"serve(Path({str(config)!r}), None, Patience(**{patience}))"
        words = ["-m", "debubble", "watch", "--config", str(config)]
        self.process = subprocess.Popen(
            [sys.executable, *(["-c", program] if patience else words)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        self.events = []
        self._news = threading.Condition()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.url = self.wait_for("started")["url"]

    def _listen(self):
        for line in self.process.stderr:
            with self._news:
                self.events.append(json.loads(line) if line.startswith("{") else {"text": line})
                self._news.notify_all()

    def wait_for(self, event, count=1, **fields):
        """Return the event of that name once it was logged so often."""

        def found():
            return [
                one
                for one in self.events
                if one.get("event") == event and fields.items() <= one.items()
            ]

        deadline = time.monotonic() + PATIENCE_S
        with self._news:
            while len(found()) < count:
                assert time.monotonic() < deadline, f"no {event} {fields} in {self.events}"
                assert self.process.poll() is None or found(), self.events
                self._news.wait(0.2)
            return found()[count - 1]

    def ask(self, path, *, method="GET", headers=None, body=None):
        """Return status, headers and text."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=30)
        try:
            connection.request(method, path, body=body, headers=headers or {})
            with connection.getresponse() as answer:
                return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()

    def data(self):
        status, _, text = self.ask("/api")
        assert status == 200, text
        return json.loads(text)

    def pipelines(self):
        return {pipeline["name"]: pipeline for pipeline in self.data()["pipelines"]}

    def ask_until(self, is_wanted):
        """Ask for data until they are as wanted: what is shown is a second old at most."""
        wait_until(lambda: is_wanted(self.data()), "the data are not as wanted")
        return self.data()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE_S)
        return self.process.returncode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._listener.join(PATIENCE_S)
        self.process.stderr.close()


def finding(**given):
    """What came of a capture, made up."""
    return Finding(
        **{
            "bucket": 512,
            "context_source": "label",
            "requests": {512: 10.0},
            "metrics": {
                "bubble_fraction": 0.2,
                "batch_latency_s": 0.1,
                "microbatches_per_s": 80.0,
            },
            "causes": {},
            "theory": None,
            "schedule": "1f1b",
            "stages": (),
            "hops": (),
            "plan": PlannedChange(change=""),
            "warnings": (),
        }
        | given
    )


def made_up(number=7, **given):
    """A capture as it stands, made up."""
    return Capture(
        **{
            "id": number,
            "pipeline": "train",
            "key": f"{number}.json 1 2",
            "state": "stored",
            "found_s": float(number),
            "attempts": 1,
            "files": (),
            "problem": None,
            "finding": finding(),
        }
        | given
    )


def analysis(measurement: Measurement, **given):
    return Outcome(finding=finding(**given), measurement=measurement, seconds=0.1)
