"""How far predictions of a served stream land from what was measured without the profiler.

    python benchmarks/serving.py [FOLDER ...]

Each FOLDER holds recordings of the lab's engine, one folder a setting, with `truth0.json` beside
the traces. The run called `k4` (and `u3337`, three stages of 3 layers and one of 7) is read with
what its server did without the profiler; every other setting is predicted from it. Without a folder
it is the recordings of the tests and those beside the repository.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import debubble
from debubble.answers.server_plan import read_traffic
from debubble.errors import DebubbleError
from debubble.ledger.causes import Cause
from debubble.serving.plan import ServerModel, model_server, predict

OURS = Path(__file__).parents[1] / "tests" / "data" / "serving"
SHARED = Path(__file__).parents[2] / "shared" / "data" / "serving"
SOURCES = ("k4", "u3337")
# The bars: the replay, what nobody knows, predictions.
MOST_REPLAY, MOST_UNEXPLAINED, MOST_OFF = 0.03, 0.05, 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What the engine did without the profiler."""

    slots: int
    chunk: int
    layers: tuple[int, ...]
    clients: int
    prompts: str
    output: int
    tokens_out_per_s: float
    """First tokens too, which the engine samples from prompts."""
    phases: list[int]


def read_truth(folder: Path) -> Truth:
    """Read what a recording's engine wrote of itself."""
    told = json.loads((folder / "truth0.json").read_text("utf-8"))
    lengths = [part.split(":") for part in told["prompt"].split(",")]
    mean = sum(float(n[0]) * float(n[1] if len(n) > 1 else 1) for n in lengths)
    firsts = told["tokens_in"] / mean
    return Truth(
        slots=told["slots"],
        chunk=told["chunk"],
        layers=tuple(int(count) for count in told["layers"].split(",")),
        clients=told["clients"],
        prompts=told["prompt"],
        output=told["output"],
        tokens_out_per_s=(told["tokens_out"] + firsts) / told["wall_s"],
        phases=[2 if not n else 3 if rows else 1 for *_, n, rows in told["profiled_batches"]],
    )


def account(folder: Path) -> bool:
    """Account for one recording; print its figures and tell whether they hold."""
    analysis, truth = debubble.analyse(folder), read_truth(folder)
    stream = analysis.stream
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
        sum(stream.causes(place).values()) == stream.length_ns
        for place in range(len(stream.batches.ranks))
    )
    named = debubble.find(folder).named
    print(
        f"{folder.name:14s} {stream.batches.in_flight} in flight; phases right in "
        f"{right} of {known}; sums exact: {exact}; replay {100 * (stream.replay_error or 0):+.1f} %"
        f"; unexplained {100 * shares[Cause.UNEXPLAINED]:.1f} %; first: "
        f"{named[0].cause if named else '-'}"
        f"{f' of stage {named[0].stage}' if named and named[0].stage is not None else ''}"
    )
    return (
        stream.batches.in_flight == truth.slots
        and right >= 0.99 * known
        and exact
        and abs(stream.replay_error or 0.0) <= MOST_REPLAY
        and shares[Cause.UNEXPLAINED] <= MOST_UNEXPLAINED
    )


def model_of(folder: Path) -> ServerModel:
    """Fit a recording to what its engine did without the profiler."""
    analysis, truth = debubble.analyse(folder), read_truth(folder)
    if analysis.stream is None:
        raise SystemExit(f"{folder}: no stream")
    return model_server(
        analysis.stream,
        analysis.traces,
        layers=truth.layers,
        traffic=read_traffic(truth.clients, truth.prompts, truth.output),
        tokens_out_per_s=truth.tokens_out_per_s,
    )


def predict_all(folder: Path) -> list[tuple[float, bool]]:
    """Predict every recorded setting from the sources; print each, return how far it is off."""
    found = []
    for source in SOURCES:
        if not any((folder / source).glob("rank*.json.gz")):
            continue
        try:
            model = model_of(folder / source)
        except DebubbleError as error:
            print(f"from {source}: {error}")
            continue
        for other in sorted(folder.iterdir()):
            truth = read_truth(other)
            if other.name == source or (
                source == "u3337"
                and truth.slots != model.setting.in_flight
                and truth.layers != model.costs.layers
            ):
                continue
            option = predict(
                model,
                replace(
                    model.setting, in_flight=truth.slots, chunk=truth.chunk, layers=truth.layers
                ),
                read_traffic(truth.clients, truth.prompts, truth.output),
            )
            off = option.served.tokens_out_per_s / truth.tokens_out_per_s - 1
            real = truth.tokens_out_per_s / model.as_is.tokens_out_per_s
            inside = option.low <= real <= option.high
            found.append((off, inside))
            print(
                f"from {source:6s} to {other.name:10s} {option.served.tokens_out_per_s:6.0f} "
                f"tokens/s, measured {truth.tokens_out_per_s:6.0f}: {100 * off:+5.1f} %"
                f"{'' if inside else ', outside'}"
            )
    return found


def main(words: list[str]) -> int:
    """Account for all recordings, predict what can be, and say how far it is off."""
    named = [Path(word) for word in words if word != "--tiny"]
    folders = [OURS] if "--tiny" in words else named or [OURS, SHARED]
    good = True
    off: list[tuple[float, bool]] = []
    for folder in (folder for folder in folders if folder.is_dir()):
        for run in sorted(folder.iterdir()):
            if any(run.glob("rank*.json.gz")):
                good &= account(run)
        off += predict_all(folder)
    if off:
        errors = [abs(one) for one, _ in off]
        print(
            f"{len(off)} predictions: {100 * median(errors):.1f} % in the middle, "
            f"{100 * max(errors):.1f} % at worst, {sum(error <= MOST_OFF for error in errors)} "
            f"within {100 * MOST_OFF:.0f} %, {sum(inside for _, inside in off)} inside"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
