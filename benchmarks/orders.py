"""What a search for orders reaches, and how long it takes.

Bars: on 200 random pipelines never slower than the best schedule with a name, and in the middle 3 %
quicker where stages are uneven or a hop is slow; the quickest there is where that can be known; the
zero-bubble paper's ZB-1p and ZB-2p and the V-schedules' points of memory to .005; 16 ranks and 64
microbatches in ten seconds of one core, in memory that does not grow.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import sys
import time

from debubble.plan.orders.pipeline import Pipeline, Rows, StageCosts, Times, longest_rank
from debubble.plan.orders.search import BestOrder, Search, search
from debubble.timeline.schedules import Shape, check_order, place_stages

# ranks, microbatches, F, I, W and a hop in milliseconds, and the bubbles of ZB-1p and ZB-2p: the
# zero-bubble paper's. What W sets free of a microbatch's memory is its model's, by its sizes.
PAPER = (
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.0433),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1242, 0.0039),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.0674, 0.0026),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.1397, 0.0066),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.1088, 0.0054),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.0576, 0.0028),
)
OF_WEIGHTS = {8: 73_728 / 201_216, 16: 163_840 / 378_880}
# ranks and microbatches, and the bubbles of V-Half and V-Min; V-ZB has none.
V_POINTS = {
    (4, 8): (0.0943, 0.1864),
    (4, 16): (0.0495, 0.1028),
    (8, 24): (0.1056, 0.1579),
    (8, 64): (0.0424, 0.0657),
    (16, 48): (0.1246, 0.1700),
}
NS = 1_000_000
SPLIT_COSTS = 1.05
# Two stages a rank have more orders that are nearly as good: so many more rounds.
_V_ROUNDS = 3


def random_pipeline(seed: int) -> tuple[Pipeline, bool]:
    """Return a pipeline, and whether its stages are uneven or a hop of it is slow."""
    chance = random.Random(seed)  # noqa: S311 (no secret)
    ranks = chance.randint(2, 16)
    microbatches = min(64, ranks * chance.randint(1, 4))
    uneven, slow = chance.random() < 0.7, chance.random() < 0.7
    sizes = [chance.uniform(1, 2) if uneven else 1.0 for _ in range(ranks)]
    stages = tuple(
        StageCosts(
            forward=round(size * NS),
            input_gradient=round(SPLIT_COSTS * size * NS),
            weight_gradient=round(SPLIT_COSTS * size * NS),
            backward=round(2 * size * NS),
            held=size,
            halfway=0.5 * size,
        )
        for size in sizes
    )
    hops = [round(chance.uniform(0.02, 0.2) * NS)] * ranks
    if slow:
        hops[chance.randrange(ranks - 1)] *= chance.randint(2, 5)
    # One limit for all ranks, as devices have: what the fullest needs for 1F1B, up to twice that.
    needs = max(min(microbatches, ranks - rank) * size for rank, size in enumerate(sizes))
    limit = needs * chance.uniform(1, 2)
    pipeline = Pipeline(
        place_stages(Shape.LOOP, ranks, 1),
        microbatches,
        stages,
        tuple(hops),
        (0, *hops[:-1]),
        (limit,) * ranks,
    )
    return pipeline, uneven or slow


def quickest_of_all(pipeline: Pipeline, below: int) -> int:  # noqa: C901, PLR0912 (one search)
    """Return the window of the quickest order there is, or `below` where none is quicker.

    All orders of one stage a rank grow pass by pass; of those that ran the same passes, one is
    forgotten that is later in everything. It shares no line with the search.
    """
    stages, count, last = pipeline.stages, pipeline.microbatches, len(pipeline.stages) - 1
    nothing: tuple[tuple[int, ...], ...] = ((),) * (last + 1)
    first = ((0,) * (last + 1), ((0,) * count, *nothing[1:]), nothing)
    layer = {((0, 0, 0),) * (last + 1): [first]}
    while layer:
        grown: dict[tuple[tuple[int, int, int], ...], list[tuple]] = {}  # type: ignore[type-arg]
        for done, states in layer.items():
            for free, forward, backward in states:
                for rank, (begun, returned, weighed) in enumerate(done):
                    cost = stages[rank]
                    held = (begun - weighed) * cost.held + (returned - weighed) * cost.halfway
                    room = pipeline.limits[rank] * (1 + 1e-9) - held
                    kinds = "F" * bool(begun < count and forward[rank] and cost.held <= room)
                    if returned < begun and (rank == last or backward[rank]):
                        kinds += "B" + "I" * (cost.halfway <= room)
                    kinds += "W" * (weighed < returned)
                    for kind in kinds:
                        now, ahead, back = free[rank], list(forward), list(backward)
                        if kind == "F":
                            now = max(now, ahead[rank][0]) + cost.forward
                            ahead[rank] = ahead[rank][1:]
                            if rank < last:
                                ahead[rank + 1] += (now + pipeline.up[rank],)
                            after = (begun + 1, returned, weighed)
                        elif kind == "W":
                            now += cost.weight_gradient
                            after = (begun, returned, weighed + 1)
                        else:
                            if rank < last:
                                now = max(now, back[rank][0])
                                back[rank] = back[rank][1:]
                            now += cost.input_gradient if kind == "I" else cost.backward
                            if rank:
                                back[rank - 1] += (now + pipeline.down[rank],)
                            after = (begun, returned + 1, weighed + (kind == "B"))
                        both = min(cost.backward, cost.input_gradient + cost.weight_gradient)
                        left = (count - after[0]) * cost.forward + (count - after[1]) * both
                        left += (after[1] - after[2]) * cost.weight_gradient
                        if now + left >= below:
                            continue
                        key = (*done[:rank], after, *done[rank + 1 :])
                        state = (
                            (*free[:rank], now, *free[rank + 1 :]),
                            tuple(ahead),
                            tuple(back),
                        )
                        if all(own == (count, count, count) for own in key):
                            below = min(below, max(state[0]))
                            continue
                        others = grown.setdefault(key, [])
                        if not any(_no_later(other, state) for other in others):
                            others[:] = [one for one in others if not _no_later(state, one)]
                            others.append(state)
        layer = grown
    return below


def _no_later(state: tuple, other: tuple) -> bool:  # type: ignore[type-arg]
    flat = zip((state[0], *state[1], *state[2]), (other[0], *other[1], *other[2]), strict=True)
    return all(a <= b for mine, others in flat for a, b in zip(mine, others, strict=True))


def small_pipeline(seed: int) -> Pipeline:
    """Return a pipeline of which the quickest order can be known."""
    chance = random.Random(seed)  # noqa: S311 (no secret)
    ranks = chance.choice((2, 3))
    stages = []
    for _ in range(ranks):
        inputs, weights = chance.randint(8, 20), chance.randint(5, 18)
        stages.append(
            StageCosts(
                forward=chance.randint(10, 20),
                input_gradient=inputs,
                weight_gradient=weights,
                backward=inputs + weights - chance.choice((0, 0, 1, 2)),
                halfway=chance.choice((0.0, 0.0, 0.5)),
            )
        )
    hops = [chance.choice((0, 2, 10)) for _ in range(ranks)]
    rooms = [float(chance.choice((ranks - r + 0.5, ranks + 0.5, 2 * ranks))) for r in range(ranks)]
    return Pipeline(
        place_stages(Shape.LOOP, ranks, 1),
        chance.choice((2, 3, 4)),
        tuple(stages),
        tuple(hops),
        (0, *hops[:-1]),
        tuple(rooms),
    )


def even_pipeline(row: tuple[float, ...], limit: float) -> Pipeline:
    """Return a pipeline of the zero-bubble paper, with room for so many microbatches."""
    ranks, microbatches = int(row[0]), int(row[1])
    forward, inputs, weights, hop = (round(ms * NS) for ms in row[2:6])
    stage = StageCosts(
        forward=forward,
        input_gradient=inputs,
        weight_gradient=weights,
        backward=inputs + weights,
        halfway=OF_WEIGHTS[ranks] - 1,
    )
    return Pipeline(
        place_stages(Shape.LOOP, ranks, 1),
        microbatches,
        (stage,) * ranks,
        (hop,) * ranks,
        (hop,) * ranks,
        (limit,) * ranks,
    )


def v_pipeline(ranks: int, microbatches: int, limit: float) -> Pipeline:
    """Return two equal stages a rank in a V, with room for so many microbatches of both."""
    half = NS // 2
    stage = StageCosts(
        forward=half, input_gradient=half, weight_gradient=half, backward=2 * half, held=0.5
    )
    stages = 2 * ranks
    return Pipeline(
        place_stages(Shape.V, ranks, 2),
        microbatches,
        (stage,) * stages,
        (0,) * stages,
        (0,) * stages,
        (limit,) * ranks,
    )


def bubble_of(pipeline: Pipeline, rounds: int) -> float:
    """Return the bubble of the longest rank, which the papers give, of the best order found.

    Searched for twice: by that, and by the window.
    """

    def score(rows: Rows, times: Times) -> int:
        return longest_rank(rows, times)

    bubbles = [1.0]
    for aim in (score, None):
        found = search(pipeline, score=aim, rounds=rounds)
        times = None if found is None else pipeline.run(found.rows)
        if found is not None and times is not None:
            work = max(sum(pipeline.lengths[number] for number in row) for row in found.rows)
            bubbles.append(1 - work / longest_rank(found.rows, times))
    return min(bubbles)


def measure_random(count: int, rounds: int) -> bool:
    """Search in random pipelines; never slower, and in the middle 3 % quicker where it is odd."""
    gains, above, slower = [], [], 0
    for seed in range(count):
        pipeline, odd = random_pipeline(seed)
        found = search(pipeline, rounds=rounds)
        if found is None or found.gain is None:
            raise SystemExit(f"pipeline {seed}: nothing was found")
        check_order(pipeline.order(found.rows))
        slower += found.gain < 0 or not pipeline.fits(found.rows)
        above.append(found.window / found.bound - 1)
        gains += [found.gain] if odd else []
    middle = statistics.median(gains)
    print(
        f"{count} random pipelines, {rounds} rounds each: slower than the best with a name "
        f"{slower}; uneven or with a slow hop {len(gains)}, quicker by {100 * min(gains):.1f} to "
        f"{100 * max(gains):.1f} %, in the middle {100 * middle:.1f} %; above the lower bound by "
        f"{100 * statistics.median(above):.1f} % in the middle, {100 * max(above):.1f} % at most"
    )
    return not slower and middle >= 0.03


def measure_small(count: int) -> bool:
    """Hold the search against all orders there are."""
    missed = 0
    for seed in range(count):
        pipeline = small_pipeline(seed)
        found = search(pipeline, rounds=12)
        missed += found is None or quickest_of_all(pipeline, found.score) < found.score
    print(f"{count} small pipelines: {count - missed} times the quickest order there is")
    return not missed


def measure_papers(rows: int, rounds: int) -> bool:
    """Hold the search against published bubbles: never more than .005 above."""
    good = True
    for row in PAPER[:rows]:
        for times, published in zip((1, 2), row[6:], strict=True):
            found = bubble_of(even_pipeline(row, times * row[0]), rounds)
            good &= found <= published + 0.005
            print(f"ZB-{times}p, {row[0]} ranks, m {row[1]}: {found:.4f}, published {published}")
    for (ranks, count), points in list(V_POINTS.items())[:rows]:
        limits = ((ranks + 2) // 2, (ranks + 4) // 3, ranks)
        for name, limit, published in zip(
            ("V-Half", "V-Min", "V-ZB"), limits, (*points, 0.0), strict=True
        ):
            found = bubble_of(v_pipeline(ranks, count, limit), _V_ROUNDS * rounds)
            good &= found <= published + 0.005
            print(f"{name}, {ranks} ranks, m {count}: {found:.4f}, published {published}")
    return good


def measure_large(ranks: int, microbatches: int, seconds: float) -> bool:
    """Search in a large pipeline for some time of one core; memory must not grow."""
    pipeline, _ = random_pipeline(7)
    stages = tuple(pipeline.stages[n % len(pipeline.stages)] for n in range(ranks))
    large = Pipeline(
        place_stages(Shape.LOOP, ranks, 1),
        microbatches,
        stages,
        (NS // 10,) * ranks,
        (NS // 10,) * ranks,
        (1.3 * ranks * max(stage.held for stage in stages),) * ranks,
    )
    looked = Search(pipeline=large)
    began, halfway = time.process_time(), 0
    while time.process_time() - began < seconds and looked.go_on():
        if not halfway and time.process_time() - began > seconds / 2:
            halfway = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - (halfway or 0)
    found: BestOrder | None = looked.found()
    if found is None:
        return False
    took = time.process_time() - began
    print(
        f"{ranks} ranks, {microbatches} microbatches: {found.rounds} rounds in {took:.1f} s of one "
        f"core, {100 * (found.gain or 0):.1f} % quicker than {found.named}, "
        f"{100 * (found.window / found.bound - 1):.1f} % above the lower bound; memory grew by "
        f"{grown / 1024 if halfway else 0:.1f} MiB in the second half"
    )
    return (found.gain or 0) >= 0 and took < 1.2 * seconds + 1


def main() -> int:
    """Measure all bars, and say whether they hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a moment's work, to see that it runs")
    parser.add_argument("--pipelines", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=60)
    asked = parser.parse_args()
    if asked.tiny:
        measure_random(3, 6)
        measure_small(3)
        measure_papers(1, 6)
        measure_large(4, 8, 0.5)
        return 0
    good = [
        measure_random(asked.pipelines, asked.rounds),
        measure_small(60),
        measure_papers(len(PAPER), asked.rounds),
        measure_large(16, 64, 10.0),
    ]
    print("bars hold" if all(good) else "a bar is missed")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
