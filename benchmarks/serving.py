"""How far predictions of a served stream land from what was measured without the profiler.

    python benchmarks/serving.py [FOLDER ...]

Each FOLDER holds recordings of the lab's engine, one folder a setting, with `truth0.json` beside
the traces. The runs called `k4`, `u3337` (three stages of 3 layers and one of 7) and `slow` (a slow
hop) are read with what their server did without the profiler; every other setting is predicted from
them. Without a folder it is the recordings of the tests and those beside the repository.

Each recording is also cut, on each rank elsewhere, and must tell the same of what is left: how many
are in flight, the bubble, the causes.

What was measured is taken over whole rounds of requests: all clients begin at once, so that parts
of a round have more prompts, or fewer, than the traffic has; and the first batches after the start
load kernels. What the engine itself counts, from its first batch on, is printed beside it.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import debubble
from debubble.analysis import Analysis
from debubble.errors import DebubbleError
from debubble.ledger.causes import Cause
from debubble.plan.server import ServerOption, predict, read_traffic
from debubble.serving.model import ServerModel, model_server
from debubble.serving.traffic import Setting
from debubble.trace.server_notes import Span

OURS = Path(__file__).parents[1] / "tests" / "data" / "serving"
SHARED = Path(__file__).parents[2] / "shared" / "data" / "serving"
SOURCES = ("k4", "u3337", "slow")
# The bars: the replay, what nobody knows, predictions.
MOST_REPLAY, MOST_UNEXPLAINED, MOST_OFF = 0.03, 0.05, 0.08
# Cut captures may tell this much else of the same stretch.
MOST_APART = 0.02
_FEW = 4
_OF_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"}
# What is kept of each rank's capture, in shares of its time.
CUTS = {
    "first 40 %": [(0.0, 0.4)] * 4,
    "first 60 %": [(0.0, 0.6)] * 4,
    "middle 40 %": [(0.3, 0.7)] * 4,
    "last 40 %": [(0.6, 1.0)] * 4,
    "each elsewhere": [(0.3, 0.8), (0.25, 0.75), (0.35, 0.9), (0.2, 0.85)],
    "each from its start": [(0.0, 0.5), (0.05, 0.6), (0.1, 0.7), (0.02, 0.55)],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What the engine did without the profiler."""

    slots: int
    chunk: int
    layers: tuple[int, ...]
    clients: int
    prompts: str
    """As they were drawn: some dozen of a mix are not the mix."""
    output: int
    tokens_out_per_s: float
    """First tokens too, which the engine samples from prompts."""
    counted_per_s: float
    """The same from the first batch on, whole rounds or not."""
    tpot_s: float
    phases: list[int]


def read_truth(folder: Path) -> Truth:
    """Read what a recording's engine wrote of itself."""
    told = json.loads((folder / "truth0.json").read_text("utf-8"))
    slots, clients, prompts = told["slots"], told["clients"], _drawn(told)
    mean = sum(length * share for length, share in prompts)
    counted = (told["tokens_out"] + told["tokens_in"] / mean) / told["wall_s"]
    # A request has a batch for each chunk of its prompt and each further token; and a batch has one
    # chunk, so that many requests wait for each other's prompts.
    chunks = sum(-(-length // told["chunk"]) * share for length, share in prompts)
    in_a_round = max(told["output"] - 1 + chunks, -(-clients // slots) * chunks)
    rate, tpot = counted, clients * told["output"] / counted / in_a_round
    if "batch_log" in told:
        rate, tpot = _over_rounds(told, slots * in_a_round, mean, alike=len(prompts) == 1)
    return Truth(
        slots=slots,
        chunk=told["chunk"],
        layers=tuple(int(count) for count in told["layers"].split(",")),
        clients=clients,
        prompts=",".join(f"{length}:{share:.4f}" for length, share in prompts),
        output=told["output"],
        tokens_out_per_s=rate,
        counted_per_s=counted,
        tpot_s=tpot,
        phases=[2 if not n else 3 if rows else 1 for *_, n, rows in told["profiled_batches"]],
    )


def _over_rounds(
    told: dict[str, Any], a_round: float, mean: float, *, alike: bool
) -> tuple[float, float]:
    """Return tokens a second and the time a token takes, over whole rounds where there are any."""
    log, slots, clients = told["batch_log"], told["slots"], told["clients"]
    ends = [began + took for began, took, *_ in log]
    kept, firsts = len(log) - slots, float(len(told["ttft_s"]))
    if alike:
        rounds = int((len(log) - slots) / a_round)
        firsts = sum(n for *_, n, _ in log[slots:]) / mean
        if rounds:
            kept, firsts = round(rounds * a_round), float(rounds * clients)
    span = ends[-1] - ends[-kept - 1]
    begun_since = told["tpot_s"][clients:]
    # Each batch takes all requests of its slot on by one token.
    tpot = fmean(begun_since) if len(begun_since) >= _FEW else slots * span / kept
    return (sum(rows for *_, rows in log[-kept:]) + firsts) / span, tpot


def _drawn(told: dict[str, Any]) -> list[tuple[int, float]]:
    """Return the lengths of prompts and their shares, of two lengths as their mean tells."""
    parts = [part.split(":") for part in str(told["prompt"]).split(",")]
    lengths = [int(part[0]) for part in parts]
    shares = [float(part[1]) if len(part) > 1 else 1.0 for part in parts]
    if len(lengths) == 2:
        ended = told["ttft_s"]
        mean = told["tokens_in"] / len(ended)
        second = min(max((mean - lengths[0]) / (lengths[1] - lengths[0]), 0.0), 1.0)
        shares = [1 - second, second]
    return [(length, share) for length, share in zip(lengths, shares, strict=True) if share]


def account(folder: Path, analysis: Analysis) -> bool:
    """Account for one recording; print its figures and tell whether they hold."""
    truth, stream = read_truth(folder), analysis.stream
    if stream is None or stream.turn_ns is None:
        print(f"{folder.name:14s} cannot be accounted for")
        return False
    known = min(len(truth.phases), len(stream.batches))
    right = sum(
        int(phase) == wanted
        for phase, wanted in zip(stream.batches.phase[:known], truth.phases[:known], strict=True)
    )
    shares = stream.shares()
    exact = all(
        sum(stream.causes(place).values()) == stream.batches.span[1] - stream.batches.span[0]
        for place in range(len(stream.batches.ranks))
    )
    named = debubble.find(analysis).named
    told, (low, high) = told_in_flight(analysis)
    print(
        f"{folder.name:14s} {told} in flight; phases right in "
        f"{right} of {known}; sums exact: {exact}; replay {100 * (stream.replay_error or 0):+.1f} %"
        f"; unexplained {100 * shares[Cause.UNEXPLAINED]:.1f} %; first: "
        f"{named[0].cause if named else '-'}"
        f"{f' of stage {named[0].stage}' if named and named[0].stage is not None else ''}"
    )
    return (
        low <= truth.slots <= (high or truth.slots)
        and right >= 0.99 * known
        and exact
        and abs(stream.replay_error or 0.0) <= MOST_REPLAY
        and shares[Cause.UNEXPLAINED] <= MOST_UNEXPLAINED
    )


def told_in_flight(analysis: Analysis) -> tuple[str, tuple[int, int | None]]:
    """Return what is said of the number in flight, in words, and from what to what it may be.

    None: so many or more. From 0 on where no number is told.
    """
    figures, stream = analysis.pipeline.stream, analysis.stream
    if figures is None or stream is None or stream.batches.in_flight is None:
        return "no number", (0, None)
    low, high = figures.may_be
    if figures.first_sets_pace or high is None:
        return f"{low} or more", (low, None)
    return (str(low) if low == high else f"{low} to {high}"), (low, high)


@lru_cache(maxsize=4)
def _read(file: Path) -> dict[str, Any]:
    """Read a trace, once for all its cuts."""
    found: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
    return found


def cut(folder: Path, parts: Sequence[tuple[float, float]], out: Path) -> None:
    """Keep a part of each rank's capture, from one share of its time to another."""
    for rank, (first, last) in enumerate(parts):
        name = f"rank{rank}.json"
        trace = dict(_read(folder / f"{name}.gz"))
        events = [event for event in trace["traceEvents"] if "ts" in event]
        host = [
            event["ts"] for event in events if event.get("cat") in {"cuda_runtime", "cuda_driver"}
        ]
        length = max(host) - min(host)
        begin, end = min(host) + first * length, min(host) + last * length
        launched = {
            event["args"]["correlation"]
            for event in events
            if event.get("cat") in {"cuda_runtime", "cuda_driver"} and begin <= event["ts"] < end
        }
        trace["traceEvents"] = [
            event
            for event in trace["traceEvents"]
            if "ts" not in event
            or (event.get("cat") in _OF_DEVICE and event["args"].get("correlation") in launched)
            or (event.get("cat") not in _OF_DEVICE and begin <= event["ts"] < end)
        ]
        (out / name).write_text(json.dumps(trace), "utf-8")


def shares_within(whole: Analysis, span: tuple[int, int]) -> dict[Cause, float]:
    """Return what a whole capture says of a stretch of it."""
    if whole.stream is None:
        raise SystemExit("no stream")
    waited = dict.fromkeys(Cause, 0)
    for wait in whole.stream.waits:
        waited[wait.cause] += max(min(wait.end_ns, span[1]) - max(wait.start_ns, span[0]), 0)
    total = (span[1] - span[0]) * len(whole.stream.batches.ranks)
    waited[Cause.COMPUTE] = total - sum(waited.values())
    return {cause: length / total for cause, length in waited.items()}


def account_cuts(folder: Path, whole: Analysis) -> bool:
    """Cut a recording here and there; print and tell whether all parts say what the whole does.

    A part may leave open how many are in flight, but not tell another number.
    """
    good = True
    for name, parts in CUTS.items():
        with TemporaryDirectory() as place:
            cut(folder, parts, Path(place))
            try:
                part = debubble.analyse(place)
            except DebubbleError as error:
                print(f"{folder.name:14s} {name}: {error}")
                good = False
                continue
            stream = part.stream
        if stream is None or whole.stream is None or stream.queue is None:
            print(f"{folder.name:14s} {name}: too little is common to all ranks")
            continue
        wanted, (told, (low, high)) = whole.stream.batches.in_flight, told_in_flight(part)
        shares, known = stream.shares(), shares_within(whole, stream.batches.span)
        most = max(known, key=lambda cause: abs(known[cause] - shares[cause]))
        bubble, there = 1 - shares[Cause.COMPUTE], 1 - known[Cause.COMPUTE]
        print(
            f"{folder.name:14s} {name}: {told} in flight, {wanted} in the whole; bubble "
            f"{100 * bubble:.1f} %, {100 * there:.1f} % of the whole in that stretch; most apart: "
            f"{most} {100 * shares[most]:.1f}, {100 * known[most]:.1f} %"
        )
        good &= not low or low <= (wanted or 0) <= (high or low + (wanted or 0))
        good &= abs(bubble - there) <= MOST_APART
    return good


def model_of(folder: Path, analysis: Analysis) -> ServerModel:
    """Fit a recording to what its engine did without the profiler."""
    truth = read_truth(folder)
    if analysis.stream is None:
        raise SystemExit(f"{folder}: no stream")
    return model_server(
        analysis.stream,
        analysis.traces,
        layers=truth.layers,
        traffic=read_traffic(truth.clients, truth.prompts, truth.output),
        around=Span(seconds=1.0, tokens_out_per_s=truth.tokens_out_per_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """One prediction against what came."""

    off: float
    counted_off: float
    tpot_off: float
    inside: bool
    tpot_inside: bool


def is_served(run: Path) -> bool:
    """Tell a recording of the serving engine from those of others, which say so."""
    if not (run / "truth0.json").exists():
        return False
    served = "slots" in json.loads((run / "truth0.json").read_text("utf-8"))
    if not served:
        print(f"{run.name:14s} left out: its truth0.json names no slots, so no server ran")
    return served


def predict_all(runs: Sequence[Path], analyses: Mapping[str, Analysis]) -> list[Landing]:
    """Predict every recorded setting from the sources; print each, return where it landed."""
    found = []
    truths = {run.name: read_truth(run) for run in runs}
    folders = {run.name: run for run in runs}
    for source in SOURCES:
        if source not in analyses:
            continue
        try:
            model = model_of(folders[source], analyses[source])
        except DebubbleError as error:
            print(f"from {source}: {error}")
            continue
        now = model.as_is.tokens_out_per_s
        at_k = {model.setting.in_flight: (now, now)}
        for name, truth in truths.items():
            setting = setting_for(source, name, model, truth)
            if setting is None:
                continue
            traffic = read_traffic(truth.clients, truth.prompts, truth.output)
            option = predict(model, setting, traffic)
            found.append(hold(f"from {source:6s} to {name:12s}", model, option, truth))
            if option.kinds == ("in_flight",):
                at_k[truth.slots] = (option.served.tokens_out_per_s, truth.tokens_out_per_s)
        if len(at_k) > 1:
            told, came = (max(at_k, key=lambda k, at=at: at_k[k][at]) for at in (0, 1))
            print(f"from {source:6s} best in flight: {told} predicted, {came} measured")
    return found


def setting_for(source: str, name: str, model: ServerModel, truth: Truth) -> Setting | None:
    """Return the setting of another run as a change of the source; None where it is none."""
    setting = replace(model.setting, in_flight=truth.slots, chunk=truth.chunk, layers=truth.layers)
    same_k, same_split = truth.slots == model.setting.in_flight, truth.layers == model.costs.layers
    if source == "slow":
        return replace(setting, repaired=model.slow) if name == "k4" and model.slow else None
    if (
        name == source
        or name.startswith("slow")
        or (source == "u3337" and not (same_k or same_split))
    ):
        return None
    return setting


def hold(what: str, model: ServerModel, option: ServerOption, truth: Truth) -> Landing:
    """Hold one prediction against what came, and print it."""
    rate, tpot = option.served.tokens_out_per_s, option.served.tpot_s
    landing = Landing(
        off=rate / truth.tokens_out_per_s - 1,
        counted_off=rate / truth.counted_per_s - 1,
        tpot_off=tpot / truth.tpot_s - 1,
        inside=option.low <= truth.tokens_out_per_s / model.as_is.tokens_out_per_s <= option.high,
        tpot_inside=option.tpot_s[0] <= truth.tpot_s <= option.tpot_s[1],
    )
    print(
        f"{what} {rate:6.0f} tokens/s, measured {truth.tokens_out_per_s:6.0f}: "
        f"{100 * landing.off:+5.1f} %{'' if landing.inside else ', outside'} "
        f"(as counted {truth.counted_per_s:6.0f}: {100 * landing.counted_off:+5.1f} %); "
        f"a token {1000 * tpot:5.1f} ms, measured {1000 * truth.tpot_s:5.1f}: "
        f"{100 * landing.tpot_off:+5.1f} %{'' if landing.tpot_inside else ', outside'}"
    )
    return landing


def sum_up(landed: list[Landing]) -> None:
    """Print how far predictions are off in the middle and at worst, and how many hold."""
    for what, errors, inside in (
        ("tokens/s", [one.off for one in landed], [one.inside for one in landed]),
        ("time a token", [one.tpot_off for one in landed], [one.tpot_inside for one in landed]),
    ):
        sizes = [abs(error) for error in errors]
        print(
            f"{len(sizes)} predictions of {what}: {100 * median(sizes):.1f} % in the middle, "
            f"{100 * max(sizes):.1f} % at worst, {sum(size <= MOST_OFF for size in sizes)} "
            f"within {100 * MOST_OFF:.0f} %, {sum(inside)} inside"
        )


def main(words: list[str]) -> int:
    """Account for all recordings, predict what can be, and say how far it is off."""
    named = [Path(word) for word in words if word != "--tiny"]
    folders = [OURS] if "--tiny" in words else named or [OURS, SHARED]
    good = True
    landed: list[Landing] = []
    for folder in (folder for folder in folders if folder.is_dir()):
        runs = [run for run in sorted(folder.iterdir()) if is_served(run)]
        analyses = {
            run.name: debubble.analyse(run) for run in runs if any(run.glob("rank*.json.gz"))
        }
        for run in runs:
            if run.name in analyses:
                good &= account(run, analyses[run.name])
                good &= "--tiny" in words or account_cuts(run, analyses[run.name])
        landed += predict_all(runs, analyses)
    if landed:
        sum_up(landed)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
