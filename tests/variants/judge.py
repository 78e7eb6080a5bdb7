"""Makes healthy variants of recordings, and holds `find` against an independent count of kernels.

    python tests/variants/judge.py [--kept-back] [--only NAME,…] [RECORDING …]

A kernel that is of a pass in the recording is of that pass in every variant: by its correlation, or
where graphs share one, by its variant without them. Window and occupied time are counted from them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

TESTS = Path(__file__).resolve().parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

import numpy as np
from support.spans import bubble_of
from support.traces.documents import ON_DEVICE, Documents, on_device, save
from support.traces.recordings import DATA, SHARED
from variants.healthy import HEALTHY, KEPT_BACK, Variant, faster
from variants.resimulate import Replay

import debubble
from debubble.cli.gates import judge_bubbles
from debubble.errors import Code, GateError, Touch

RECORDINGS = (
    SHARED / "h200" / "1f1b_m8",
    SHARED / "frameworks" / "mg_1f1b_m8",
    SHARED / "h200_free" / "c_fwd_m6",
)
BUBBLE_OFF, LATENCY_OFF = 0.007, 0.01
_WITHOUT_GRAPHS = {"graphs": "rerun", "graphs_without_nodes": "rerun", "graphs_3x": "device_3x",
                   "graphs_of_one_rank": "rerun", "back_graphs_at_ends": "rerun"}  # fmt: skip

Place = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Known:
    """A recording run again unchanged: which kernel is of which step, by rank and correlation."""

    step_of: Mapping[Place, int | None]
    """None of one that counts as occupied and is of no pass."""
    steps: tuple[int, ...]


def know(replay: Replay, folder: Path) -> Known:
    """Say of each kernel whether it is occupied time, and of which step's passes it is."""
    documents = replay.run()
    save(documents, folder)
    analysis = debubble.analyse(str(folder))
    first_ns = {trace.rank: int(trace.kernels.start_ns[0]) for trace in analysis.traces}
    step_of: dict[Place, int | None] = {}
    for line in analysis.timeline.ranks:
        passes = analysis.timeline.passes
        mine = passes.where(passes.rank == line.rank)
        order = np.argsort(mine.start_ns)
        starts, ends, steps = mine.start_ns[order], mine.end_ns[order], mine.step[order]
        work = on_device(documents[line.rank])
        base = first_ns[line.rank] - round(work[0]["ts"] * 1000) + line.clock_offset_ns
        for event in work:
            middle = base + round((event["ts"] + event["dur"] / 2) * 1000)
            row = int(np.searchsorted(line.occupied.start_ns, middle, side="right")) - 1
            if "nccl" in event["name"] or row < 0 or middle > line.occupied.end_ns[row]:
                continue
            row = int(np.searchsorted(starts, middle, side="right")) - 1
            inside = row >= 0 and middle <= ends[row]
            place = (line.rank, event["args"]["correlation"])
            step_of[place] = int(steps[row]) if inside else None
    return Known(step_of=step_of, steps=tuple(w.step for w in analysis.pipeline.windows))


def count(documents: Documents, known: Known) -> dict[int, tuple[float, float]]:
    """Return bubble and window (us) of each step, from the kernels of its passes alone."""
    windows: dict[int, list[float]] = {}
    occupied: dict[int, list[tuple[float, float]]] = {}
    for rank, document in documents.items():
        for event in document["traceEvents"]:
            place = (rank, event.get("args", {}).get("correlation"))
            if event.get("cat") not in ON_DEVICE or place not in known.step_of:
                continue
            begin, end = event["ts"], event["ts"] + event["dur"]
            occupied.setdefault(rank, []).append((begin, end))
            step = known.step_of[place]
            if step is not None:
                window = windows.setdefault(step, [begin, end])
                window[:] = min(window[0], begin), max(window[1], end)
    counted = {}
    for step, (first, final) in windows.items():
        counted[step] = bubble_of(occupied.values(), first, final), final - first
    return counted


def problems_of(folder: Path, counted: dict[int, tuple[float, float]]) -> Iterator[str]:
    """Yield what is wrong with the answer: refused, a closed gate, other figures than counted."""
    analysis = debubble.analyse(str(folder))
    pipeline, gaps = analysis.pipeline, analysis.warnings
    if pipeline.absent or len(analysis.traces) < len(pipeline.ranks):
        yield "ranks refused"
    doubts = [gap for gap in gaps if gap.touches & {Touch.TIMES, Touch.MESSAGES, Touch.LAYERS}]
    yield from (f"doubted: {gap}" for gap in doubts if gap.code is not Code.CLOCK_OFF)
    try:
        judge_bubbles(analysis.pipelines, 0.99, gaps)
    except GateError as why:
        yield f"gate closed: {why}"
    if pipeline.bubble_fraction is None or pipeline.batch_latency_ns is None:
        yield "no figures"
        return
    here = [counted[w.step] for w in pipeline.windows if w.step in counted]
    if not here or any(gap.code is Code.STEPS_INFERRED for gap in gaps):
        here = [*counted.values()]
    bubble, window_us = (median(column) for column in zip(*here, strict=True))
    if abs(pipeline.bubble_fraction - bubble) > BUBBLE_OFF:
        yield f"bubble {pipeline.bubble_fraction:.1%}, counted {bubble:.1%}"
    if abs(pipeline.batch_latency_ns / 1000 - window_us) > LATENCY_OFF * window_us:
        yield f"latency {pipeline.batch_latency_ns / 1e6:.1f} ms, counted {window_us / 1e3:.1f} ms"


def judge(recording: Path, variants: Mapping[str, Variant], room: Path) -> dict[str, list[str]]:
    """Return what is wrong with each variant of a recording; nothing where it is right."""
    replay = Replay(recording)
    known = know(replay, room / recording.name / "known")
    found = {}
    for name, make in variants.items():
        documents = make(replay)
        folder = room / recording.name / name
        save(documents, folder)
        plain = _WITHOUT_GRAPHS.get(name)
        if plain:
            speeds = {"rerun": faster(), "device_3x": HEALTHY["device_3x"]}
            documents = speeds[plain](replay)
        found[name] = list(problems_of(folder, count(documents, known)))
        for file in folder.iterdir():
            file.unlink()
    return found


def main() -> int:
    """Run from the command line; 1 if any healthy variant is not right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recordings", nargs="*", type=Path)
    parser.add_argument("--kept-back", action="store_true", help="variants no rule was made by")
    parser.add_argument("--only", help="some variants, by name")
    options = parser.parse_args()
    variants = KEPT_BACK if options.kept_back else HEALTHY
    names = options.only.split(",") if options.only else list(variants)
    usual = [f if f.is_dir() else DATA / f.parent.name / f.name for f in RECORDINGS]
    usual = [f for f in usual if f.is_dir()] or [DATA / "h200" / "1f1b_p2_m4"]
    wrong, many, began = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="debubble-variants-") as room:
        for recording in options.recordings or usual:
            for name, problems in judge(
                recording, {name: variants[name] for name in names}, Path(room)
            ).items():
                many += 1
                wrong += bool(problems)
                for problem in problems:
                    _say(f"{recording.name} {name}: {problem}")
    _say(f"{many} healthy variants, {wrong} not right, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 (a program of its own)


if __name__ == "__main__":
    sys.exit(main())
