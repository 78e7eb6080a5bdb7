"""The meter against `find`, and its cost: `python benchmarks/meter.py accuracy|overhead|drift`.

accuracy  ten real pipelines (gloo) whose steps are metered and profiled at once: the bubble that
          `find` says of the meter's op tables against the one of the profiler's traces, the same
          for the median pass of each stage, and the verdict on each hop. Twice: of the meter alone,
          and with gaps inside passes as a capture of other steps shows them, the first two.
          Bars, for both: bubble within 1 point, stages within 2 %, hops alike.
recorded  (`--recorded TRACES …`) what marks would have told of recorded runs of GPUs: a pass begins
          when it is issued and its device is through with what was before. The bubble of their
          steps but the first, alone and with gaps from the first.
overhead  a real schedule in which the meter is switched on and off again and again: processor time
          that the job's thread takes for a step with it and without.
          Bar: 0.1 % of steps of 300 ms; of 5 ms it is stated.
drift     steps of a rank as measured, with their own noise: how many of the quiet ones raise an
          alarm, and after how many steps one that gets 5 % slower does. Bar: 20 steps, and 1 %
          of quiet ranks with a false alarm in 1,200 steps.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

import msgspec
import numpy as np
from numpy.typing import NDArray

import debubble
from debubble.annexes.meter.figures import CHART, RankFigures, StepFigures
from debubble.annexes.meter.settings import Settings
from debubble.capture.settings import environment_for
from debubble.timeline.figures import measure_windows
from debubble.timeline.inside import measure_inside, put_inside
from debubble.timeline.model import Timeline, union_of
from debubble.timeline.steps import only_steps

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.jobs.forked_ranks import environment_of_ranks
from support.jobs.recorded_pipeline import WORKLOAD, Workload

BUBBLE_BAR, STAGE_BAR, COST_BAR, STEPS_BAR = 0.01, 0.02, 0.001, 20
LONG_STEP_S, SHORT_STEP_S = 0.3, 0.005
BLOCKS, STEPS_OF_A_BLOCK = 60, 60
MICROBATCHES, MESSAGES_OF_A_MIDDLE_RANK = 8, 32
# Of ranks whose steps vary by 2 %, nearly all.
FOUND_BAR, PROMISED = 0.95, 0.01
# Steps of a run that stand for an earlier capture.
CAPTURED = 2
# Passes that do nothing (the input gradient of a first stage) have no length to compare.
SHORTEST_PASS_S = 1e-3

# Passes of tens of milliseconds, as in training; messages of 256 KiB. What lies between operators
# of a pass is busy to the meter and not to the profiler, which makes it longer, too.
USUAL = Workload(steps=5, microbatches=6, forward_ms=8.0, backward_ms=16.0, tokens=256, width=256)
RUNS = {
    "1f1b": USUAL,
    "1f1b, last stage long": replace(USUAL, layers=(3, 3, 3, 7)),
    "1f1b, first stage long": replace(USUAL, layers=(6, 3, 3, 4)),
    "1f1b, 2 ranks": replace(USUAL, ranks=2, layers=(5, 3)),
    "1f1b, 12 microbatches": replace(USUAL, microbatches=12),
    "1f1b, messages of 1 MiB": replace(USUAL, tokens=512, width=512),
    "gpipe": replace(USUAL, schedule="gpipe"),
    "gpipe, uneven": replace(USUAL, schedule="gpipe", layers=(2, 4, 6, 4)),
    "interleaved-1f1b": replace(
        USUAL, schedule="interleaved-1f1b", layers=(2,) * 8, microbatches=8
    ),
    "zbv": replace(USUAL, schedule="zbv", layers=(5,) * 8, microbatches=8),
}


def hop_verdicts(run: debubble.Analysis) -> dict[str, str]:
    return {
        "-".join(map(str, hop.times.figures.stages[0])): str(hop.judgement.verdict)
        for hop in run.links.hops
    }


def stage_times(timeline: Timeline) -> dict[tuple[int, int], float]:
    """Return the median of each stage and kind of pass, in seconds."""
    passes = timeline.passes
    found = {}
    for stage in np.unique(passes.stage).tolist():
        for kind in np.unique(passes.kind).tolist():
            rows = (passes.stage == stage) & (passes.kind == kind)
            if rows.any():
                found[stage, kind] = float(np.median((passes.end_ns - passes.start_ns)[rows])) / 1e9
    return found


def farthest(traced: Timeline, metered: Timeline) -> dict[str, object]:
    """Hold the passes of two timelines together: the largest difference of a stage, and all."""
    lengths = stage_times(traced)
    apart = {
        where: metered_s / lengths[where] - 1
        for where, metered_s in stage_times(metered).items()
        if lengths.get(where, 0) > SHORTEST_PASS_S
    }
    return {
        "stages_apart": max(map(abs, apart.values())),
        "stages": {f"{stage}{kind}": round(value, 4) for (stage, kind), value in apart.items()},
    }


def bubble_of(timeline: Timeline) -> float:
    windows = measure_windows(timeline, timeline.pipelines[0])
    return median(window.bubble_fraction for window in windows)


def hold_with_a_capture(
    traced: Timeline, metered: Timeline, captured: int = CAPTURED
) -> dict[str, object]:
    """Take the gaps inside passes from the first steps, and hold the others together."""
    first, rest = metered.steps[:captured], metered.steps[captured:]
    of_traces = dict(zip(metered.steps, traced.steps, strict=True))
    inside = measure_inside(
        only_steps(traced, [of_traces[step] for step in first]), only_steps(metered, first)
    )
    # Steps may overlap: all are changed, and then some are looked at.
    metered = only_steps(put_inside(metered, inside), rest)
    traced = only_steps(traced, [of_traces[step] for step in rest])
    bubbles = [bubble_of(run) for run in (traced, metered)]
    return {
        "bubble": bubbles[1],
        "bubble_apart": abs(bubbles[1] - bubbles[0]),
        "stages_apart": farthest(traced, metered)["stages_apart"],
    }


def run_ranks(workload: Workload, folder: Path, order: dict[str, str]) -> None:
    """Run a pipeline of real processes, which the meter's order reaches as it reaches a job."""
    folder.mkdir()
    (folder / WORKLOAD).write_bytes(msgspec.json.encode(workload))
    with patch.dict(os.environ, order):
        environment = environment_of_ranks()
    program = "import sys; from support.jobs.recorded_pipeline import main; main(*sys.argv[1:])"
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(folder), str(rank)], env=environment)
        for rank in range(workload.world)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit("a rank ended with an error")


def run_and_hold(name: str, workload: Workload, folder: Path) -> dict[str, object]:
    """Meter and profile the same steps of a real pipeline, and hold the two answers together."""
    order = environment_for(
        Settings(out=folder / "meter", segment=10**6, on_drift=False), os.environ
    )
    run_ranks(workload, folder / "traces", order)
    first = workload.all_steps - workload.steps
    return {"run": name, **hold(folder / "traces", folder / "meter", first, workload.steps)}


def hold(traces: Path, meter: Path, first: int, count: int) -> dict[str, object]:
    """Hold what `find` says of traces against what it says of a meter's tables of those steps."""
    with tempfile.TemporaryDirectory() as scratch:
        for table in sorted(meter.rglob("rank*.csv")):
            with table.open() as rows, (Path(scratch) / table.name).open("w") as kept:
                reader, writer = csv.reader(rows), csv.writer(kept, lineterminator="\n")
                writer.writerow(next(reader))
                writer.writerows(row for row in reader if first <= int(row[0]) < first + count)
        traced, metered = (debubble.analyse(one) for one in (str(traces), scratch))
        bubbles = [run.pipeline.bubble_fraction for run in (traced, metered)]
        hops = [hop_verdicts(run) for run in (traced, metered)]
        timelines = [run.timeline for run in (traced, metered)]
    return {
        "bubble_traced": bubbles[0],
        "bubble_metered": bubbles[1],
        "bubble_apart": abs(bubbles[1] - bubbles[0]),
        **farthest(*timelines),
        "with_a_capture": hold_with_a_capture(*timelines),
        "hops_alike": hops[0] == hops[1],
        "hops": hops,
        "steps": [len(run.steps) for run in timelines],
    }


def marked(timeline: Timeline) -> Timeline:
    """Return a recorded run as a meter would have told it."""
    passes, ranks = timeline.passes, []
    start = passes.start_ns.copy()
    for rank in timeline.ranks:
        mine = np.flatnonzero(passes.rank == rank.rank)
        before = np.searchsorted(rank.apparent.start_ns, start[mine]) - 1
        free = np.where(before >= 0, rank.apparent.end_ns[before], start[mine])
        start[mine] = np.minimum(start[mine], np.maximum(free, passes.issued_ns[mine]))
        busy = union_of(start[mine], passes.end_ns[mine])
        ranks.append(replace(rank, busy=busy, occupied=busy))
    return replace(timeline, ranks=tuple(ranks), passes=replace(passes, start_ns=start))


def recorded(traces: str) -> None:
    run = debubble.analyse(traces)
    traced = only_steps(run.timeline, [window.step for window in run.pipeline.windows])
    metered = marked(traced)
    rest = [only_steps(timeline, timeline.steps[1:]) for timeline in (traced, metered)]
    told = hold_with_a_capture(traced, metered, captured=1)
    alone = {**farthest(*rest), "bubble": bubble_of(rest[1])}
    print(
        json.dumps(
            {
                "run": traces,
                "bubble_traced": bubble_of(rest[0]),
                "alone": {key: value for key, value in alone.items() if key != "stages"},
                "with_a_capture": told,
            }
        ),
        flush=True,
    )


def accuracy(runs: dict[str, Workload]) -> bool:
    missed = {"alone": 0, "with a capture": 0}
    for name, workload in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            found = run_and_hold(name, workload, Path(folder))
        said = []
        for way, one in (("alone", found), ("with a capture", found["with_a_capture"])):
            near = one["bubble_apart"] <= BUBBLE_BAR and one["stages_apart"] <= STAGE_BAR
            if not (near and found["hops_alike"]):
                missed[way] += 1
                said.append(f"MISSED {way}")
        print(json.dumps(found), *said, flush=True)
    print(json.dumps({"runs": len(runs), "missed": missed}), flush=True)
    return not any(missed.values())


def overhead(blocks: int) -> bool:
    """Switch the meter on and off in a real schedule, and see what a step costs the job's thread.

    One rank alone, in this process: neighbours would add more noise than the meter costs. A step
    of it has passes and no messages; what those of a middle rank cost is timed by itself.
    """
    import torch  # noqa: PLC0415 (only here)
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed import pipelining  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(32, 32)
    stage = pipelining.PipelineStage(model, 0, 1, torch.device("cpu"))
    loss = torch.nn.functional.mse_loss
    schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)
    batch = torch.randn(MICROBATCHES * 16, 32)
    times: dict[bool, list[float]] = {True: [], False: []}
    whole: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for block in range(-2, blocks):
            meter = debubble.meter(out=folder, on_drift=False) if block % 2 else None
            for step in range(STEPS_OF_A_BLOCK):
                began, thread = time.process_time(), time.thread_time()
                schedule.step(batch, target=batch)
                model.zero_grad()
                thread, took = time.thread_time() - thread, time.process_time() - began
                if step > 1 and block >= 0:
                    times[meter is not None].append(thread)
                    whole[meter is not None].append(took)
            if meter is not None:
                meter.close()
                if meter.problem is not None:
                    raise RuntimeError(meter.problem)
    dist.destroy_process_group()
    rng = np.random.default_rng(0)
    # The mean of all but the slowest tenth: the meter's thread works in some steps only.
    on, off = (np.array(times[way]) for way in (True, False))
    drawn = [
        _middle(rng.choice(on, len(on))) - _middle(rng.choice(off, len(off))) for _ in range(500)
    ]
    messages = MESSAGES_OF_A_MIDDLE_RANK * message_cost()
    cost, low, high = (
        messages + value
        for value in (_middle(on) - _middle(off), *np.quantile(drawn, (0.025, 0.975)))
    )
    shown = {
        "step_s": _middle(off),
        "cost_of_a_step_s": cost,
        "interval_s": [low, high],
        "of_it_messages_s": messages,
        "with_the_meters_thread_s": messages + _middle(whole[True]) - _middle(whole[False]),
        "of_300_ms": cost / LONG_STEP_S,
        "of_5_ms": cost / SHORT_STEP_S,
        "steps": len(on),
    }
    held = cost / LONG_STEP_S <= COST_BAR
    print(json.dumps(shown), "" if held else "MISSED", flush=True)
    return held


def message_cost() -> float:
    """Return what standing around one message, posted and waited for, takes the job's thread."""
    import torch  # noqa: PLC0415 (only here)

    from debubble.annexes.meter import hooks  # noqa: PLC0415
    from debubble.annexes.meter.record import HostClock, Recorder  # noqa: PLC0415

    class Work:
        def wait(self) -> bool:
            return True

    class Group:
        def send(self, _tensors: list[torch.Tensor], _peer: int, _tag: int) -> Work:
            return Work()

        recv = send

    def run(group: Group) -> float:
        tensors, lengths = [torch.zeros(4)], []
        for _ in range(200):
            recorder.beat()
            recorder.finished()
            began = time.thread_time()
            for _ in range(MESSAGES_OF_A_MIDDLE_RANK // 2):
                group.recv(tensors, 0, 0).wait()
                group.send(tensors, 0, 0).wait()
            lengths.append((time.thread_time() - began) / MESSAGES_OF_A_MIDDLE_RANK)
        return median(lengths)

    recorder = Recorder(HostClock())
    without = run(Group())
    around = hooks.Hooks(recorder, fail=print)
    around.place = hooks.Place(rank=1, ranks=(0, 1))
    with patch.object(hooks.dist, "get_process_group_ranks", lambda _group: [0, 1]):
        around._hook_messages(SimpleNamespace(ProcessGroup=Group, Work=Work))  # noqa: SLF001
        return run(Group()) - without


def _middle(times: NDArray[np.float64] | list[float]) -> float:
    return float(np.sort(times)[: max(1, int(len(times) * 0.9))].mean())


def drifts(ranks: int) -> bool:
    """Play ranks of several noises, quiet and then 5 % slower, to what judges them in a job."""
    rng = np.random.default_rng(0)
    held = True
    warm_up, quiet = CHART.reference, 1200
    for noise in (0.002, 0.01, 0.02):
        alarms, late = 0, []
        for _ in range(ranks):
            rank = RankFigures(rank=0)
            raised = [_take(rank, n, rng, noise, 1.0) for n in range(warm_up + quiet)]
            alarms += any(raised)
            if not any(raised):
                slower = (_take(rank, n, rng, noise, 1.05) for n in range(200))
                late.append(next((n for n, told in enumerate(slower, 1) if told), 200))
        found = {
            "noise": noise,
            "false_alarms": alarms / ranks,
            "promised": PROMISED,
            "steps_until_found": {"median": median(late), "most": max(late)},
            "within_20_steps": sum(steps <= STEPS_BAR for steps in late) / len(late),
        }
        good = found["false_alarms"] <= PROMISED and found["within_20_steps"] >= FOUND_BAR
        held &= good
        print(json.dumps(found), "" if good else "MISSED", flush=True)
    return held


def _take(
    rank: RankFigures, number: int, rng: np.random.Generator, noise: float, slower: float
) -> bool:
    """Take in a step whose work takes 100 ms, give or take heavy-tailed noise."""
    busy_ns = int(1e8 * slower * np.exp(noise * rng.standard_t(5) / 1.29))
    told = StepFigures(
        number=number,
        start_ns=0,
        end_ns=busy_ns,
        step_ns=busy_ns,
        busy_ns=busy_ns,
        passes_ns={},
        waits_ns={},
    )
    return rank.take(told)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["accuracy", "overhead", "drift"])
    parser.add_argument("--run", action="append", help="of the accuracy; all without")
    parser.add_argument("--tiny", action="store_true", help="a moment's work, to see that it runs")
    parser.add_argument("--recorded", nargs="+", metavar="TRACES", help="of GPUs")
    parser.add_argument("--held", type=Path, metavar="FOLDER", help="hold traces/ and meter/ in it")
    told = parser.parse_args()
    held = True
    if told.held is not None:
        first, count = map(int, (told.held / "steps.txt").read_text().split())
        print(json.dumps(hold(told.held / "traces", told.held / "meter", first, count), indent=1))
        return 0
    if told.recorded:
        for traces in told.recorded:
            recorded(traces)
        return 0
    if "accuracy" in told.what:
        tiny = {"1f1b": replace(USUAL, ranks=2, layers=(1, 1), steps=3, microbatches=2)}
        held &= accuracy(tiny if told.tiny else {name: RUNS[name] for name in told.run or RUNS})
    if "overhead" in told.what:
        held &= overhead(2 if told.tiny else BLOCKS)
    if "drift" in told.what:
        held &= drifts(2 if told.tiny else 400)
    return 0 if held or told.tiny else 1


if __name__ == "__main__":
    sys.exit(main())
