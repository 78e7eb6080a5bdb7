"""A server's command, its address and a load in → the setting that serves best, by serving it.

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
from dataclasses import dataclass, field, replace
from pathlib import Path

from debubble.analysis import Analysis
from debubble.annexes.tune.journal import Expectation, Run
from debubble.annexes.tune.loop import Budget, Next
from debubble.annexes.tune.prospects import Prospect, Prospects, Scope, Standing, is_open
from debubble.annexes.tune.setting import Setting, fill_words
from debubble.annexes.tune.trial import (
    LOG,
    Bench,
    Kind,
    Outcome,
    ProcessEnd,
    guarded,
    read_capture,
    run_guarded,
    say_failure,
)
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
from debubble.plan.baseline import even_split
from debubble.plan.server import ServerOption, plan_server, predict
from debubble.serving.model import ServerModel
from debubble.serving.traffic import Traffic

TRACES = "traces"
"""In the folder of a run: what its ranks did."""
RESULTS, LOAD_LOG = "load", "load.log"
"""Likewise: what the load wrote of its users, and what it printed."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where the server answers, what puts it under a load, and which engine it is."""

    url: str
    load: tuple[str, ...]
    """Words of the load's command: {url} is the address, {out} a folder for its result."""
    kind: str | None = None
    """vllm or sglang, by which it is captured; None where it is not."""

    def __str__(self) -> str:
        return f"{self.url}: {' '.join(self.load)}"

    def load_words(self, out: Path) -> tuple[str, ...]:
        """Return the load's command, with its result to be written into a folder."""
        return fill_words(self.load, {"url": self.url.rstrip("/"), "out": str(out.resolve())})

    def answers(self) -> bool:
        """Tell whether it is ready to serve."""
        for route in ("health", "v1/models"):
            try:
                reply = fetch(f"{self.url.rstrip('/')}/{route}")
            except NoAnswer:
                return False
            if reply.status != 404:
                return reply.ok
        return False


def run_load(server: Server, out: Path, *, token: str, timeout_s: float | None) -> LoadResult:
    """Run the load's command to its end, and read what it wrote or printed."""
    results, log = out / RESULTS, out / LOAD_LOG
    prepare_out(results)
    began = time.time()
    ended = run_guarded(
        server.load_words(results),
        os.environ,
        token=f"{token}.load",
        log=log,
        timeout_s=timeout_s,
    )
    if ended.code is None:
        raise TuneError(f"the load was not through after {ended.seconds:.0f} s")
    result = read_result(results, log, began)
    if result is None:
        words = say_failure(ended, log)[1] if ended.code else "it wrote no result"
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


def serve_trial(  # noqa: PLR0913 (what the journal and the budget say of it)
    bench: Bench,
    server: Server,
    chosen: Next,
    *,
    out: Path,
    token: str,
    timeout_s: float | None,
) -> tuple[Outcome, Analysis | None]:
    """Serve a setting once under the load; the server is gone when this returns."""
    if server.answers():
        raise TuneError(
            f"something answers at {server.url} already",
            hint="end it, or give the address that the command serves at",
        )
    traces = out / TRACES
    prepare_out(traces)
    words = bench.template.fill(chosen.setting, traces=str(traces.resolve()))
    environment = bench.template.environment(chosen.setting, os.environ)
    began = time.monotonic()

    def came_of(kind: Kind, message: str) -> tuple[Outcome, None]:
        return Outcome(kind=kind, seconds=time.monotonic() - began, message=message), None

    def failed(code: int) -> tuple[Outcome, None]:
        ended = ProcessEnd(code=code, seconds=time.monotonic() - began)
        return came_of(*say_failure(ended, out / LOG))

    with guarded(words, environment, token=token, log=out / LOG) as guard:
        deadline = began + (timeout_s or _READY_S)
        if not _is_ready(server, guard, deadline):
            if (code := guard.poll()) is not None:
                return failed(code)
            took = f"after {time.monotonic() - began:.0f} s"
            return came_of(Kind.HUNG, f"stopped: no answer at {server.url} {took}")
        ready = time.monotonic()
        try:
            measurement = measure_load(run_load(server, out, token=token, timeout_s=timeout_s))
        except DebubbleError as error:
            if (code := guard.poll()) is not None:
                return failed(code)
            return came_of(Kind.UNREADABLE, str(error))
        if (code := guard.poll()) is not None:
            return failed(code)
        reading, note = None, ""
        if server.kind is not None and chosen.why in ("unchanged", "try"):
            middle_s = min((time.monotonic() - ready) / 2, _MIDDLE_AT_MOST_S)
            with _loaded(server, out, token):
                time.sleep(middle_s)
                reading, note = _capture(server, server.kind, traces)
    seconds = time.monotonic() - began
    outcome = Outcome(kind=Kind.MEASURED, seconds=seconds, message=note, measurement=measurement)
    return outcome, reading


def _is_ready(server: Server, guard: subprocess.Popen[bytes], deadline: float) -> bool:
    """Wait until a server answers; False where it has ended, or has not by the deadline."""
    while not server.answers():
        if guard.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


@contextlib.contextmanager
def _loaded(server: Server, out: Path, token: str) -> Iterator[None]:
    """Keep a server under its load, over and over, until left; what that measures is nothing."""
    ended = threading.Event()

    def keep_on() -> None:
        again = out / "load-again"
        prepare_out(again)
        while not ended.is_set():
            with guarded(
                server.load_words(again),
                os.environ,
                token=f"{token}.load",
                log=out / "load-again.log",
            ) as load:
                while load.poll() is None and not ended.wait(_POLL_S):
                    pass

    thread = threading.Thread(target=keep_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _capture(server: Server, kind: str, traces: Path) -> tuple[Analysis | None, str]:
    """Have the server profile itself while it is asked; what fails here spoils no measurement."""
    order = ServerOrder(
        url=server.url, kind=kind, out=traces, seconds=_CAPTURED_S, around_s=_CAPTURED_S
    )
    try:
        captured = capture_server(order)
        if not captured.files:
            return None, f"not captured: {captured.note}"
        return read_capture(traces), ""
    except DebubbleError as error:
        return None, f"not captured: {error}"


def model_of(now: Setting, capture: Analysis | None, load: LoadResult | None) -> ServerModel | None:
    """Return the captured server as it is replayed; None where that does not fit what ran.

    A queue before the batches is not replayed: where requests wait, more batches serve more.
    """
    notes = None if capture is None else capture.server_notes
    around = None if notes is None else notes.around
    waiting = None if around is None else around.requests_waiting
    if capture is None or waiting is None or waiting >= _SOME_WAIT:
        return None
    try:
        model = capture.server_model(layers=now.layers, traffic=_traffic_of(load))
    except DebubbleError:
        return None
    return model if now.in_flight in {None, model.setting.in_flight} else None


def _traffic_of(load: LoadResult | None) -> Traffic | None:
    """Return what a load asked; None where its result does not say it."""
    if load is None or load.clients is None or not load.prompt_tokens:
        return None
    lengths = [max(1, round(length)) for length in load.prompt_tokens]
    return Traffic(
        clients=load.clients,
        prompts=tuple(
            (length, lengths.count(length) / len(lengths)) for length in sorted(set(lengths))
        ),
        output=max(1, round(sum(load.output_tokens) / len(load.output_tokens))),
    )


def weigh(model: ServerModel, now: Setting, other: Setting) -> ServerOption | None:
    """Say what another setting would do; None where the model has no part that it changes."""
    changed = other.differing(now)
    if "tokens_a_batch" in changed:
        return None
    # What the command is not told of the server, its capture tells.
    as_is = model.setting
    return predict(
        model,
        replace(
            as_is,
            in_flight=changed.get("in_flight", as_is.in_flight),
            chunk=changed.get("chunk", as_is.chunk),
            layers=changed.get("layers"),
            requests_a_batch=changed.get("requests_a_batch"),
        ),
    )


def planned(model: ServerModel, now: Setting) -> list[Setting]:
    """Return what a plan of the server would try, of what it is told; the best first."""
    knobs = (("in_flight", "in_flight"), ("chunk", "chunk"), ("split", "layers"))
    settings = []
    for option in plan_server(model):
        wanted = {
            knob: getattr(option.setting, knob) for kind, knob in knobs if kind in option.kinds
        }
        tellable = all(getattr(now, knob) is not None for knob in wanted)
        if tellable and not option.refused:
            settings.append(replace(now, **wanted))
    return settings


def prospects(now: Setting, capture: Analysis | None) -> list[Setting]:
    """Return what may serve better than a setting, the most promising first.

    By what lies next to it: layers cut evenly (a plan cuts them by what stages take), batches in
    flight, chunks and requests halved and doubled; a batch takes more requests only where some
    wait. `capture` is of a run of that setting, where there is one.
    """
    notes = None if capture is None else capture.server_notes
    around = None if notes is None else notes.around
    none_wait = around is not None and around.requests_waiting == 0
    found = []
    stages = 1 if capture is None else len(capture.pipeline.ranks)
    stages = stages if now.layers is None else len(now.layers)
    # With fewer batches than stages some stage has nothing to do, however the layers are cut.
    if now.in_flight is not None and now.in_flight < stages:
        found.append(replace(now, in_flight=2 * now.in_flight))
    if now.layers is not None:
        found.append(replace(now, layers=even_split(sum(now.layers), len(now.layers))))
    for knob, most in (
        ("in_flight", max(stages, 2) * _MOST_A_STAGE),
        ("chunk", None),
        ("requests_a_batch", now.requests_a_batch if none_wait else None),
        ("tokens_a_batch", None),
    ):
        value = getattr(now, knob)
        if value is None:
            continue
        others = [other for other in (2 * value, value // 2) if 1 <= other <= (most or other)]
        found += [replace(now, **{knob: other}) for other in others]
    return [setting for setting in dict.fromkeys(found) if setting != now]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTrials:
    """Trials of a server that is started, asked and ended for each run."""

    bench: Bench
    scope: Scope
    server: Server
    readings: dict[int, Analysis] = field(default_factory=dict)
    """What was read of each run that was captured."""

    def look(self, standing: Standing) -> Prospects:
        """Plan from the best run so far, on what its capture tells."""
        source = standing.source or standing.first
        if source is None:
            return Prospects(tries=(), untellable=(), refused=())
        tries = sorted(
            self._tries(standing, source),
            key=lambda prospect: -(prospect.expected.gain if prospect.expected else 0.0),
        )
        return Prospects(tries=tuple(tries), untellable=(), refused=())

    def _tries(self, standing: Standing, source: Run) -> Iterator[Prospect]:
        capture, now = self._left_by(standing, source), source.setting
        ahead = 1 + standing.gain_of(source.setting)
        folder = self.bench.folder_of(source.number)
        model = model_of(now, capture, read_result(folder / RESULTS, folder / LOAD_LOG))
        asked = [] if model is None else planned(model, now)
        for setting in dict.fromkeys([*asked, *prospects(now, capture)]):
            if not is_open(standing, setting):
                continue
            option = None if model is None else weigh(model, now, setting)
            expected = None
            if option is not None:
                expected = Expectation(
                    gain=ahead * (1 + option.gain) - 1,
                    low=ahead * option.low - 1,
                    high=ahead * option.high - 1,
                    batch_latency_s=option.served.tpot_s,
                    peak_memory_bytes=None,
                )
            yield Prospect(
                setting=setting,
                lever=next(iter(setting.differing(now))),
                expected=expected,
                worth=option is None
                or (option.verdict != "no" and option.gain > self.scope.threshold),
            )

    def _left_by(self, standing: Standing, source: Run) -> Analysis | None:
        """Return what the captured run of a setting left: a run that confirms it has no capture."""
        for run in standing.of(source.setting):
            traces = self.bench.folder_of(run.number) / TRACES
            try:
                if run.number not in self.readings and any(traces.rglob("*.json.gz")):
                    self.readings[run.number] = read_capture(traces)
            except DebubbleError:
                continue
            if run.number in self.readings:
                return self.readings[run.number]
        return None

    def run(
        self, chosen: Next, standing: Standing, budget: Budget, *, number: int, token: str
    ) -> Outcome:
        """Serve a setting once under the load."""
        outcome, reading = serve_trial(
            self.bench,
            self.server,
            chosen,
            out=self.bench.folder_of(number),
            token=token,
            timeout_s=budget.timeout_for(standing.runs),
        )
        if reading is not None:
            self.readings[number] = reading
        return outcome

    def refuse(self, first: Run) -> None:
        """Refuse to go on from a first run that tells nothing."""
        measured = first.outcome.measurement
        if measured is not None and measured.served is not None and measured.served.open_loop:
            raise TuneError(
                "a rate is answered by any server that keeps up, and says nothing of its best",
                hint="give a load of clients that wait; compare takes loads with a rate",
            )
        if measured is None:
            log = self.bench.folder_of(first.number) / LOG
            raise TuneError(
                f"the unchanged server cannot be measured: {first.outcome.message}",
                hint=f"its output is in {log}; mend it and type the same again",
            )
