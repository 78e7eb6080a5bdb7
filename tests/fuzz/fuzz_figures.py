"""Damages recorded traces and sees that no figure moves without a warning that names the rank.

    python tests/fuzz/fuzz_figures.py --cases 5000 [--seed S] [--first K]

A recording is read once. Of each case only the damaged ranks are read again; then the whole run is
measured as `find` does, and held against what the sound recording says.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

TESTS = Path(__file__).resolve().parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from fuzz.field_damage import (
    RANK_DAMAGES,
    Document,
    cut_away,
    damage_field,
    damage_header,
    jump_clock,
    lose_a_name,
)
from support.traces.recordings import DATA, SHARED

from debubble.errors import DebubbleError, Gap
from debubble.fleet.survey import NoPipelineIn, Question, Survey, measure_run
from debubble.timeline.figures import PipelineFigures
from debubble.trace.captures import Capture, recognise
from debubble.trace.columns import peak_memory
from debubble.trace.format import Reading
from debubble.trace.run import RunFiles, find_run, read_file, settle_run
from debubble.trace.source import DEFAULT_LIMITS

DEFAULT_SEED = 20260202
RECORDINGS = (
    "h200/fwd_closed_m4", "h200/1f1b_p2_m4", "frameworks/ds_m8", "frameworks/mg_nosync",
    "frameworks/tt_1115", "frameworks/mg_int_batched", "serving/k4",
)  # fmt: skip
# Those that lie beside a checkout, where they do.
BESIDE = (
    "h200/1f1b_m8", "h200/fwd_closed_m8", "h200_free/c_fwd_m6",
    "frameworks/mg_1f1b_m8", "frameworks/tt_1f1b_m8",
)  # fmt: skip
# What a figure may move by without a word: a fifth of a point of a share, a hundredth of a time.
SHARE_MOVES, TIME_MOVES = 0.002, 0.01
_ROUNDING = 1e-6
_SHARES = frozenset({"bubble", "useful", "busy"})
_NUMBERS = re.compile(r"\b(\d{1,4})(?:-(\d{1,4}))?\b")

Figures = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A sound run, taken apart."""

    name: str
    found: RunFiles
    documents: tuple[Document, ...]
    readings: tuple[Reading, ...]
    ranks: tuple[int, ...]
    figures: Figures
    states_bandwidth: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a case."""

    what: str
    moved: str = ""
    """The figures that moved although nothing was said, or what broke; nothing where all is well"""
    details: str = ""


@cache
def load_recording(folder: Path) -> Recording:
    """Read a recording, and measure it."""
    found = find_run([str(folder)])
    files = found.capture.files
    readings = tuple(read_file(known, DEFAULT_LIMITS) for known in files)
    survey = measure_run(settle_run(found, readings), Question())
    assert not survey.gaps, f"{folder} is not sound: {survey.gaps}"
    documents = tuple(Document.load(Path(known.file)) for known in files)
    return Recording(
        name=folder.name,
        found=found,
        documents=documents,
        states_bandwidth=b"memory bandwidth" in documents[0].bytes(),
        readings=readings,
        ranks=tuple(known.rank for known in files if known.rank is not None),
        figures=figures_of(survey),
    )


def figures_of(survey: Survey) -> Figures:
    """Return the headline figures of a run."""
    shown: PipelineFigures = survey.shown
    figures: Figures = {
        "kind": shown.kind,
        "bubble": shown.bubble_fraction,
        "useful": shown.useful_fraction,
        "busy": shown.apparent_fraction,
        "latency": shown.batch_latency_ns,
        "step time": shown.step_time_ns,
        "in flight": shown.stream.in_flight if shown.stream else None,
    }
    peaks = {trace.rank: peak_memory(trace) for trace in survey.traces}
    figures |= {f"memory of {rank}": peak for rank, peak in peaks.items()}
    return figures


def moved(before: Figures, after: Figures) -> list[str]:
    """Name the figures that are not what they were."""
    found = []
    for name in {**before, **after}:
        was, now = before.get(name), after.get(name)
        if isinstance(was, int | float) and isinstance(now, int | float):
            allowed = SHARE_MOVES if name in _SHARES else TIME_MOVES * abs(was)
            if abs(now - was) <= allowed * (1 + _ROUNDING):
                continue
        elif was == now:
            continue
        found.append(f"{name} {was} → {now}")
    return found


def names(gap: Gap, ranks: set[int]) -> bool:
    """Tell whether a warning names one of the ranks."""
    if gap.rank is not None:
        return gap.rank in ranks
    named: set[int] = set()
    for first, last in _NUMBERS.findall(gap.message):
        named.update(range(int(first), int(last or first) + 1))
    return bool(named & ranks)


def judge(recording: Recording, damaged: Mapping[int, Document], what: str, room: Path) -> Outcome:
    """Read the damaged ranks, measure the run, and compare."""
    readings = list(recording.readings)
    files = list(recording.found.capture.files)
    ranks = {recording.ranks[row] for row in damaged}
    everyone = len(ranks) == len(recording.ranks)
    try:
        for row, document in damaged.items():
            path = room / Path(files[row].file).name.removesuffix(".gz")
            path.write_bytes(document.bytes())
            files[row] = recognise(str(path))
            readings[row] = read_file(files[row], DEFAULT_LIMITS)
        capture = Capture(name="damaged", files=tuple(files))
        found = RunFiles(capture=capture, captures=(capture,), left_alone=(), gaps=())
        survey = measure_run(settle_run(found, readings), Question())
    except NoPipelineIn as why:
        said = everyone or any(names(gap, ranks) for gap in why.run.gaps)
        return Outcome(what=what, moved="" if said else f"no pipeline: {why}")
    except DebubbleError:
        return Outcome(what=what)
    except Exception as error:  # noqa: BLE001 (whatever comes is a finding)
        broke = f"{type(error).__name__}: {str(error)[:200]}"
        return Outcome(what=what, moved=broke, details=traceback.format_exc())
    changed = moved(recording.figures, figures_of(survey))
    if not changed or any(everyone or names(gap, ranks) for gap in survey.gaps):
        return Outcome(what=what)
    warned = ", ".join(f"{gap.code}" for gap in survey.gaps)
    return Outcome(what=what, moved=f"{'; '.join(changed)} (said: {warned or 'nothing'})")


def make_case(
    seed: int, number: int, recordings: tuple[Recording, ...]
) -> tuple[Recording, dict[int, Document], str]:
    """Return the damaged ranks of a case, and what was done to them."""
    random = Random(f"{seed}:{number}")  # noqa: S311 (damage is no secret)
    # Small recordings are as telling as large ones, and read in a fraction of the time.
    weights = [1 / sum(len(one.events) for one in known.documents) for known in recordings]
    recording = random.choices(recordings, weights)[0]
    form = random.random()
    every = random.random() < 0.1
    rows = (
        range(len(recording.documents)) if every else [random.randrange(len(recording.documents))]
    )
    damage = random.choice(RANK_DAMAGES)
    # A capture of a stream begins and ends where it likes. Of a few steps, the first rank and the
    # last have one neighbour, and of few of its messages is told when they came.
    streams, inner = recording.figures["kind"] == "stream", recording.ranks[1:-1]
    told = streams or (not every and recording.ranks[rows[0]] in inner)
    untold = (cut_away,) if streams else () if told else (jump_clock,)
    if form < 0.6 or damage in untold:
        damage = damage_field if form < 0.5 else damage_header
    damaged = {}
    what = ""
    again = random.random()
    for row in rows:
        damaged[row] = recording.documents[row].copy()
        what = damage(Random(f"{again}"), damaged[row])  # noqa: S311 (the same on all ranks)
    # What no rank marks or runs, a job may never have marked or run; and a run of which every time
    # is twice as long is that of a machine half as quick, unless copies tell how quick it is.
    # Clocks that all jump are a job that paused.
    slower = what.startswith("ts/dur of all") and not recording.states_bandwidth
    if every and (" range" in what or slower or damage in {jump_clock, lose_a_name}):
        every, damaged = False, {rows[0]: damaged[rows[0]]}
    whose = "all ranks" if every else f"rank {recording.ranks[rows[0]]}"
    return recording, damaged, f"{recording.name}, {whose}: {what}"


def fuzz(numbers: range, seed: int) -> Iterator[tuple[int, Outcome]]:
    """Judge cases one after the other."""
    folders = [DATA / name for name in RECORDINGS]
    folders += [SHARED / name for name in BESIDE if (SHARED / name).is_dir()]
    recordings = tuple(load_recording(folder) for folder in folders)
    with tempfile.TemporaryDirectory(prefix="debubble-fuzz-") as room:
        for number in numbers:
            recording, damaged, what = make_case(seed, number, recordings)
            yield number, judge(recording, damaged, what, Path(room))


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; 1 if there was any finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--first", type=int, default=0, metavar="K", help="begin at this case")
    options = parser.parse_args(arguments)
    numbers = range(options.first, options.first + options.cases)
    began = time.monotonic()
    findings: Counter[str] = Counter()
    for number, outcome in fuzz(numbers, options.seed):
        if outcome.moved:
            findings[outcome.what.partition(": ")[2]] += 1
            _say(f"case {number}: {outcome.what}: {outcome.moved}")
            if outcome.details:
                _say(outcome.details)
            _say(f"  again: python {__file__} --seed {options.seed} --first {number} --cases 1")
    took = time.monotonic() - began
    _say(
        f"{len(numbers):,} cases, seed {options.seed}: {findings.total()} findings in {took:.0f} s"
    )
    return 1 if findings else 0


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 (a program of its own)


if __name__ == "__main__":
    sys.exit(main())
