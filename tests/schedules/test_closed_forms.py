"""Orders held against published figures, by a small simulator that knows nothing but max and add.

D1, D2: the bubble against the makespan of all ranks, and against the longest single rank.
"""

from __future__ import annotations

from itertools import product

import pytest

from debubble.timeline.schedules import order_of

SIZES = list(product(range(2, 7), (12, 16, 24)))


def spans_of(order, times, comm=0.0):
    """Return each rank's start and end; a pair that overlaps gives both results at its end."""
    stages = 1 + max(action.stage for rank in order for action in rank)
    where = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    ends, clock, start, at = {}, [0.0] * len(order), {}, [0] * len(order)

    def arrival(rank, stage, kind, microbatch):
        end = ends[stage, kind, microbatch]
        return end if where[stage] == rank else end + comm

    def ready(rank, action):
        stage, kind, m, _ = action
        if kind == "F":
            return arrival(rank, stage - 1, "F", m) if stage else 0.0
        if kind == "W":
            return arrival(rank, stage, "I", m)
        back = arrival(rank, stage + 1, "I", m) if stage + 1 < stages else 0.0
        return max(arrival(rank, stage, "F", m), back)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            while at[rank] < len(actions):
                cell = actions[at[rank] : at[rank] + 1 + actions[at[rank]].overlap]
                try:
                    begin = max(clock[rank], *(ready(rank, action) for action in cell))
                except KeyError:
                    break
                start.setdefault(rank, begin)
                clock[rank] = begin + sum(times[action.kind] for action in cell)
                for stage, kind, m, _ in cell:
                    ends[stage, "I" if kind == "B" else kind, m] = clock[rank]
                at[rank] += len(cell)
                moved = True
    assert at == [len(actions) for actions in order]
    return [(start[rank], clock[rank]) for rank in range(len(order))]


def equal(each=1.0):
    return {"F": each, "I": each, "W": each, "B": 2 * each}


def makespan(order, times, comm=0.0):
    spans = spans_of(order, times, comm)
    return max(end for _, end in spans) - min(start for start, _ in spans)


def longest_rank(order, times, comm=0.0):
    return max(end - start for start, end in spans_of(order, times, comm))


@pytest.mark.parametrize("name", ["forward-only", "gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_one_stage_a_rank_waits_for_the_other_ranks_once(name, ranks, microbatches):
    work = {"forward-only": 1}.get(name, 3)
    expected = (microbatches + ranks - 1) * work
    assert makespan(order_of(name, ranks, microbatches), equal()) == expected


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs"])
@pytest.mark.parametrize(("ranks", "rounds"), list(product(range(2, 7), (2, 3))))
def test_chunks_divide_the_bubble(name, chunks, ranks, rounds):
    microbatches = ranks * rounds
    order = order_of(name, ranks, microbatches, chunks)
    ideal = 3 * microbatches
    assert makespan(order, equal(1 / chunks)) == pytest.approx(ideal + 3 * (ranks - 1) / chunks)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_zb_h1_waits_a_third_of_1f1b(ranks, microbatches):
    # (p - 1)(F + I - W); 1F1B has (p - 1)(F + I + W).
    order = order_of("zb-h1", ranks, microbatches)
    assert longest_rank(order, equal()) == 3 * microbatches + (ranks - 1)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_zb_h2_and_zbv_never_wait_between_a_ranks_first_pass_and_its_last(ranks, microbatches):
    # (p - 1)(F + I - 2W); over all ranks the starts still lie p - 1 passes apart.
    for name, each in (("zb-h2", 1.0), ("zbv", 0.5)):
        order = order_of(name, ranks, microbatches)
        assert longest_rank(order, equal(each)) == 3 * microbatches
        assert makespan(order, equal(each)) == 3 * microbatches + (ranks - 1) * each


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [16, 24])
def test_dualpipe_v_waits_as_deepseek_says(ranks, microbatches):
    # (PP/2 - 1)(F&B + B - 3W), B the full backward pass; half of it if a pair's F left early.
    order = order_of("dualpipe-v", ranks, microbatches)
    assert makespan(order, equal()) - 6 * microbatches == (ranks - 1) * (3 + 2 - 3)


# Zero Bubble (arXiv 2401.10241), its own profiles in ms: p, m, F, I, W, comm → 1F1B, ZB-H1, ZB-H2.
PUBLISHED = [
    ((8, 24, 18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    ((8, 32, 18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837)),
    ((8, 64, 18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444)),
    ((16, 48, 11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
    ((16, 64, 11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088, 0.0516)),
    ((16, 128, 11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576, 0.0266)),
]


@pytest.mark.parametrize(("setting", "bubbles"), PUBLISHED)
def test_the_zero_bubble_papers_own_bubbles_come_out_to_four_digits(setting, bubbles):
    ranks, microbatches, forward, inputs, weights, comm = setting
    times = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
    ideal = microbatches * (forward + inputs + weights)
    for name, bubble in zip(("1f1b", "zb-h1", "zb-h2"), bubbles, strict=True):
        span = longest_rank(order_of(name, ranks, microbatches), times, comm)
        assert 1 - ideal / span == pytest.approx(bubble, abs=0.5e-4)


def forwards_before_backwards(actions):
    return next(n for n, action in enumerate(actions) if action.kind != "F")


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_the_warm_up_of_zb_h1_and_zb_h2_is_the_papers(ranks, microbatches):
    h1, h2 = (order_of(name, ranks, microbatches) for name in ("zb-h1", "zb-h2"))
    assert [forwards_before_backwards(rank) for rank in h1] == list(range(ranks, 0, -1))
    assert [forwards_before_backwards(rank) for rank in h2] == list(range(2 * ranks - 1, 0, -2))
