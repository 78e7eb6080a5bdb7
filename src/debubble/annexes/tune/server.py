"""A server's command, its address and a load in → its runs, and what may be tried next.

A run is: the server started, waited for until it answers, put under the load, measured by what its
users see, captured where its engine is known, and ended with all that came of it. The load is a
command of the user's: `vllm bench serve`, guidellm or aiperf.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from debubble.analysis import Analysis
from debubble.annexes.tune.job import read_capture
from debubble.annexes.tune.journal import LOG, Expectation, Kind, Outcome, Run
from debubble.annexes.tune.process import guarded, run_guarded, say_failure
from debubble.annexes.tune.setting import TRACES, Setting, fill_words
from debubble.annexes.tune.standing import Candidate, Candidates, Standing
from debubble.annexes.tune.task import Limits, Server, Task
from debubble.capture.fetch import NoAnswer, fetch
from debubble.capture.files import prepare_out
from debubble.capture.server import ServerOrder, capture_server
from debubble.errors import DebubbleError, TuneError
from debubble.measure.load_results import (
    LoadResult,
    measure_load,
    parse_load_result,
    read_load_result,
)
from debubble.measure.measurement import Measurement
from debubble.plan.baseline import even_split
from debubble.plan.server import plan_server
from debubble.serving.model import ServerModel
from debubble.serving.traffic import Traffic

RESULTS, LOAD_LOG = "load", "load.log"
"""In the folder of a run: what the load wrote of its users, and what it printed."""
_POLL_S = 0.2
# Large models are read from a network's disks: many minutes.
_READY_S = 1800.0
# Long enough for some hundred batches, short enough for the file to be read; and as long before and
# after, to see what the profiler costs.
_CAPTURED_S = 2.0
# A load has come to its middle by then, whatever it does at its start.
_MIDDLE_AT_MOST_S = 60.0
# Of looks at a server now and then: below this, none waits for its turn.
_SOME_WAIT = 0.5
# More batches in flight than so many a stage have never been of use.
_MOST_A_STAGE = 4


def answers(server: Server) -> bool:
    """Tell whether a server is ready to serve."""
    for route in ("health", "v1/models"):
        try:
            reply = fetch(f"{server.url.rstrip('/')}/{route}")
        except NoAnswer:
            return False
        if reply.status != 404:
            return reply.ok
    return False


def _await(server: Server, guard: subprocess.Popen[bytes], until_s: float) -> Kind:
    """Wait until a server is ready to be measured, has ended, or takes too long."""
    while not answers(server):
        if guard.poll() is not None:
            return Kind.CRASHED
        if time.monotonic() > until_s:
            return Kind.HUNG
        time.sleep(_POLL_S)
    return Kind.MEASURED


def _load_words(server: Server, out: Path) -> tuple[str, ...]:
    """Return the load's command, with its result to be written into a folder."""
    prepare_out(out)
    return fill_words(server.load, {"url": server.url.rstrip("/"), "out": str(out.resolve())})


def run_load(server: Server, out: Path, token: str, timeout_s: float | None) -> LoadResult:
    """Run the load's command to its end, and read what it wrote or printed."""
    results, log = out / RESULTS, out / LOAD_LOG
    began = time.time()
    ended = run_guarded(
        _load_words(server, results),
        os.environ,
        token=f"{token}.load",
        log=log,
        timeout_s=timeout_s,
    )
    if ended.code is None:
        raise TuneError(f"the load was not through after {ended.seconds:.0f} s")
    result = read_result(results, log, began)
    if result is None:
        words = say_failure(ended.code, log)[1] if ended.code else "it wrote no result"
        raise TuneError(
            f"the load measured nothing: {words}",
            hint="vllm bench serve … --save-result --result-dir {out}; "
            "guidellm benchmark … --output-dir {out}; aiperf profile … --artifact-dir {out}",
        )
    return result


def read_result(results: Path, log: Path, since_s: float = 0.0) -> LoadResult | None:
    """Return the newest result in a folder, else what the load printed last."""
    files = [file for file in results.rglob("*.json") if file.stat().st_mtime >= since_s]
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        if (result := read_load_result(file)) is not None:
            return result
    printed = log.read_bytes() if log.exists() else b""
    lines = [line for line in printed.splitlines() if line.startswith(b"{")]
    return parse_load_result(lines[-1]) if lines else None


@contextlib.contextmanager
def _loaded(server: Server, out: Path, token: str) -> Iterator[None]:
    """Keep a server under its load, over and over, until left; what that measures is nothing."""
    ended = threading.Event()

    def keep_on() -> None:
        words = _load_words(server, out / "load-again")
        log = out / "load-again.log"
        while not ended.is_set():
            with guarded(words, os.environ, token=f"{token}.load", log=log) as load:
                while load.poll() is None and not ended.wait(_POLL_S):
                    pass

    thread = threading.Thread(target=keep_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def model_of(now: Setting, capture: Analysis | None, load: LoadResult | None) -> ServerModel | None:
    """Return the captured server as it is replayed; None where that does not fit what ran.

    A queue before the batches is not replayed: where requests wait, more batches serve more.
    """
    around = capture.server_notes.around if capture and capture.server_notes else None
    waiting = None if around is None else around.requests_waiting
    if capture is None or waiting is None or waiting >= _SOME_WAIT:
        return None
    traffic = None
    if load is not None and load.clients is not None and load.prompt_tokens:
        lengths = [max(1, round(length)) for length in load.prompt_tokens]
        traffic = Traffic(
            clients=load.clients,
            prompts=tuple(
                (length, lengths.count(length) / len(lengths)) for length in sorted(set(lengths))
            ),
            output=max(1, round(sum(load.output_tokens) / len(load.output_tokens))),
        )
    try:
        model = capture.server_model(layers=now.layers, traffic=traffic)
    except DebubbleError:
        return None
    return model if now.in_flight in {None, model.setting.in_flight} else None


def planned(model: ServerModel, now: Setting, ahead: float) -> Iterator[Candidate]:
    """Yield what a plan of the server would try, of what it is told: the best first."""
    knobs = {
        "in_flight": "in_flight",
        "chunk": "chunk",
        "split": "layers",
        "requests": "requests_a_batch",
    }
    for option in plan_server(model):
        wanted = {knobs.get(kind, kind) for kind in option.kinds}
        tellable = all(getattr(now, knob, None) is not None for knob in wanted)
        if tellable and option.verdict in {"yes", "try", "maybe"}:
            yield Candidate(
                setting=replace(now, **{knob: getattr(option.setting, knob) for knob in wanted}),
                expected=Expectation(
                    gain=ahead * (1 + option.gain) - 1,
                    low=ahead * option.low - 1,
                    high=ahead * option.high - 1,
                    batch_latency_s=option.served.tpot_s,
                ),
            )


def neighbours(now: Setting, capture: Analysis | None) -> Iterator[Setting]:
    """Yield what lies next to a setting, the most promising first.

    Layers cut evenly, batches in flight, chunks and requests halved and doubled; a batch takes more
    requests only where some wait. `capture` is of a run of that setting, where there is one.
    """
    notes = None if capture is None else capture.server_notes
    around = None if notes is None else notes.around
    none_wait = around is not None and around.requests_waiting == 0
    stages = 1 if capture is None else len(capture.pipeline.ranks)
    stages = stages if now.layers is None else len(now.layers)
    # With fewer batches than stages some stage has nothing to do, however the layers are cut.
    if now.in_flight is not None and now.in_flight < stages:
        yield replace(now, in_flight=2 * now.in_flight)
    if now.layers is not None:
        yield replace(now, layers=even_split(sum(now.layers), len(now.layers)))
    for knob, most in (
        ("in_flight", max(stages, 2) * _MOST_A_STAGE),
        ("chunk", None),
        ("requests_a_batch", now.requests_a_batch if none_wait else None),
        ("tokens_a_batch", None),
    ):
        value = getattr(now, knob)
        for other in () if value is None else (2 * value, value // 2):
            if 1 <= other <= (most or other):
                yield replace(now, **{knob: other})


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Trials of a server that is started, asked and ended for each run."""

    task: Task
    server: Server
    readings: dict[int, Analysis] = field(default_factory=dict)
    """What was read of each run that was captured."""

    def candidates(self, standing: Standing) -> Candidates:
        """Plan from the best run so far where its capture can be replayed; else its neighbours."""
        source = standing.source
        if source is None:
            return Candidates()
        now, capture = source.setting, self._capture_of(standing, source)
        folder = self.task.folder_of(source.number)
        model = model_of(now, capture, read_result(folder / RESULTS, folder / LOAD_LOG))
        found = [
            Candidate(setting=setting, expected=None)
            for setting in dict.fromkeys(neighbours(now, capture))
            # Of what the model has, its plan says more.
            if model is None or "tokens_a_batch" in setting.differing(now)
        ]
        if model is not None:
            found = [*planned(model, now, 1 + standing.gain_of(now)), *found]
        tries = (candidate for candidate in found if standing.is_open(candidate.setting))
        return Candidates(tries=tuple(tries))

    def _capture_of(self, standing: Standing, source: Run) -> Analysis | None:
        """Return the capture of a setting: a run that confirms it has none."""
        for run in standing.of(source.setting):
            traces = self.task.folder_of(run.number) / TRACES
            with contextlib.suppress(DebubbleError):
                if run.number not in self.readings and any(traces.rglob("*.json.gz")):
                    self.readings[run.number] = read_capture(traces)
            if run.number in self.readings:
                return self.readings[run.number]
        return None

    def run(self, run: Run, standing: Standing, limits: Limits) -> Outcome:
        """Serve a setting once under the load; the server is gone when this returns."""
        server, out = self.server, self.task.folder_of(run.number)
        if answers(server):
            raise TuneError(
                f"something answers at {server.url} already",
                hint="end it, or give the address that the command serves at",
            )
        traces, log = out / TRACES, out / LOG
        prepare_out(traces)
        words = self.task.template.fill(run.setting, traces=str(traces.resolve()))
        began, note = time.monotonic(), ""
        measurement: Measurement | None = None
        with guarded(words, os.environ, token=run.token, log=log) as guard:
            kind = _await(server, guard, began + (limits.timeout_s or _READY_S))
            ready = time.monotonic()
            if kind is Kind.HUNG:
                note = f"stopped: no answer at {server.url} after {ready - began:.0f} s"
            elif kind is Kind.MEASURED:
                try:
                    measurement = measure_load(run_load(server, out, run.token, limits.timeout_s))
                except DebubbleError as error:
                    kind, note = Kind.UNREADABLE, str(error)
            if (code := guard.poll()) is not None:
                kind, note = say_failure(code, log)
            elif measurement is not None and server.kind and not standing.of(run.setting):
                middle_s = min((time.monotonic() - ready) / 2, _MIDDLE_AT_MOST_S)
                with _loaded(server, out, run.token):
                    time.sleep(middle_s)
                    note = self._capture(server.kind, traces, run)
        return Outcome(
            kind=kind,
            seconds=time.monotonic() - began,
            message=note,
            measurement=measurement if kind is Kind.MEASURED else None,
        )

    def _capture(self, kind: str, traces: Path, run: Run) -> str:
        """Have the server profile itself; what fails here is said, and spoils no measurement."""
        order = ServerOrder(
            url=self.server.url,
            kind=kind,
            out=traces,
            seconds=_CAPTURED_S,
            around_s=_CAPTURED_S,
        )
        try:
            captured = capture_server(order)
            if not captured.files:
                return f"not captured: {captured.note}"
            self.readings[run.number] = read_capture(traces)
        except DebubbleError as error:
            return f"not captured: {error}"
        return ""

    def refuse(self, first: Run) -> None:
        """Refuse to go on from a first run that tells nothing."""
        measured = first.outcome.measurement
        if measured is not None and measured.served is not None and measured.served.open_loop:
            raise TuneError(
                "a rate is answered by any server that keeps up, and says nothing of its best",
                hint="give a load of clients that wait; compare takes loads with a rate",
            )
        if measured is None:
            log = self.task.folder_of(first.number) / LOG
            raise TuneError(
                f"the unchanged server cannot be measured: {first.outcome.message}",
                hint=f"its output is in {log}; mend it and type the same again",
            )
